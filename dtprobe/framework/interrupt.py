"""Ctrl-C while a collective waits: the signal ends the wait instead of being served at the collective's timeout.

Python runs signal handlers in the main thread between bytecodes, and a thread inside gloo executes none. A second thread
learns of the signal through the wake-up descriptor and aborts the group; the main thread comes back and the handler runs.
"""

from __future__ import annotations

import contextlib
import signal
import socket
import threading
from collections.abc import Iterator

from dtprobe.errors import UsageError
from dtprobe.framework.groups import ScopedGroup


@contextlib.contextmanager
def interruptible(*groups: ScopedGroup, signals: tuple[signal.Signals, ...] = (signal.SIGINT,)) -> Iterator[None]:
    """Within the block one of `signals` aborts everything in flight on `groups`, so that its Python handler runs at once.

    Enter it in the main thread (Python allows no other to set the wake-up descriptor; UsageError). The groups are of no use after an abort.
    """
    if threading.current_thread() is not threading.main_thread():
        raise UsageError("interruptible() was entered in another thread than the main one", "enter it in the main thread")
    wake, told = socket.socketpair()
    told.setblocking(False)
    previous = signal.set_wakeup_fd(told.fileno(), warn_on_full_buffer=False)

    def watch() -> None:
        while number := wake.recv(1):
            if number[0] in signals:
                for group in groups:
                    group.abort()

    watcher = threading.Thread(target=watch, name="dtprobe-interrupt", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(previous)
        told.close()  # the watcher reads the end of the stream
        watcher.join()
        wake.close()
