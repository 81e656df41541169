"""Archives and compressed files, unpacked into a private folder under names of ours, within limits.

A member's own name is only ever shown: no path is made of it, so none can lead anywhere. Links and devices are left out.
"""

from __future__ import annotations

import shutil
import stat
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import BinaryIO, Protocol

from dtprobe.diagnose.intake import kinds, streams
from dtprobe.errors import Unavailable
from dtprobe.readers.artifact import Problem, Problems, one_line

_CHUNK = 1 << 20
_HEADER = 1 << 20
"""A tar's extended header, or a zip's directory in units of 16, beyond this is refused: it would be held in memory."""
_LEAVE = 1 << 30
"""Bytes that stay free on the disk of the temporary folder."""
_NO_TEXT = frozenset({"elf", "weights", "perf-data"})
"""Kinds of which the first bytes are enough."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What unpacking may cost, over all archives together: bytes, members, and how much larger than the packed file (this counts
    from `ratio_from` bytes on); `depth` is how many archives may lie in each other."""

    bytes: int = 20 << 30
    members: int = 20_000
    ratio: int = 250
    ratio_from: int = 256 << 20
    depth: int = 3


@dataclass(frozen=True, slots=True)
class Member:
    """What came out of an archive: where its bytes lie now, and what it is called."""

    path: Path
    name: str


class _Readable(Protocol):
    def read(self, size: int, /) -> bytes: ...


class _TooMuch(Exception):
    """A limit is passed; the text says which."""


class Unpacker:
    """Unpacks into `scratch`, which the caller removes. Whatever is wrong with an archive becomes a problem."""

    def __init__(self, scratch: Path, problems: Problems, limits: Limits) -> None:
        self._scratch = scratch
        self._problems = problems
        self._limits = limits
        self._bytes = 0
        self._members = 0

    def members(self, path: Path, kind: str, name: str) -> Iterator[Member]:
        """The members of an archive of this kind, one after the other as they come; one that holds a single file gives that."""
        start, size = self._bytes, max(1, path.stat().st_size)

        def spend(count: int) -> None:
            self._spend(count, self._bytes - start, size)

        try:
            with path.open("rb") as file:
                if kind == "zip":
                    yield from self._zip(file, size, name, spend)
                elif kind == "tar":
                    yield from self._tar(file, name, spend)
                else:
                    yield from self._stream(kind, file, name, spend)
        except _TooMuch as limit:
            self._tell(name, "refused", f"{limit}; what came before was read")
        except _broken() as error:
            self._tell(name, "cut", f"the archive is damaged: {_why(error)}; what could be read was")

    def _stream(self, kind: str, file: BinaryIO, name: str, spend: Callable[[int], None]) -> Iterator[Member]:
        stream = streams.opened(kind, file)
        if isinstance(stream, Unavailable):
            self._tell(name, "unreadable", str(stream))
            return
        joined = _Stream(stream)
        try:
            head = joined.read(kinds.HEAD)
        except streams.errors() as error:
            self._tell(name, "cut", f"the compressed data is damaged from its start: {_why(error)}")
            return
        joined.push(head)
        if kinds.is_tar(head):
            yield from self._tar(joined, name, spend)
        else:
            yield self._written(joined, streams.inner_name(name), spend)

    def _tar(self, file: BinaryIO | _Stream, name: str, spend: Callable[[int], None]) -> Iterator[Member]:
        left_out = 0
        with tarfile.open(fileobj=file, mode="r|", tarinfo=_Info, errorlevel=1) as tar:  # type: ignore[call-overload]
            for info in tar:
                tar.members = []  # it would keep them all
                if info.isreg():
                    content = tar.extractfile(info)
                    if content is not None:
                        yield self._written(content, self._named(name, info.name), spend)
                elif not info.isdir():
                    left_out += 1
        self._tell_left_out(name, left_out)

    def _zip(self, file: BinaryIO, size: int, name: str, spend: Callable[[int], None]) -> Iterator[Member]:
        if _directory_size(file, size) > 16 * _HEADER:
            raise _TooMuch("its directory of members alone is larger than 16 MiB")
        left_out = 0
        with zipfile.ZipFile(file) as archive:
            for info in archive.infolist():
                mode = stat.S_IFMT(info.external_attr >> 16)
                if info.is_dir():
                    continue
                if mode not in (0, stat.S_IFREG):
                    left_out += 1
                elif info.flag_bits & 1:
                    self._tell(f"{name}/{one_line(info.filename)}", "unreadable", "it is encrypted")
                else:
                    with archive.open(info) as content:
                        yield self._written(content, self._named(name, info.filename), spend)
        self._tell_left_out(name, left_out)

    def _written(self, content: _Readable, name: str, spend: Callable[[int], None]) -> Member:
        """Copy a stream into a file of ours; what a damaged one gave before it broke stays."""
        self._members += 1
        if self._members > self._limits.members:
            raise _TooMuch(f"more than {self._limits.members:,} members")
        path = self._scratch / f"{self._members:06}"
        with path.open("wb") as file:
            first = True
            while True:
                try:
                    data = content.read(_CHUNK)
                except _broken() as error:
                    self._tell(name, "cut", f"the packed data is damaged: {_why(error)}")
                    break
                if not data:
                    break
                spend(len(data))
                file.write(data)
                if first and kinds.kind_of(data[: kinds.HEAD], len(data)) in _NO_TEXT:
                    break
                first = False
        return Member(path, name)

    def _spend(self, count: int, here: int, size: int) -> None:
        self._bytes += count
        here += count
        if here > self._limits.ratio_from and here > self._limits.ratio * size:
            raise _TooMuch(f"it unpacks to more than {self._limits.ratio} times its size, as a bomb does")
        if self._bytes > self._limits.bytes:
            raise _TooMuch(f"the archives unpack to more than {self._limits.bytes / 1e9:,.0f} GB")
        if self._bytes // _CHUNK % 64 == 0 and shutil.disk_usage(self._scratch).free < _LEAVE:
            raise _TooMuch(f"less than {_LEAVE / 1e9:,.0f} GB is free where temporary files go (TMPDIR)")

    def _named(self, archive: str, member: str) -> str:
        parts = [one for one in PurePosixPath(member.replace("\\", "/")).parts if one not in ("/", ".", "..")]
        name = f"{archive}/{'/'.join(parts) or 'unnamed'}"
        if member.startswith(("/", "\\")) or ".." in PurePosixPath(member.replace("\\", "/")).parts:
            self._tell(name, "noise", f"the archive calls it {one_line(member, 80)}, a path outside; nothing was written there")
        return name

    def _tell_left_out(self, name: str, count: int) -> None:
        if count:
            self._tell(name, "refused", f"{count:,} links or devices in it were left out")

    def _tell(self, name: str, kind: str, text: str) -> None:
        self._problems.append(Problem(name, kind, text))


