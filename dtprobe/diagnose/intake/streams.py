"""Compressed bytes as a stream, whatever the compression: never more of it in memory than a chunk."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO, Protocol, cast

from dtprobe.errors import Unavailable

BROKEN = (OSError, EOFError, lzma.LZMAError, zlib.error, ValueError)
"""What reading a damaged stream may raise; `zstandard` adds its own, see `errors`."""
MEMORY = 256 << 20
"""Memory that one decoder may ask for: a stream can demand a dictionary of gigabytes."""
_CHUNK = 1 << 16
_ZSTD_CHUNK = 2 << 10
"""So much zstd becomes at most 64 MiB: a block of 4 bytes may stand for 128 KiB."""


def errors() -> tuple[type[Exception], ...]:
    """What reading a damaged stream may raise."""
    try:
        import zstandard
    except ImportError:
        return BROKEN
    return (*BROKEN, zstandard.ZstdError)


def opened(kind: str, file: BinaryIO) -> BinaryIO | Unavailable:
    """The stream inside a `gzip`, `bzip2`, `xz` or `zstd` file; Unavailable where a library for it is missing."""
    if kind == "gzip":
        return cast(BinaryIO, gzip.GzipFile(fileobj=file))
    if kind == "bzip2":
        return cast(BinaryIO, bz2.BZ2File(file))
    if kind == "xz":
        return cast(BinaryIO, io.BufferedReader(_Frames(file, _xz, _CHUNK), _CHUNK))
    try:
        import zstandard
    except ImportError:
        return Unavailable("it is compressed with zstd, which this Python cannot read", "pip install zstandard")
    decoder = zstandard.ZstdDecompressor(max_window_size=MEMORY // 2)
    return cast(BinaryIO, io.BufferedReader(_Frames(file, decoder.decompressobj, _ZSTD_CHUNK), _CHUNK))


def inner_name(name: str) -> str:
    """The name of what a compressed file holds: without its ending."""
    path = Path(name)
    if path.suffix.lower() in (".gz", ".xz", ".bz2", ".zst", ".zstd"):
        return str(path.with_suffix(""))
    return str(path.with_suffix(".tar")) if path.suffix.lower() in (".tgz", ".txz", ".tbz2", ".tbz", ".tzst") else name


def _xz() -> lzma.LZMADecompressor:
    return lzma.LZMADecompressor(memlimit=MEMORY)


class _Decoder(Protocol):
    """Decodes one frame (of a file that may hold several)."""

    @property
    def eof(self) -> bool: ...
    @property
    def unused_data(self) -> bytes: ...
    def decompress(self, data: bytes, /) -> bytes: ...


class _Frames(io.RawIOBase):
    """Frames one behind the other, decoded with a bound on memory that `lzma.open` does not offer, and an error for a last one that
    is cut, which `zstandard`'s own stream takes for the end.
    """

    def __init__(self, file: BinaryIO, decoder: Callable[[], _Decoder], chunk: int) -> None:
        super().__init__()
        self._file = file
        self._make = decoder
        self._decoder = decoder()
        self._chunk = chunk
        self._left = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override]
        while not self._left:
            data = b""
            if self._decoder.eof:
                data = self._decoder.unused_data.lstrip(b"\0") or self._file.read(self._chunk).lstrip(b"\0")
                if not data:
                    return 0
                self._decoder = self._make()
            elif getattr(self._decoder, "needs_input", True) and not (data := self._file.read(self._chunk)):
                raise EOFError("it ends in the middle")
            bound = {"max_length": _CHUNK} if isinstance(self._decoder, lzma.LZMADecompressor) else {}
            self._left = self._decoder.decompress(data, **bound)
        count = min(len(buffer), len(self._left))
        buffer[:count], self._left = self._left[:count], self._left[count:]
        return count
