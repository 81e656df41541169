"""A file store for jobs that share only a folder: what `torch.distributed.FileStore` promises, without its races.

torch's FileStore keeps one file for ever: a torn record makes `get` spin at full load ignoring its timeout, the file of a
killed run joins the next one (13 of 20 starts failed), and two jobs on one path become one group. Here each run and attempt
has a folder of its own, each rank claims its number in the log there under the lock, every record carries a checksum, every
wait has a deadline, and the folder goes when the job ends.

Nothing is believed that a client of a shared file system (NFS, FUSE) may answer from memory: no name is looked for before it
is there, and every look at the log asks the server for its size anew.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import shutil
import socket
import struct
import threading
import time
import zlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from types import TracebackType

import torch.distributed as dist

from dtprobe.errors import UsageError
from dtprobe.framework.errors import FrameworkError, RankError

_HEAD = struct.Struct("<4sIIii")  # magic, crc of all that follows, body length, writing rank, key length (negative: deleted)
_MAGIC = b"dtp1"
_SAFE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}")
_POLL_S, _POLL_MOST_S = 0.002, 0.05
_REMOVAL_S = 1.0
_CLAIM = "dtprobe.claim."
"""With a rank's number: the key of its claim. Not counted among the keys."""

_OPEN: set[SafeFileStore] = set()
"""Stores in use: c10d keeps only the C++ half of a store, and every call would fail once Python dropped its own half."""


class StaleStore(RankError):
    """A rank's number in this run and attempt is taken already, or claimed for another world size: by another process."""


class TornRecord(FrameworkError):
    """The store's log holds a record that was cut short or altered: its writer died, the disk is full, or it was edited."""


@dataclass(frozen=True)
class Claim:
    """Who took a rank: one process."""

    run: str
    attempt: int
    rank: int
    world_size: int
    host: str
    pid: int

    def __str__(self) -> str:
        return f"rank {self.rank} of {self.world_size}, pid {self.pid} on {self.host}"


