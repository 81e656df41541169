"""In front of a rank's program: puts the rank's view over the folder, in a mount namespace of its own, becomes the program.

`python -I -S enter.py FOLDER SOCKET LOG INDEX ROOT RANKFOLDER PROGRAM...`; where it cannot, it says why in the log, and the
program sees the folder as it is. The namespace ends with its last process, and the view's mount in it.
"""

from __future__ import annotations

import array
import ctypes
import json
import os
import socket
import sys
import time

ANSWER_S = 60.0
CLONE_NEWNS = 0x20000
MS_REC_SLAVE = 0x4000 | 0x80000
MOVE_MOUNT = 429
"""The same number on every architecture (kernel 5.2)."""
MOVE_MOUNT_F_EMPTY_PATH = 4
AT_FDCWD = -100


def view(folder: str, name: str, rank: int | None) -> int:
    """The descriptor of the rank's view. Raises OSError and ValueError."""
    here = os.open(".", os.O_RDONLY)
    try:
        os.chdir(folder)
        with socket.socket(socket.AF_UNIX) as channel:
            channel.settimeout(ANSWER_S)
            channel.connect(name)
            channel.sendall((json.dumps({"rank": rank}) + "\n").encode())
            answer, ancillary, _, _ = channel.recvmsg(1 << 16, socket.CMSG_SPACE(4))
    finally:
        os.fchdir(here)
        os.close(here)
    if problem := json.loads(answer).get("problem"):
        raise OSError(0, problem)
    return array.array("i", ancillary[0][2])[0]


def cover(root: str, tree: int) -> None:
    """Mount the view over the folder, for this process and what it starts. Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)

    def call(result: int) -> None:
        if result < 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

    call(libc.unshare(CLONE_NEWNS))
    call(libc.mount(None, b"/", None, ctypes.c_ulong(MS_REC_SLAVE), None))
    call(libc.syscall(MOVE_MOUNT, tree, b"", AT_FDCWD, os.fsencode(root), MOVE_MOUNT_F_EMPTY_PATH))
    # Who stands in the folder would go on seeing what is below the view.
    os.chdir(os.getcwd())  # noqa: PTH109  a rank's start waits for every import here


def main(folder: str, name: str, log: str, index: str, root: str, rank_folder: str, *argv: str) -> None:
    number = rank_folder.rpartition("/rank")[2]
    rank = int(number) if number.isdigit() else None
    try:
        cover(root, view(folder, name, rank))
    except (OSError, ValueError, IndexError) as error:
        who = "the command" if rank is None else f"rank {rank}"
        line = {"kind": "refused", "t_ns": time.time_ns(), "index": int(index), "rank": rank}
        line["detail"] = f"{who} has no view of {root}: {getattr(error, 'strerror', None) or error}"
        with open(log, "a", encoding="utf-8") as file:  # noqa: PTH123
            file.write(json.dumps(line) + "\n")
    try:
        os.execvp(argv[0], argv)
    except OSError as error:
        sys.exit(f"cannot execute {argv[0]}: {error.strerror}")


if __name__ == "__main__":
    main(*sys.argv[1:])