_EXTENDED = (tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE, tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK)


class _Info(tarfile.TarInfo):
    """A tar header whose extensions stay small: the standard library reads them into memory whatever size they claim."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> _Info:
        info = super().frombuf(buf, encoding, errors)
        if info.type in _EXTENDED and info.size > _HEADER:
            raise tarfile.ReadError(f"an extended header of {info.size:,} bytes")
        return info


class _Stream:
    """A compressed stream of which bytes can be put back. What came before damage is given out before the error is raised."""

    def __init__(self, rest: BinaryIO) -> None:
        self._head = b""
        self._rest = rest
        self._broken: Exception | None = None

    def push(self, head: bytes) -> None:
        """Put bytes that were read back before the others."""
        self._head = head + self._head

    def read(self, size: int) -> bytes:
        data, self._head = self._head[:size], self._head[size:]
        try:
            while len(data) < size and self._broken is None and (more := self._rest.read1(size - len(data))):  # type: ignore[attr-defined]
                data += more
        except streams.errors() as error:
            self._broken = error
        if not data and self._broken is not None:
            raise self._broken
        return data


def _directory_size(file: BinaryIO, size: int) -> int:
    """Bytes of a zip's directory by its end record: the standard library reads it into memory."""
    file.seek(max(0, size - (1 << 16) - 22))
    end = file.read()
    at = end.rfind(b"PK\x05\x06")
    told = int.from_bytes(end[at + 12 : at + 16], "little") if at >= 0 else 0
    if told == 0xFFFFFFFF and (at := end.rfind(b"PK\x06\x06")) >= 0:
        told = int.from_bytes(end[at + 40 : at + 48], "little")
    file.seek(0)
    return told


def _broken() -> tuple[type[Exception], ...]:
    return (tarfile.TarError, zipfile.BadZipFile, zipfile.LargeZipFile, NotImplementedError, RuntimeError, *streams.errors())


def _why(error: Exception) -> str:
    return one_line(f"{error}" or type(error).__name__, 120)
