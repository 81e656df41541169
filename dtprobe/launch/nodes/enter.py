"""In front of a node's agent: moves it to its own network, name and mounts, then becomes the agent (same pid).

`python -I -S enter.py NETNS NAME HOSTS PROGRAM...`: the network namespace is there already, HOSTS is what `/etc/hosts` shows there.
"""

from __future__ import annotations

import ctypes
import os
import socket
import sys

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWNET = 0x00020000, 0x04000000, 0x40000000
MS_BIND, MS_REC, MS_PRIVATE = 0x1000, 0x4000, 0x40000


def _checked(result: int) -> None:
    if result != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


def main(space: str, name: str, hosts: str, *argv: str) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    try:
        descriptor = os.open(f"/run/netns/{space}", os.O_RDONLY | os.O_CLOEXEC)
        _checked(libc.setns(descriptor, CLONE_NEWNET))
        os.close(descriptor)
        _checked(libc.unshare(CLONE_NEWUTS | CLONE_NEWNS))
        socket.sethostname(name)
        # what is mounted here stays here, and goes with the last process of the node
        _checked(libc.mount(b"none", b"/", None, ctypes.c_ulong(MS_REC | MS_PRIVATE), None))
        _checked(libc.mount(hosts.encode(), b"/etc/hosts", None, ctypes.c_ulong(MS_BIND), None))
    except OSError as error:
        sys.exit(f"dtprobe: node {name} cannot be entered: {error.strerror}")
    try:
        os.execvpe(argv[0], argv, os.environ)
    except OSError as error:
        sys.exit(f"cannot execute {argv[0]}: {error.strerror}")


if __name__ == "__main__":
    main(*sys.argv[1:])
