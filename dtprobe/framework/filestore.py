"""A file store for jobs that share only a folder: what `torch.distributed.FileStore` promises, without its races.

torch's FileStore keeps one file for ever: a torn record makes `get` spin at full load ignoring its timeout, the file of a
killed run joins the next one (13 of 20 starts failed), and two jobs on one path become one group. Here each run and attempt
has a folder of its own that one rank creates exclusively, each rank claims its number exclusively, every record carries a
checksum, every wait has a deadline, and the folder goes when the job ends.
"""

from __future__ import annotations

import contextlib
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


_OPEN: set[SafeFileStore] = set()
"""Stores in use: c10d keeps only the C++ half of a store, and every call would fail once Python dropped its own half."""


class StaleStore(RankError):
    """The folder of this run and attempt exists already, or a rank's number is taken: another process claimed it."""


class TornRecord(FrameworkError):
    """The store's log holds a record that was cut short or altered: its writer died, the disk is full, or it was edited."""


@dataclass(frozen=True)
class Claim:
    """Who made the folder or took a rank: written exclusively, by one process."""

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

    `run` names this run and no other (a launcher's job id), `attempt` counts its restarts. Rank 0 makes the folder; it
    raises StaleStore when it exists. The others wait for it. `timeout_s` bounds every wait, also that for the lock, and
    ends in `torch.distributed.DistStoreError`. Usable as a context manager.
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
        self._file = os.open(self.folder / "log", os.O_RDWR | os.O_APPEND | os.O_CLOEXEC)
        _OPEN.add(self)

    # claims

    def _join(self) -> None:
        if self.claim.rank == 0:
            try:
                self.folder.mkdir(parents=True)
            except FileExistsError:
                found = _read_claim(self.folder / "run.json")
                raise StaleStore(
                    f"{self.folder} exists already, made by {found or 'someone unknown'}; this is {self.claim}",
                    "choose another run id or attempt, or remove the folder once that run is dead",
                    ranks=(0,),
                ) from None
            (self.folder / "log").touch()
            _write_claim(self.folder / "run.json", self.claim)
        else:
            self._wait_for_folder()
        try:
            _write_claim(self.folder / f"rank{self.claim.rank}.json", self.claim)
        except FileExistsError:
            found = _read_claim(self.folder / f"rank{self.claim.rank}.json")
            raise StaleStore(
                f"rank {self.claim.rank} of run {self.claim.run!r} is taken by {found}; this is {self.claim}",
                "two jobs use one run id, or two processes one rank",
                ranks=(self.claim.rank,),
            ) from None

    def _wait_for_folder(self) -> None:
        deadline = time.monotonic() + self._timeout_s
        for pause_s in _pauses():
            found = _read_claim(self.folder / "run.json")
            if found is not None:
                if found.world_size != self.claim.world_size:
                    raise StaleStore(
                        f"world sizes differ: {found} made {self.folder}, this is {self.claim}",
                        "start all ranks of one job with one world size",
                        ranks=(self.claim.rank,),
                    )
                return
            if time.monotonic() > deadline:
                raise dist.DistStoreError(
                    f"rank 0 did not make {self.folder} within {self._timeout_s:g} s; see that it started, and that the "
                    "folder is on a file system both hosts share"
                )
            time.sleep(pause_s)

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
            return len(self._known)

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
            shutil.rmtree(self.folder, ignore_errors=True)

    def __enter__(self) -> SafeFileStore:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    # the log

    @contextlib.contextmanager
    def _locked(self, *, exclusive: bool = True) -> Iterator[None]:
        with self._turn:
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

    def _read(self) -> None:
        """Take in what others appended. We hold the lock, so an incomplete record is a torn one, not one being written."""
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


def _write_claim(path: Path, claim: Claim) -> None:
    """Create `path` exclusively and completely: written aside, then linked, which fails when the name exists."""
    aside = path.with_name(f".{path.name}.{claim.host}.{claim.pid}")
    aside.write_text(json.dumps(asdict(claim)), encoding="utf-8")
    try:
        os.link(aside, path)
    finally:
        aside.unlink()


def _read_claim(path: Path) -> Claim | None:
    try:
        return Claim(**json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None
    except (ValueError, TypeError) as error:
        raise TornRecord(f"{path} is not a claim: {error}", "start a new attempt") from None


def _lock_holder(file: int) -> str:
    """The process that holds a lock on this file, as far as this host's /proc/locks knows."""
    inode = os.fstat(file).st_ino
    with contextlib.suppress(OSError):
        for line in Path("/proc/locks").read_text(encoding="ascii").splitlines():
            fields = line.split()
            if len(fields) > 5 and fields[1] != "->" and fields[5].rpartition(":")[2] == str(inode):
                return f"pid {fields[4]}"
    return "a process on another host"