class SafeFileStore(dist.Store):
    """A c10d store in `<folder>/<run>.<attempt>`: give it to `init_process_group(store=...)`, close it at the end.

    `run` names this run and no other (a launcher's job id), `attempt` counts its restarts. Each rank claims its number, and
    raises StaleStore where it is taken; all wait for rank 0's claim. `timeout_s` bounds every wait, also that for the lock, and
    ends in `torch.distributed.DistStoreError`. Usable as a context manager. The file system's locks must hold between the hosts.
    """

    def __init__(self, folder: Path | str, *, run: str, attempt: int = 0, rank: int, world_size: int, timeout_s: float = 60.0):
        super().__init__()
        if not _SAFE_NAME.fullmatch(run) or not 0 <= rank < world_size or attempt < 0:
            raise UsageError(
                f"run {run!r}, attempt {attempt}, rank {rank} of {world_size} do not name a store",
                "run: letters, digits, '.', '_', '-'; 0 <= rank < world_size",
            )
        self.folder = Path(folder) / f"{run}.{attempt}"
        self.claim = Claim(run, attempt, rank, world_size, socket.gethostname(), os.getpid())
        self._timeout_s = timeout_s
        self._known: dict[str, bytes] = {}
        self._read_to = 0
        self._turn = threading.RLock()
        self._file = -1
        self._join()
        _OPEN.add(self)

    # claims

    def _join(self) -> None:
        self._file = _log_of(self.folder, time.monotonic() + self._timeout_s)
        try:
            self._take_rank()
            try:
                self.wait([_claimed(0)])
            except dist.DistStoreError:
                self._withdraw()
                raise dist.DistStoreError(
                    f"rank 0 did not come to {self.folder} within {self._timeout_s:g} s; see that it started, and that the "
                    "folder is on a file system both hosts share"
                ) from None
        except BaseException:
            os.close(self._file)
            raise

    def _take_rank(self) -> None:
        rank = self.claim.rank
        with self._locked():
            found = {other.rank: other for other in self._claims()}
            differ = next((other for other in found.values() if other.world_size != self.claim.world_size), None)
            if differ is not None:
                raise StaleStore(
                    f"world sizes differ: {differ} came to {self.folder}, this is {self.claim}",
                    "start all ranks of one job with one world size",
                    ranks=(rank,),
                )
            if rank in found:
                raise StaleStore(
                    f"rank {rank} of run {self.claim.run!r} is taken in {self.folder} by {found[rank]}; this is {self.claim}",
                    "choose another run id or attempt, or remove the folder once that run is dead; or two processes have one rank",
                    ranks=(rank,),
                )
            self._append(_claimed(rank), json.dumps(asdict(self.claim)).encode())

    def _claims(self) -> list[Claim]:
        return [Claim(**json.loads(value)) for key, value in self._known.items() if key.startswith(_CLAIM)]

    def _withdraw(self) -> None:
        """Give the rank back, and take the folder along where nobody else has come."""
        with self._locked():
            self._append(_claimed(self.claim.rank), None)
            if not self._claims():
                shutil.rmtree(self.folder, ignore_errors=True)

    # c10d's store interface

    def set(self, key: str, value: str | bytes) -> None:
        with self._locked():
            self._append(key, _bytes(value))

    def get(self, key: str) -> bytes:
        self.wait([key])
        with self._turn:
            return self._known[key]

    def add(self, key: str, amount: int) -> int:
        with self._locked():
            total = int(self._known.get(key, b"0")) + amount
            self._append(key, b"%d" % total)
            return total

    def append(self, key: str, value: str | bytes) -> None:
        with self._locked():
            self._append(key, self._known.get(key, b"") + _bytes(value))

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        with self._locked():
            current = self._known.get(key)
            if current is None and _bytes(expected):
                return _bytes(expected)
            if current is not None and current != _bytes(expected):
                return current
            self._append(key, _bytes(desired))
            return _bytes(desired)

    def check(self, keys: list[str]) -> bool:
        with self._locked(exclusive=False):
            return all(key in self._known for key in keys)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        limit_s = self._timeout_s if timeout is None else timeout.total_seconds()
        deadline = time.monotonic() + limit_s
        for pause_s in _pauses():
            if self.check(keys):
                return
            if time.monotonic() > deadline:
                absent = [key for key in keys if key not in self._known]
                raise dist.DistStoreError(f"wait timeout after {limit_s:g} s in {self.folder}, keys: {', '.join(absent)}")
            time.sleep(pause_s)

    def delete_key(self, key: str) -> bool:
        with self._locked():
            existed = key in self._known
            if existed:
                self._append(key, None)
            return existed

    deleteKey = delete_key

    def num_keys(self) -> int:
        with self._locked(exclusive=False):
            return sum(not key.startswith(_CLAIM) for key in self._known)

    getNumKeys = num_keys

    def multi_get(self, keys: list[str]) -> list[bytes]:
        self.wait(keys)
        with self._turn:
            return [self._known[key] for key in keys]

    multiGet = multi_get

    def multi_set(self, keys: list[str], values: list[str | bytes]) -> None:
        with self._locked():
            for key, value in zip(keys, values, strict=True):
                self._append(key, _bytes(value))

    multiSet = multi_set

    def has_extended_api(self) -> bool:
        return True

    hasExtendedApi = has_extended_api

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout_s = timeout.total_seconds()

    setTimeout = set_timeout

    @property
    def timeout(self) -> timedelta:
        return timedelta(seconds=self._timeout_s)

    def clone(self) -> SafeFileStore:
        """This store: its waits block nobody, so threads can share it."""
        return self

    # the end

    def close(self, *, timeout_s: float = 5.0) -> None:
        """Say goodbye; the last rank to do so removes the folder, rank 0 does so in any case after `timeout_s` seconds.

        A store that is torn or locked cannot be told goodbye; it is closed, and by rank 0 removed, all the same.
        """
        if self._file < 0:
            return
        everyone = self.claim.world_size
        try:
            left = self.add("dtprobe.left", 1)
            deadline = time.monotonic() + timeout_s
            while self.claim.rank == 0 and left < everyone and time.monotonic() < deadline:
                time.sleep(_POLL_MOST_S)
                left = self.add("dtprobe.left", 0) if self.folder.exists() else everyone
        except (FrameworkError, dist.DistError):
            left = 0
        finally:
            os.close(self._file)
            self._file = -1
            _OPEN.discard(self)
        if left >= everyone or self.claim.rank == 0:
            _removed(self.folder)

    def __enter__(self) -> SafeFileStore:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    # the log

    @contextlib.contextmanager
    def _locked(self, *, exclusive: bool = True) -> Iterator[None]:
        with self._turn, self._there():
            if self._file < 0:
                raise FrameworkError(f"the store {self.folder} is closed")
            deadline = time.monotonic() + self._timeout_s
            for pause_s in _pauses():
                try:
                    fcntl.flock(self._file, (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH) | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > deadline:
                        raise dist.DistStoreError(
                            f"{self.folder}/log has been locked for {self._timeout_s:g} s by {_lock_holder(self._file)}; "
                            "a stopped process keeps its lock, a dead one does not"
                        ) from None
                    time.sleep(pause_s)
            try:
                self._read()
                yield
            finally:
                fcntl.flock(self._file, fcntl.LOCK_UN)

    @contextlib.contextmanager
    def _there(self) -> Iterator[None]:
        """NFS has no file any more where another host removed it; a local file system keeps it for who has it open."""
        try:
            yield
        except OSError as error:
            if error.errno != errno.ESTALE:
                raise
            raise FrameworkError(
                f"{self.folder}/log was removed while in use", "see who removed it; start a new attempt"
            ) from None

    def _read(self) -> None:
        """Take in what others appended. We hold the lock, so an incomplete record is a torn one, not one being written."""
        try:
            # To set the time asks the server, whose answer brings the size: fstat alone may tell one that is seconds old, and
            # so may opening anew where a client has no close-to-open consistency.
            os.utime(self._file)
        except OSError as error:
            if error.errno != errno.ESTALE:
                raise
            raise FrameworkError(
                f"{self.folder}/log was removed while in use", "see who removed it; start a new attempt"
            ) from None
        size = os.fstat(self._file).st_size
        if size < self._read_to:
            raise TornRecord(f"{self.folder}/log shrank from {self._read_to} to {size} bytes", "start a new attempt")
        raw = os.pread(self._file, size - self._read_to, self._read_to)
        at = 0
        while at < len(raw):
            end = at + _HEAD.size
            magic, crc, length, rank, key_length = _HEAD.unpack_from(raw, at) if end <= len(raw) else (b"", 0, 0, -1, 0)
            body = raw[end : end + length]
            if magic != _MAGIC or len(body) != length or zlib.crc32(raw[at + 8 : end + length]) != crc:
                raise TornRecord(
                    f"{self.folder}/log: the record at byte {self._read_to + at} of {size} is torn"
                    + (f", written by rank {rank}" if magic == _MAGIC else ""),
                    "its writer died while writing, or the disk is full: start a new attempt",
                )
            key = body[: abs(key_length)].decode()
            if key_length < 0:
                self._known.pop(key, None)
            else:
                self._known[key] = body[key_length:]
            at = end + length
        self._read_to += len(raw)

    def _append(self, key: str, value: bytes | None) -> None:
        """Write one record, whole or not at all; the exclusive lock is held and everything before has been read."""
        name = key.encode()
        body = name + (value or b"")
        tail = struct.pack("<Iii", len(body), self.claim.rank, -len(name) if value is None else len(name)) + body
        record = _MAGIC + struct.pack("<I", zlib.crc32(tail)) + tail
        written = os.write(self._file, record)
        if written != len(record):
            os.ftruncate(self._file, self._read_to)
            raise FrameworkError(
                f"{self.folder}/log: only {written} of {len(record)} bytes could be written", "free disk space"
            )
        self._read_to += len(record)
        if value is None:
            del self._known[key]
        else:
            self._known[key] = value


def _pauses() -> Iterator[float]:
    """Lengthening pauses between looks at a shared file (seconds): quick at first, then at most 20 looks a second."""
    pause_s = _POLL_S
    while True:
        yield pause_s
        pause_s = min(pause_s * 1.5, _POLL_MOST_S)


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)


