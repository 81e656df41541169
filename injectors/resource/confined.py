"""`confined.py {"memlock": BYTES, "shm": BYTES} COMMAND...`: becomes the command, with less locked memory or a smaller /dev/shm.

Run as `python -I -S`, standard library only: no hook gets into it, and the pid stays the rank's.
"""

import ctypes
import json
import os
import resource
import sys

CLONE_NEWNS = 0x20000
MS_REC_PRIVATE = 0x4000 | 0x40000
PR_CAPBSET_DROP = 24
CAP_IPC_LOCK = 14

libc = ctypes.CDLL(None, use_errno=True)


def check(result: int, what: str) -> None:
    if result != 0:
        sys.exit(f"dtprobe: {what}: {os.strerror(ctypes.get_errno())}")


def memlock(limit: int) -> None:
    """The limit, and no right to pass it by: what root executes has only capabilities of the bounding set (capabilities(7))."""
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (limit, limit))
    if os.geteuid() == 0:
        check(libc.prctl(PR_CAPBSET_DROP, ctypes.c_ulong(CAP_IPC_LOCK), 0, 0, 0), "cannot drop CAP_IPC_LOCK")


def shm(size: int) -> None:
    """A mount namespace of its own, which dies with its last process, with a small tmpfs on /dev/shm."""
    check(libc.unshare(CLONE_NEWNS), "cannot make a mount namespace")
    check(libc.mount(None, b"/", None, ctypes.c_ulong(MS_REC_PRIVATE), None), "cannot make mounts private")
    check(
        libc.mount(b"dtprobe", b"/dev/shm", b"tmpfs", ctypes.c_ulong(0), b"mode=1777,size=%d" % size), "cannot mount /dev/shm"
    )


if __name__ == "__main__":
    for name, amount in json.loads(sys.argv[1]).items():
        {"memlock": memlock, "shm": shm}[name](amount)
    try:
        os.execvp(sys.argv[2], sys.argv[2:])
    except OSError as error:
        sys.exit(f"cannot execute {sys.argv[2]}: {error.strerror}")
