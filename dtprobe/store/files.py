"""Files that are whole or absent: written beside their place, flushed to the disk, then renamed into it."""

from __future__ import annotations

import errno
import json
import math
import os
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any, BinaryIO

from dtprobe.errors import DtprobeError, UsageError

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa

MIN_FREE_BYTES = 256 * 2**20
"""What a run may need: strace text and perf samples of a traced repeat reach tens of MB a rank."""
TEMPORARY_SUFFIX = ".tmp"


def human_bytes(count: float) -> str:
    """`1536` -> `1.5 KiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def _existing(path: Path) -> Path:
    return next(place for place in (path, *path.absolute().parents) if place.exists())


def free_bytes(path: Path) -> int:
    """Bytes that this user may still write on the disk that holds, or would hold, `path`."""
    return shutil.disk_usage(_existing(path)).free


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turns an operating system's refusal while `path` is written into one DtprobeError with the values and the remedy."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            what = "the disk is full" if error.errno == errno.ENOSPC else "the disk quota is used up"
            raise DtprobeError(
                f"{path}: {what} ({human_bytes(free_bytes(path.parent))} free); what was written before is kept",
                "free some space, or name a folder on another disk with --out",
            ) from error
        raise DtprobeError(
            f"{path}: cannot be written: {error.strerror or error}",
            "check the folder's owner and mount, or name another with --out",
        ) from error


def write_with(path: Path, write: Callable[[BinaryIO], None]) -> None:
    """Makes `path` hold what `write` puts into the open file, atomically: a kill at any instant leaves the old file or the new.

    Raises DtprobeError when the disk is full or the folder refuses; the old file then stands.
    """
    with writing(path):
        temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}{TEMPORARY_SUFFIX}")
        try:
            with temporary.open("xb") as file:
                write(file)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
        sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Flushes a folder's entries, so that a rename in it survives a power cut."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_text(path: Path, text: str) -> None:
    """`write_with` for text in UTF-8; characters that UTF-8 cannot hold (undecodable bytes of a command line) become `?`."""
    write_with(path, lambda file: _write_all(file, text.encode("utf-8", errors="replace")))


def _write_all(file: BinaryIO, data: bytes) -> None:
    file.write(data)


def plain(value: Any) -> Any:
    """The value as JSON can hold it: paths and enums as text, numpy scalars as numbers, tuples and sets as lists.

    A float that is not finite becomes null: JSON has no word for it, and missing is null everywhere in a run folder.
    Raises TypeError for anything else.
    """
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, str):
        return str(value)
    if isinstance(value, PurePath):
        return str(value)
    if isinstance(value, Mapping):
        return {str(plain(key)): plain(item) for key, item in value.items()}
    if isinstance(value, set | frozenset):
        return sorted(plain(item) for item in value)
    if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray):
        return [plain(item) for item in value]
    if hasattr(value, "item"):
        return plain(value.item())
    raise TypeError(f"{type(value).__name__} has no JSON form")


def write_json(path: Path, value: Any) -> None:
    """`write_with` for a JSON document; see `plain` for what it may hold."""
    write_text(path, json.dumps(plain(value), indent=1, allow_nan=False) + "\n")


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in `path`; raises DtprobeError in one line where it is absent, cut or no object."""
    try:
        value = json.loads(path.read_bytes())
    except OSError as error:
        raise DtprobeError(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise DtprobeError(f"{path}: is not JSON: {error}", "the file was damaged after it was written; run again") from error
    if not isinstance(value, dict):
        raise DtprobeError(f"{path}: holds a {type(value).__name__}, not an object")
    return value


def write_parquet(path: Path, table: pd.DataFrame | pa.Table) -> None:
    """`write_with` for a frame as Parquet (zstd, no index)."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    arrow = table if isinstance(table, pa.Table) else pa.Table.from_pandas(table, preserve_index=False)
    write_with(path, lambda file: pq.write_table(arrow, file, compression="zstd"))


def require_folder(folder: Path) -> None:
    """Makes `folder` and proves by doing that files can be made in it; raises UsageError where not."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        trial = folder / f".{secrets.token_hex(4)}{TEMPORARY_SUFFIX}"
        trial.touch(exist_ok=False)
        trial.unlink()
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            with writing(folder):
                raise
        raise UsageError(
            f"--out {folder}: not a folder one can write to: {error.strerror}", "name another with --out"
        ) from error


def require_space(folder: Path, need_bytes: int) -> None:
    """Raises DtprobeError where the disk of `folder` has less than `need_bytes` free for this user."""
    free = free_bytes(folder)
    if free < need_bytes:
        raise DtprobeError(
            f"{folder}: {human_bytes(free)} free, a run may need {human_bytes(need_bytes)}",
            "free some space, or name a folder on another disk with --out",
        )
