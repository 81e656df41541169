"""The image in the user's cache: found, checked, or built once, whoever else asks for it at the same time."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dtprobe.errors import DtprobeError
from dtprobe.launch.lab import build, recipe

MANIFEST = "manifest.json"
BUILDING = "building-"


@dataclass(frozen=True)
class Image:
    """A whole image."""

    folder: Path
    key: str

    @property
    def kernel(self) -> Path:
        return self.folder / "vmlinux"

    @property
    def ram_disk(self) -> Path:
        return self.folder / "initrd.gz"

    @property
    def disk(self) -> Path:
        return self.folder / "root.img"


def cache(environ: Mapping[str, str]) -> Path:
    """Where images lie: `$XDG_CACHE_HOME/dtprobe/lab`, by default below `~/.cache`."""
    home = environ.get("XDG_CACHE_HOME")
    base = Path(home) if home and Path(home).is_absolute() else Path(environ.get("HOME") or Path.home()) / ".cache"
    return base / "dtprobe" / "lab"


def present(environ: Mapping[str, str]) -> bool:
    """Whether an image of this recipe is there; whether it is whole `ensure` finds out."""
    return (cache(environ) / recipe.key() / MANIFEST).is_file()


def ensure(environ: Mapping[str, str], *, mirror: str | None = None, told: build.Told | None = None) -> Image:
    """The image of this recipe, built where it is missing or damaged (about a minute; root and a Debian mirror).

    Progress goes to `told`, by default to a bar on standard error. Of several processes one builds, the others wait for it.
    Raises DtprobeError: it cannot be built here, the mirror cannot be reached, the cache cannot be written.
    """
    place = cache(environ) / recipe.key()
    try:
        cache(environ).mkdir(parents=True, exist_ok=True)
        with _lock(cache(environ) / "lock"):
            if not whole(place):
                _build(place, environ, mirror, told)
    except OSError as error:
        raise DtprobeError(
            f"the lab's image in {place}: {error.strerror or error}", "set XDG_CACHE_HOME to a folder with 1 GiB free"
        ) from error
    return Image(place, recipe.key())


def whole(place: Path) -> bool:
    """Whether all files of an image are what its manifest says.

    A file of the manifest's size and time of change is believed; any other is read again (a second a GiB at most), and where its
    sum is right the manifest is corrected: a copied cache stays valid.
    """
    try:
        manifest = json.loads((place / MANIFEST).read_text(encoding="utf-8"))
        said = {name: manifest["files"][name] for name in recipe.FILES}
        seen = {name: _stat(place / name) for name in recipe.FILES}
        if all(seen[name].items() <= said[name].items() for name in recipe.FILES):
            return True
        if any(
            seen[name]["bytes"] != said[name]["bytes"] or _sum(place / name) != said[name]["sha256"] for name in recipe.FILES
        ):
            return False
        _write_manifest(place)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False
    return True


def _build(place: Path, environ: Mapping[str, str], mirror: str | None, told: build.Told | None) -> None:
    """Under the lock. What earlier builders left when they were killed is removed, so is the damaged image."""
    if why := build.unmet():
        raise DtprobeError(f"the lab's image is not built, and {why}", "start it as root, once")
    for left in place.parent.glob(f"{BUILDING}*"):
        shutil.rmtree(left, ignore_errors=True)
    fresh = Path(tempfile.mkdtemp(prefix=BUILDING, dir=place.parent))
    try:
        with _progress(place, told) as say:
            # debootstrap and mke2fs lie where only root's PATH looks
            path = f"{environ.get('PATH', os.defpath)}:/usr/sbin:/sbin"
            build.image(fresh, say, environ={**environ, "PATH": path}, mirror=mirror)
            say("checksums", 1.0)
            for name in recipe.FILES:
                (fresh / name).chmod(0o444)
            _write_manifest(fresh)
        fresh.chmod(0o755)
        if place.exists():  # damaged; a VM that runs on it keeps its open files
            place.rename(place.with_name(f"{BUILDING}{place.name}-old"))
        fresh.rename(place)
    finally:
        for left in place.parent.glob(f"{BUILDING}*"):
            shutil.rmtree(left, ignore_errors=True)


def _write_manifest(place: Path) -> None:
    files = {name: {**_stat(place / name), "sha256": _sum(place / name)} for name in recipe.FILES}
    text = json.dumps({"schema": "dtprobe.lab/1", "key": recipe.key(), "release": recipe.RELEASE, "files": files}, indent=1)
    temporary = place / f".{MANIFEST}"
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(place / MANIFEST)


def _stat(file: Path) -> dict[str, Any]:
    found = file.stat()
    return {"bytes": found.st_size, "changed_ns": found.st_mtime_ns}


def _sum(file: Path) -> str:
    with file.open("rb") as data:
        return hashlib.file_digest(data, "sha256").hexdigest()


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    """One process at a time, for as long as it lives; it waits in the kernel, and a builder is bounded."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


@contextmanager
def _progress(place: Path, told: build.Told | None) -> Iterator[build.Told]:
    if told is not None:
        yield told
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = (TextColumn("lab image: {task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    console.print(f"building the lab VM's image, once, about a minute: {place}", highlight=False, soft_wrap=True)
    with Progress(*columns, console=console) as bar:
        task = bar.add_task("", total=1.0)
        yield lambda what, share: bar.update(task, description=what, completed=share)
