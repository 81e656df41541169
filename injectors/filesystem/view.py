"""A view of a folder as a file system of its own: passes everything on, but for what the faults make of it.

One view serves one rank (or a command as a whole), from several threads. Paths begin with `/` and are those below the folder.
"""

from __future__ import annotations

import errno
import fcntl
import fnmatch
import os
import signal
import stat
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import mfusepy
from remembered import Memory

from dtprobe.inject.helper import Aim, Log, Part, Windows, hits

ATTRIBUTES = ("st_mode", "st_ino", "st_dev", "st_nlink", "st_uid", "st_gid", "st_size", "st_blocks", "st_blksize", "st_rdev")
LOOK_S = 0.05
LOCK_S = 0.01
FLOCK = "hhqqi4x"
"""`struct flock` on 64-bit Linux: l_type, l_whence, l_start, l_len, l_pid (fcntl(2))."""

ERRORS = {"eio": errno.EIO, "enospc": errno.ENOSPC}
HIDDEN = ".fuse_hidden"
"""Names under which libfuse would keep what is removed while it is open."""

NOW, OMIT = (1 << 30) - 1, (1 << 30) - 2
"""UTIME_NOW and UTIME_OMIT of utimensat(2), in place of nanoseconds."""


class View(mfusepy.Operations):
    """The folder `root` as one rank sees it. `spared` is a folder in which no fault meets anything."""

    use_ns = True

    def __init__(
        self,
        root: Path,
        rank: int | None,
        parts: Sequence[Part],
        windows: Windows,
        log: Log,
        stopped: threading.Event,
        spared: Path,
    ) -> None:
        self.ready = threading.Event()
        self._root = str(root)
        self._rank = rank
        self._log = log
        self._stopped = stopped
        self._spared = f"/{spared.relative_to(root)}/" if spared.is_relative_to(root) else None
        self._lock = threading.Lock()
        self._owned: dict[tuple[int, int], int] = {}
        self._removed: dict[str, tuple[int, str]] = {}
        mine = [part for part in parts if hits(part, rank)]
        self._faults = [(part, Aim(part, rank, windows)) for part in mine if part["action"] != "cache"]
        self._memories = [
            Memory(part, rank, partial(self._remembers, part, windows), log) for part in mine if part["action"] == "cache"
        ]

    def stop(self) -> None:
        """Faults are over; the view goes on passing everything on."""
        for memory in self._memories:
            memory.close()

    # Faults

    def _remembers(self, part: Part, windows: Windows, path: str) -> bool:
        meant = _matches(part, path) and not self._is_spared(path)
        return meant and windows.on(part["index"], self._rank) and not self._stopped.is_set()

    def _is_spared(self, path: str) -> bool:
        return self._spared is not None and f"{path}/".startswith(self._spared)

    def _meet(self, call: str, path: str, detail: str = "") -> list[tuple[Part, int]]:
        """Wait or raise OSError as the faults want it; those that change what is written are the caller's."""
        path = self._removed[path][1] if path in self._removed else path
        if self._stopped.is_set() or self._is_spared(path):
            return []
        with self._lock:
            met = [
                (part, nth)
                for part, aim in self._faults
                if call in part["calls"] and _matches(part, path) and (nth := aim.meets(call)) is not None
            ]
        left = []
        for part, nth in met:
            if part["action"] == "delay":
                number = self._log.fired(part["index"], self._rank, call=call, nth=nth, detail=path + detail)
                try:
                    self._wait(part["seconds"])
                finally:
                    self._log.ended(number)
            elif part["action"] in ERRORS:
                self._log.fired(part["index"], self._rank, call=call, nth=nth, detail=path + detail)
                raise OSError(ERRORS[part["action"]], path)
            else:
                left.append((part, nth))
        return left

    def _wait(self, seconds: float) -> None:
        give_up = time.monotonic() + seconds
        while (left_s := give_up - time.monotonic()) > 0 and not self._stopped.wait(min(left_s, LOOK_S)):
            _let_the_killed_go()

    def _forget(self, *paths: str) -> None:
        """The client itself has changed these, and the folders that they lie in."""
        for memory in self._memories:
            memory.forget(*paths, *(path.rpartition("/")[0] or "/" for path in paths))

    @contextmanager
    def _refused(self, path: str) -> Iterator[None]:
        """Where making a name is refused because it is there, the client knows so from then on, as NFS's and FUSE's do."""
        try:
            yield
        except FileExistsError:
            self._forget(path)
            raise

    def _real(self, path: str) -> str:
        return self._root + path

    def _at(self, path: str) -> dict[str, Any]:
        """Where to act, for functions of `os` that take a path or a descriptor: on a link itself, not on what it leads to."""
        if path in self._removed:
            return {"path": self._removed[path][0]}
        return {"path": self._real(path), "follow_symlinks": False}

    # What is asked

    def init_with_config(self, conn_info: Any, config: Any) -> None:
        """The kernel remembers nothing."""
        for name in ("entry_timeout", "negative_timeout", "attr_timeout"):
            setattr(config, name, 0.0)
        config.use_ino = 1
        self.ready.set()

    def getattr(self, path: str, fh: int | None = None) -> Any:
        self._meet("getattr", path)
        if path in self._removed:
            return _attributes(os.stat(**self._at(path)))
        fetch: Callable[[], Any] = lambda: _attributes(os.stat(**self._at(path)))  # noqa: E731
        for memory in self._memories:
            fetch = partial(memory.attributes, path, fetch)
        return fetch()

    def readdir(self, path: str, fh: int) -> list[Any]:
        self._meet("readdir", path)
        fetch: Callable[[], list[Any]] = lambda: _names(self._real(path))  # noqa: E731
        for memory in self._memories:
            fetch = partial(memory.listing, path, fetch)
        # A name without a number of its file would not be shown: those of the two need not be right.
        dots = [(name, stat.S_IFDIR, 1) for name in (".", "..")]
        return [(name, {"st_mode": mode, "st_ino": number}, 0) for name, mode, number in [*dots, *fetch()]]

    def readlink(self, path: str) -> str:
        self._meet("readlink", path)
        return os.readlink(self._real(path))  # noqa: PTH115

    def statfs(self, path: str) -> dict[str, int]:
        self._meet("statfs", path)
        found = os.statvfs(self._root)
        return {name: getattr(found, name) for name in dir(found) if name.startswith("f_")}

    # What is changed

    def create(self, path: str, mode: int, fi: Any = None) -> int:
        self._meet("create", path)
        with self._refused(path):
            made = os.open(self._real(path), (fi & ~os.O_DIRECT) | os.O_CREAT | os.O_CLOEXEC, mode)
        self._made(path)
        return made

    def mkdir(self, path: str, mode: int) -> int:
        self._meet("mkdir", path)
        with self._refused(path):
            os.mkdir(self._real(path), mode)  # noqa: PTH102
        return self._made(path)

    def mknod(self, path: str, mode: int, dev: int) -> int:
        self._meet("create", path)
        with self._refused(path):
            os.mknod(self._real(path), mode, dev)
        return self._made(path)

    def symlink(self, target: str, source: str) -> int:
        self._meet("symlink", target)
        with self._refused(target):
            os.symlink(source, self._real(target))  # noqa: PTH211
        return self._made(target)

    def link(self, target: str, source: str) -> int:
        self._meet("link", target)
        with self._refused(target):
            os.link(self._real(source), self._real(target), follow_symlinks=False)
        self._forget(target, source)
        return 0

    def unlink(self, path: str) -> int:
        if path in self._removed:
            os.close(self._removed.pop(path)[0])
            return 0
        self._meet("unlink", path)
        os.unlink(self._real(path))  # noqa: PTH108
        self._forget(path)
        return 0

    def rmdir(self, path: str) -> int:
        self._meet("rmdir", path)
        os.rmdir(self._real(path))  # noqa: PTH106
        self._forget(path)
        return 0

    def rename(self, old: str, new: str) -> int:
        if new.rpartition("/")[2].startswith(HIDDEN):
            return self._removed_while_open(old, new)
        self._meet("rename", old)
        os.rename(self._real(old), self._real(new))  # noqa: PTH104
        self._forget(old, new)
        return 0

    def _removed_while_open(self, path: str, hidden: str) -> int:
        """libfuse hides such a file under another name until it is closed. Here it is gone at once, and a descriptor is kept:
        a helper that is killed leaves nothing in somebody's folder."""
        self._meet("unlink", path)
        try:
            kept = os.open(self._real(path), os.O_RDWR | os.O_CLOEXEC)
        except OSError:  # it is being executed
            kept = os.open(self._real(path), os.O_RDONLY | os.O_CLOEXEC)
        os.unlink(self._real(path))  # noqa: PTH108
        self._removed[hidden] = (kept, path)
        self._forget(path)
        return 0

    def chmod(self, path: str, mode: int) -> int:
        self._meet("chmod", path)
        os.chmod(self._at(path)["path"], mode)  # noqa: PTH101
        self._forget(path)
        return 0

    def chown(self, path: str, uid: int, gid: int) -> int:
        self._meet("chown", path)
        os.chown(uid=uid, gid=gid, **self._at(path))
        self._forget(path)
        return 0

    def utimens(self, path: str, times: Any = None) -> int:
        self._meet("utimens", path)
        if times is not None:
            before, now = os.stat(**self._at(path)), time.time_ns()
            old = (before.st_atime_ns, before.st_mtime_ns)
            times = tuple({NOW: now, OMIT: was}.get(new, new) for new, was in zip(times, old, strict=True))
        os.utime(ns=times, **self._at(path))
        self._forget(path)
        return 0

    def truncate(self, path: str, length: int, fh: int | None = None) -> int:
        self._meet("truncate", path)
        os.truncate(self._at(path)["path"], length)
        self._forget(path)
        return 0

    def fallocate(self, path: str, mode: int, offset: int, size: int, fh: int) -> int:
        self._meet("fallocate", path)
        if mode:
            raise OSError(errno.EOPNOTSUPP, "only a plain allocation is passed on")
        os.posix_fallocate(fh, offset, size)
        self._forget(path)
        return 0

    # Open files: the handle is the descriptor of the real one

    def open(self, path: str, flags: int) -> int:
        self._meet("open", path)
        # Pages come and go as the kernel wants: they are not aligned as O_DIRECT asks.
        handle = os.open(self._real(path), (flags & ~os.O_DIRECT) | os.O_CLOEXEC)
        for memory in self._memories:
            if memory.close_to_open or flags & os.O_TRUNC:
                memory.forget(path)
        return handle

    def read(self, path: str, size: int, offset: int, fh: int) -> bytes:
        self._meet("read", path, f": {size} bytes at {offset}")
        return os.pread(fh, size, offset)

    def write(self, path: str, data: bytes, offset: int, fh: int) -> int:
        kept = data
        for part, nth in self._meet("write", path, f": {len(data)} bytes at {offset}"):
            least = len(data) // 2 if part.get("bytes") is None else part["bytes"]
            kept = b"" if part["action"] == "lost" else kept[:least]
            detail = f"{path}: {len(kept)} of {len(data)} bytes at {offset} are written"
            self._log.fired(part["index"], self._rank, call="write", nth=nth, detail=detail)
        done = 0
        while done < len(kept):
            done += os.pwrite(fh, kept[done:], offset + done)
        self._forget(path)
        return len(data)

    def flush(self, path: str, fh: int) -> int:
        self._meet("flush", path)
        return 0

    def fsync(self, path: str, datasync: int, fh: int) -> int:
        self._meet("fsync", path)
        (os.fdatasync if datasync else os.fsync)(fh)
        return 0

    def release(self, path: str, fh: int) -> int:
        os.close(fh)
        return 0

    # Locks hold between views, as they do between clients of one server

    def flock(self, path: str, fh: int, op: int) -> int:
        self._meet("lock", path)
        _locked(lambda: fcntl.flock(fh, op | fcntl.LOCK_NB), wait=not op & fcntl.LOCK_NB)
        return 0

    def lock(self, path: str, fh: int, cmd: int, lock: Any, owner: int = 0) -> int:
        """A lock of fcntl(2): each owner (the open files of a process) has a descriptor of its own for the file."""
        key = (os.fstat(fh).st_ino, owner)
        if lock.l_type == fcntl.F_UNLCK and key not in self._owned:
            return 0
        if lock.l_type != fcntl.F_UNLCK:
            self._meet("lock", path)
        with self._lock:
            if key not in self._owned:
                self._owned[key] = os.open(f"/proc/self/fd/{fh}", os.O_RDWR | os.O_CLOEXEC)
            own = self._owned[key]
        asked = struct.pack(FLOCK, lock.l_type, lock.l_whence, lock.l_start, lock.l_len, 0)
        if cmd == fcntl.F_GETLK:
            answer = struct.unpack(FLOCK, fcntl.fcntl(own, fcntl.F_OFD_GETLK, asked))
            lock.l_type, lock.l_whence, lock.l_start, lock.l_len, lock.l_pid = answer
            return 0
        _locked(lambda: fcntl.fcntl(own, fcntl.F_OFD_SETLK, asked), wait=cmd == fcntl.F_SETLKW)
        if lock.l_type == fcntl.F_UNLCK and (lock.l_start, lock.l_len) == (0, 0):
            with self._lock, suppress(OSError):
                os.close(self._owned.pop(key))
        return 0

    def _made(self, path: str) -> int:
        """Something new belongs to who asked for it."""
        uid, gid, _ = mfusepy.fuse_get_context()
        if (uid, gid) != (os.geteuid(), os.getegid()):
            os.chown(self._real(path), uid, gid, follow_symlinks=False)
        self._forget(path)
        return 0


