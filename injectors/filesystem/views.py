"""The helper: one view for each rank that asks, handed over as a mount that no table of mounts shows but the rank's own.

Two processes: the first is who the harness waits for; the second serves. After `stop` the first ends, and the
second goes on without faults, so that ranks which still run meet no dead file system; it ends with the run's processes.
The views are mounted in a namespace of its own: nothing is left to unmount, however anybody dies.
"""

from __future__ import annotations

import array
import ctypes
import json
import os
import signal
import socket
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mfusepy
from view import Mount, View

from dtprobe.inject.helper import Log, Windows, listen

READY_S = 30.0
PR_SET_PDEATHSIG = 1
CLONE_NEWNS = 0x20000
MS_REC_SLAVE = 0x4000 | 0x80000
OPEN_TREE = 428
"""The same number on every architecture (kernel 5.2)."""
OPEN_TREE_CLONE = 1
AT_FDCWD = -100
THREADS = 128
"""Calls of one view that may wait at once: libfuse 3.12 and later stop at ten where nothing is said."""
IDLE_THREADS = 10
"""libfuse's own default, which 3.14 calls invalid where it is not said."""

libc = ctypes.CDLL(None, use_errno=True)


class Server:
    """All views of one folder."""

    def __init__(self, config: Mapping[str, Any], log: Log) -> None:
        self.config = config
        self.log = log
        self.root = Path(config["root"])
        self.windows = Windows(config["parts"])
        self.stopped = threading.Event()
        self._views: dict[int | None, View] = {}
        self._trees: dict[int | None, int] = {}

    def serve(self, channel: socket.socket) -> None:
        """Hand a view to each rank that asks on the socket, for ever."""
        while True:
            one, _ = channel.accept()
            with one:
                try:
                    rank = json.loads(one.recv(1 << 16))["rank"]
                    tree = self._tree(rank)
                    one.sendmsg([b"{}\n"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [tree]))])
                except (OSError, ValueError) as error:
                    one.sendall((json.dumps({"problem": str(error)}) + "\n").encode())

    def command(self, command: Mapping[str, Any]) -> None:
        if command["do"] == "stop":
            self.stopped.set()
            for view in list(self._views.values()):
                view.stop()
        else:
            self.windows.turn(command["index"], command["rank"], command["do"] == "begin")

    def _tree(self, rank: int | None) -> int:
        """A descriptor of the rank's view, detached: its holder may mount it where it wants."""
        if rank not in self._trees:
            place = Path(self.config["views"]) / ("command" if rank is None else f"rank{rank}")
            place.mkdir(parents=True)
            view = View(
                self.root, rank, self.config["parts"], self.windows, self.log, self.stopped, Path(self.config["spared"])
            )
            threading.Thread(target=self._mount, args=(view, place), daemon=True).start()
            if not view.ready.wait(READY_S):
                raise TimeoutError(f"libfuse did not mount the view in {READY_S:g} s")
            self._views[rank] = view
            self._trees[rank] = call(libc.syscall(OPEN_TREE, AT_FDCWD, os.fsencode(place), OPEN_TREE_CLONE | os.O_CLOEXEC))
        return self._trees[rank]

    def _mount(self, view: View, place: Path) -> None:
        options: dict[str, Any] = {"max_threads": THREADS} if mfusepy.fuse_version_minor >= 12 else {}
        options["max_idle_threads"] = IDLE_THREADS
        Mount(
            view,
            str(place),
            foreground=True,
            fsname="dtprobe",
            subtype="dtprobe",
            allow_other=True,
            default_permissions=True,
            **options,
        )


def call(result: int) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result


def serve(config: Mapping[str, Any], done: int) -> None:
    """The second process: until it is killed."""
    call(libc.prctl(PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL), 0, 0, 0))
    call(libc.unshare(CLONE_NEWNS))
    call(libc.mount(None, b"/", None, ctypes.c_ulong(MS_REC_SLAVE), None))
    os.umask(0)
    # A relative name: the folder may be longer than an address of a unix socket.
    os.chdir(config["folder"])
    channel = socket.socket(socket.AF_UNIX)
    channel.bind(config["socket"])
    channel.listen(64)
    log = Log()
    server = Server(config, log)

    def act(command: Mapping[str, Any]) -> None:
        server.command(command)
        if command["do"] == "stop":
            log.close()
            libc.prctl(PR_SET_PDEATHSIG, ctypes.c_ulong(0), 0, 0, 0)
            os.write(done, b"s")

    listen(act)
    log.say("ready")
    server.serve(channel)


def main(file: str) -> None:
    config = json.loads(Path(file).read_text(encoding="utf-8"))
    done, done_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(done)
        try:
            serve(config, done_end)
        finally:
            os._exit(1)
    os.close(done_end)
    if os.read(done, 1) != b"s":
        sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) or 1)


if __name__ == "__main__":
    main(sys.argv[1])