def _claimed(rank: int) -> str:
    return f"{_CLAIM}{rank}"


def _log_of(folder: Path, deadline: float) -> int:
    """The descriptor of the log in `folder`; both are made where they are not there.

    Whether they are is left to the calls that make them, for a client may go on believing that a name is not there.
    """
    for pause_s in _pauses():
        folder.parent.mkdir(parents=True, exist_ok=True)
        try:
            with contextlib.suppress(FileExistsError):
                folder.mkdir()
            return os.open(folder / "log", os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except FileNotFoundError:  # an earlier run of this name is just removing it
            if time.monotonic() > deadline:
                raise
        time.sleep(pause_s)
    raise AssertionError("unreachable: the pauses never end")


def _removed(folder: Path) -> None:
    """Remove the folder; on NFS it cannot go as long as another process of this host has the log open."""
    deadline = time.monotonic() + _REMOVAL_S
    for pause_s in _pauses():
        shutil.rmtree(folder, ignore_errors=True)
        if not folder.exists() or time.monotonic() > deadline:
            return
        time.sleep(pause_s)


def _lock_holder(file: int) -> str:
    """The process that holds a lock on this file, as far as this host's /proc/locks knows."""
    inode = os.fstat(file).st_ino
    with contextlib.suppress(OSError):
        for line in Path("/proc/locks").read_text(encoding="ascii").splitlines():
            fields = line.split()
            if len(fields) > 5 and fields[1] != "->" and fields[5].rpartition(":")[2] == str(inode):
                return f"pid {fields[4]}"
    return "a process on another host"
