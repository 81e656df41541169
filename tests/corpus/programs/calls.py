"""Known system calls, for strace: see README.md for what a reader must find."""

import os
import signal
import socket
import threading
import time

left, right = socket.socketpair()
thread = threading.Thread(target=lambda: (time.sleep(0.05), left.send(b'hi, "there" (x) = 3\n')))
thread.start()
right.recv(10)  # unfinished, then resumed
thread.join()
signal.signal(signal.SIGALRM, lambda *_: None)
signal.setitimer(signal.ITIMER_REAL, 0.02)
time.sleep(0.05)  # interrupted and restarted
for name in ('/nope/a,b(c) = "d"', "/nope/caf\u00e9"):
    try:  # noqa: SIM105  contextlib would add its own calls to the recording
        os.open(name, os.O_RDONLY)
    except FileNotFoundError:
        pass
listening = socket.create_server(("127.0.0.1", 0))
connected = socket.create_connection(listening.getsockname())
accepted, _ = listening.accept()
child = os.fork()
if child == 0:
    os.execv("/bin/sh", ["sh", "-c", "true; kill -TERM $$"])
os.waitpid(child, 0)
