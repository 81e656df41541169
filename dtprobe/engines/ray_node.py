"""A task on its node of a Ray cluster, and its artifacts as one archive: no file system is shared."""

from __future__ import annotations

import io
import os
import shutil
import tarfile
import tempfile
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import zstandard

from dtprobe import processes
from dtprobe.engines import Task, node

LIMIT_BYTES = 256 << 20
"""Of an archive, compressed: it goes through the memory of two nodes' object stores."""
PREFIX = "dtprobe-ray-"


def work(told: Mapping[str, Any]) -> tuple[dict[str, Any], bytes]:
    """Run a task; its outcome and the archive of what it brings (empty where that is nothing). Both as plain data: versions may differ."""
    task = Task(**{**told, "argv": tuple(told["argv"])})
    _sweep(Path(tempfile.gettempdir()))
    with tempfile.TemporaryDirectory(prefix=f"{PREFIX}{os.getpid()}-") as name:
        folder = Path(name)
        outcome = asdict(node.execute(task, folder / "run", environ=os.environ))
        left = folder / "run" / node.WORK / task.brings
        if not task.brings or not left.is_dir():
            return outcome, b""
        packed = pack(left, folder / "archive")
        if packed is None:
            outcome["problem"] = (
                f"what it left in {task.brings} is more than {LIMIT_BYTES >> 20} MiB compressed and was not brought back"
            )
        return outcome, packed or b""


def pack(folder: Path, file: Path) -> bytes | None:
    """The content of a folder as a compressed archive, made in `file`; None where it is larger than LIMIT_BYTES."""
    with (
        file.open("wb") as raw,
        zstandard.ZstdCompressor(level=3).stream_writer(raw) as squeezed,
        tarfile.open(fileobj=squeezed, mode="w|") as archive,
    ):
        archive.add(folder, arcname=".")
    return file.read_bytes() if file.stat().st_size <= LIMIT_BYTES else None


def unpack(packed: bytes, folder: Path) -> None:
    """The content back into a folder. Raises tarfile.TarError for members that would lie elsewhere."""
    with (
        zstandard.ZstdDecompressor().stream_reader(io.BytesIO(packed)) as raw,
        tarfile.open(fileobj=raw, mode="r|") as archive,
    ):
        archive.extractall(folder, filter="data")


def _sweep(folder: Path) -> None:
    """Remove what workers that were killed have left: they could not."""
    for left in folder.glob(f"{PREFIX}*"):
        pid = left.name.removeprefix(PREFIX).partition("-")[0]
        if pid.isdecimal() and not processes.running(int(pid)):
            shutil.rmtree(left, ignore_errors=True)  # another worker's sweep may be at it
