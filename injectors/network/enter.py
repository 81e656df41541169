"""In front of a rank's program: moves it into its network namespace, tells it the names there, becomes the program.

`python -I -S enter.py PREFIX SUBNET RANK_FOLDER PROGRAM...`; any other folder than a rank's means the launcher, which joins the bridge.
"""

from __future__ import annotations

import ctypes
import os
import sys

CLONE_NEWNET = 0x40000000
DEVICE = "dtp0"
BRIDGE_HOST = "254"


def enter(name: str) -> None:
    """Into the namespace `/run/netns/<name>`. Raises OSError."""
    descriptor = os.open(f"/run/netns/{name}", os.O_RDONLY | os.O_CLOEXEC)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(descriptor, CLONE_NEWNET) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    os.close(descriptor)


def main(prefix: str, subnet: str, folder: str, *argv: str) -> None:
    environ = dict(os.environ)
    last = folder.rpartition("/")[2]
    rank = last.removeprefix("rank") if last.startswith("rank") else None
    try:
        enter(f"{prefix}-{'sw' if rank is None else rank}")
    except OSError as error:
        sys.exit(f"dtprobe: rank {rank} cannot enter its network namespace: {error.strerror}")
    if rank is not None:
        environ.update({name: DEVICE for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME")})
        agent = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        # The store is rank 0's, or that of torchrun's agent at the bridge; both listen at every address they have.
        environ["MASTER_ADDR"] = subnet + (BRIDGE_HOST if agent else "1")
    try:
        os.execvpe(argv[0], argv, environ)
    except OSError as error:
        sys.exit(f"cannot execute {argv[0]}: {error.strerror}")


if __name__ == "__main__":
    main(*sys.argv[1:])