class Mount(mfusepy.FUSE):
    """What mfusepy 3.1 leaves out: the owner of a lock, and the flags of a rename."""

    def rename_fuse_3(self, old: bytes, new: bytes, flags: int) -> int:
        # As NFS: to exchange two files, or to spare one that is there, is not offered.
        return -errno.EINVAL if flags else self.rename_fuse_2(old, new)

    def lock(self, path: bytes, fip: Any, cmd: int, lock: Any) -> int:
        opened = fip.contents
        name = path.decode(self.encoding, self.errors)
        return self.operations.lock(name, opened.fh, cmd, lock.contents, opened.lock_owner)


def _matches(part: Part, path: str) -> bool:
    """A pattern without a slash is for the last name, one with it for the whole path below the folder."""
    pattern = part["files"]
    return fnmatch.fnmatchcase(path.strip("/") if "/" in pattern else path.rpartition("/")[2], pattern)


def _attributes(found: os.stat_result) -> dict[str, Any]:
    times = {f"st_{name}": getattr(found, f"st_{name}_ns") for name in ("atime", "mtime", "ctime")}
    return {**{name: getattr(found, name) for name in ATTRIBUTES}, **times}


def _names(folder: str) -> list[tuple[str, int, int]]:
    """Name, type and number of what is in a folder."""
    with os.scandir(folder) as entries:
        return [(one.name, stat.S_IFMT(one.stat(follow_symlinks=False).st_mode), one.inode()) for one in entries]


def _locked(attempt: Callable[[], Any], *, wait: bool) -> None:
    while True:
        try:
            attempt()
            return
        except BlockingIOError:
            if not wait:
                raise
        time.sleep(LOCK_S)
        _let_the_killed_go()


def _let_the_killed_go() -> None:
    """Raise OSError where the caller is being killed, who could not die before. Others wait on, as with a hard NFS mount."""
    if not mfusepy._libfuse.fuse_interrupted():
        return
    try:
        status = Path(f"/proc/{mfusepy.fuse_get_context()[2]}/status").read_text(encoding="ascii", errors="replace")
    except OSError:
        raise OSError(errno.EINTR, "the caller is gone") from None
    pending = next(int(line.split()[1], 16) for line in status.splitlines() if line.startswith("SigPnd:"))
    if pending >> (signal.SIGKILL - 1) & 1:
        raise OSError(errno.EINTR, "the caller is being killed")
