"""One venv for each pair of Python and torch, in the user's cache, built once.

A venv lies at `<cache>/dtprobe/venvs/py3.12.1-torch2.13.0-<key>/`; the key is a digest of everything that it was made of. It is built
under another name and renamed when it is whole, under a lock: a kill leaves no half venv behind that anybody would use, and what is left
under the other name goes with the next build. dtprobe itself is not in it: a cell runs the dtprobe that started the matrix.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import time
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

from dtprobe.catalog import PACKAGE
from dtprobe.errors import DtprobeError, Unavailable, UsageError
from dtprobe.matrix import installers, interpreters
from dtprobe.matrix.cells import NONE, Install
from dtprobe.matrix.interpreters import Interpreter
from dtprobe.store.files import human_bytes, read_json, require_space, sync_folder, write_json, writing

READY = "dtprobe-venv.json"
SCHEMA = "dtprobe.venv/1"
NEEDS_BYTES = 3 << 30
"""A CPU build of torch takes 0.7 GB unpacked, what dtprobe needs 1 GB (measured: `du` of a venv with torch 2.13)."""
_CUDA = re.compile(r"^(nvidia-|cuda-|triton==)")
_CHECK = "import numpy, psutil, pytest, typer, xdist"
CHECK_TIMEOUT_S = 120.0


@dataclass(frozen=True, kw_only=True)
class Venv:
    """A venv that is whole. `pins` is all that is in it, `installer` what built it, `took_s` how long that took."""

    folder: Path
    python: str
    torch: str
    installer: str
    pins: tuple[str, ...]
    took_s: float
    new: bool

    @property
    def interpreter(self) -> Path:
        return self.folder / "bin" / "python"


def cache(environ: Mapping[str, str]) -> Path:
    """`$XDG_CACHE_HOME/dtprobe/venvs`, by default below `~/.cache`."""
    base = environ.get("XDG_CACHE_HOME", "")
    root = Path(base) if base.startswith("/") else Path(environ.get("HOME") or Path.home()) / ".cache"
    return root / "dtprobe" / "venvs"


def requirements(extras: Sequence[str], source: Path = PACKAGE.parent / "pyproject.toml") -> tuple[str, ...]:
    """What dtprobe needs, with those of its extras: as the checkout says, else as the installation does. Raises DtprobeError."""
    if source.is_file():
        project = tomllib.loads(source.read_text(encoding="utf-8")).get("project", {})
        if project.get("name") == "dtprobe":
            optional = project["optional-dependencies"]
            _known_extras(extras, optional)
            return tuple(sorted({*project["dependencies"], *(one for extra in extras for one in optional[extra])}))
    _known_extras(extras, metadata.metadata("dtprobe").get_all("Provides-Extra") or ())
    found = []
    for line in metadata.requires("dtprobe") or ():
        one = Requirement(line)
        if one.marker is None or "extra" not in str(one.marker):
            found.append(line)
        elif any(one.marker.evaluate({"extra": extra}) for extra in extras):
            found.append(line.partition(";")[0].strip())
    return tuple(sorted(found))


def get(
    python: str,
    torch: str,
    install: Install,
    *,
    environ: Mapping[str, str],
    say: Callable[[str], None],
) -> Venv | Unavailable:
    """The venv of this pair, built now where it is not there. Why it cannot be is Unavailable: no such interpreter, no such wheel.

    Raises DtprobeError where the cache cannot be written, or an index cannot be reached. `say` is told of each step that takes long.
    """
    interpreter = interpreters.find(python, environ)
    if isinstance(interpreter, Unavailable):
        return interpreter
    installer = installers.chosen(install, environ)
    if isinstance(installer, Unavailable):
        return installer
    wanted = [*requirements(install.extras), *([] if torch == NONE else [f"torch=={torch}"])]
    name = f"py{interpreter.version}-{'no-torch' if torch == NONE else f'torch{torch}'}"
    place = cache(environ) / f"{name}-{_key(interpreter, wanted, install)}"
    if (found := _ready(place)) is not None:
        return found
    with writing(place):
        place.parent.mkdir(parents=True, exist_ok=True)
    with _locked(place, say):
        if (found := _ready(place)) is not None:  # somebody else built it while we waited
            return found
        if place.exists():  # damaged, or its interpreter is gone
            shutil.rmtree(place)
        require_space(place.parent, NEEDS_BYTES)
        return _build(place, interpreter, torch, wanted, install, installer, environ, say)


def listed(environ: Mapping[str, str], *, remove: str | None, say: Callable[[str], None]) -> list[tuple[str, str]]:
    """The venvs of the cache with their sizes, after `remove` (a name, or `all`) was removed. Raises UsageError for a name that is none.

    One that is being built now is left alone.
    """
    root = cache(environ)
    places = sorted(place for place in root.glob("py*") if place.is_dir())
    gone = places if remove == "all" else [place for place in places if place.name == remove]
    if remove is not None and remove != "all" and not gone:
        raise UsageError(f"--remove {remove}: no such venv in {root}", "`dtprobe matrix venvs` lists them")
    for place in gone:
        with _locked(place, say):
            aside = place.with_name(f".{place.name}.part-{os.getpid()}")
            place.rename(aside)  # at one stroke: a kill leaves no half venv under its name
            shutil.rmtree(aside)
    return [(str(place), human_bytes(_bytes(place))) for place in places if place not in gone]


def _bytes(place: Path) -> int:
    return sum(file.lstat().st_size for file in place.rglob("*"))


def _build(
    place: Path,
    interpreter: Interpreter,
    torch: str,
    wanted: Sequence[str],
    install: Install,
    installer: installers.Installer,
    environ: Mapping[str, str],
    say: Callable[[str], None],
) -> Venv | Unavailable:
    began = time.monotonic()
    said = f"Python {interpreter.version}, {'no torch' if torch == NONE else f'torch {torch}'}"
    for left in place.parent.glob(f".{place.name}.part-*"):
        shutil.rmtree(left)
    say(f"{said}: choosing packages with {installer.name}")
    pins = installer.resolve(interpreter.path, wanted)
    if isinstance(pins, Unavailable):
        if not installers.absent(pins.reason):
            raise DtprobeError(f"{said}: {pins.reason}", "see to the network and the index, then go on with --resume")
        return Unavailable(f"{said}: {pins.reason}", "name another version, or an [install] index that has it")
    cuda = [pin for pin in pins if _CUDA.match(pin)]
    if cuda and install.build == "cpu":
        return Unavailable(
            f"torch {torch} for Python {interpreter.version} is to be had here as a CUDA build only"
            f" ({len(cuda)} packages of CUDA with it, gigabytes)",
            "name an index of CPU builds as [install] index, or take it with [install] build = 'any'",
        )
    part = place.with_name(f".{place.name}.part-{os.getpid()}")
    try:
        say(f"{said}: installing {len(pins)} packages")
        with writing(place):
            broken = installer.build(interpreter.path, part, pins)
            if broken is not None:  # they exist, so that another time it may go well
                raise DtprobeError(f"{said}: {broken.reason}", "see to the network and the disk, then go on with --resume")
            failed = _check(part, torch, environ)
            if failed is not None:
                return Unavailable(f"{said}: {failed.reason}", failed.remedy)
            _retarget(part, place)
            took_s = round(time.monotonic() - began, 1)
            facts = {"python": interpreter.version, "torch": torch, "installer": installer.name, "pins": pins, "took_s": took_s}
            write_json(part / READY, {"schema": SCHEMA, **facts})
            part.rename(place)
            sync_folder(place.parent)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    say(f"{said}: a venv of {human_bytes(_bytes(place))} in {took_s:.0f} s")
    found = _ready(place)
    assert found is not None
    return Venv(**{**vars(found), "new": True})


def _ready(place: Path) -> Venv | None:
    """The venv at this place, where there is a whole one whose interpreter still exists."""
    if not (place / READY).is_file() or not (place / "bin" / "python").exists():
        return None
    try:
        data = read_json(place / READY)
    except DtprobeError:
        return None
    facts: dict[str, Any] = {name: data[name] for name in ("python", "torch", "installer", "took_s")}
    return Venv(folder=place, pins=tuple(data["pins"]), new=False, **facts)


def _check(part: Path, torch: str, environ: Mapping[str, str]) -> Unavailable | None:
    """Whether what is in it can be imported, and is the torch that was meant."""
    program = _CHECK if torch == NONE else f"{_CHECK}; import torch; print(torch.__version__)"
    clean = {key: value for key, value in environ.items() if key not in installers.ENVIRONMENT}
    try:
        done = subprocess.run(
            [part / "bin" / "python", "-c", program],
            check=False,
            env=clean,
            capture_output=True,
            text=True,
            timeout=CHECK_TIMEOUT_S,
        )
    except subprocess.TimeoutExpired:
        return Unavailable(f"its packages could not be imported within {CHECK_TIMEOUT_S:g} s")
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        return Unavailable(f"what was installed cannot be imported: {lines[-1]}", "choose another version of torch or Python")
    return None


def _retarget(part: Path, place: Path) -> None:
    """Scripts name their interpreter by its whole path: by the one that it will have."""
    for file in [*(part / "bin").iterdir(), part / "pyvenv.cfg"]:
        if file.is_symlink() or not file.is_file():
            continue
        data = file.read_bytes()
        if b"\0" not in data and str(part).encode() in data:
            file.write_bytes(data.replace(str(part).encode(), str(place).encode()))


@contextmanager
def _locked(place: Path, say: Callable[[str], None]) -> Iterator[None]:
    lock = os.open(place.with_name(f".{place.name}.lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"{place.name}: another process builds it; waiting")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def _key(interpreter: Interpreter, wanted: Sequence[str], install: Install) -> str:
    said = [str(interpreter.path.resolve()), interpreter.version, platform.machine(), *wanted]
    said += [install.index, *install.find_links, install.build, install.installer, "bytecode"]
    return hashlib.sha256(json.dumps(said).encode()).hexdigest()[:16]


def _known_extras(extras: Sequence[str], known: Sequence[str] | Mapping[str, Any]) -> None:
    for extra in extras:
        if extra not in known:
            raise DtprobeError(f"[install] extras: dtprobe has no extra {extra!r}", f"it has {', '.join(sorted(known))}")
