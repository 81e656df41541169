"""`filtered.py {"errno": 28, "calls": ["fsync"]} COMMAND...`: becomes the command, whose chosen system calls fail in the kernel.

A seccomp filter by libseccomp, without ptrace and without root; children and later programs inherit it, nothing takes it off. Run
as `python -I -S`, standard library only: no hook gets into it, and the pid stays the rank's.
"""

import ctypes
import json
import os
import sys

LIBRARY = "libseccomp.so.2"
ALLOW = 0x7FFF0000
ERRNO = 0x00050000


def library() -> ctypes.CDLL:
    """libseccomp with its signatures. Raises OSError where it is not installed."""
    seccomp = ctypes.CDLL(LIBRARY)
    seccomp.seccomp_init.restype = ctypes.c_void_p
    seccomp.seccomp_init.argtypes = (ctypes.c_uint32,)
    seccomp.seccomp_rule_add_array.argtypes = (ctypes.c_void_p, ctypes.c_uint32, ctypes.c_int, ctypes.c_uint, ctypes.c_void_p)
    seccomp.seccomp_load.argtypes = (ctypes.c_void_p,)
    return seccomp


def number(seccomp: ctypes.CDLL, name: str) -> int:
    """The call's number here; negative for one that does not exist."""
    return seccomp.seccomp_syscall_resolve_name(name.encode())


if __name__ == "__main__":
    plan = json.loads(sys.argv[1])
    seccomp = library()
    context = seccomp.seccomp_init(ALLOW)
    for name in plan["calls"]:
        if seccomp.seccomp_rule_add_array(context, ERRNO | plan["errno"], number(seccomp, name), 0, None) != 0:
            sys.exit(f"dtprobe: no filter for {name}")
    if (failed := seccomp.seccomp_load(context)) != 0:
        sys.exit(f"dtprobe: the kernel takes no filter: {os.strerror(-failed)}")
    try:
        os.execvp(sys.argv[2], sys.argv[2:])
    except OSError as error:
        sys.exit(f"cannot execute {sys.argv[2]}: {error.strerror}")
