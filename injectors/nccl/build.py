"""Compiles C sources into a shared library in the user's cache, once per source text, compiler and flags."""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from dtprobe.errors import Unavailable

HERE = Path(__file__).resolve().parent
SHIM_SOURCES = tuple(HERE / name for name in ("shim.c", "process.c", "resolve.c", "comms.c", "ring.c", "plan.c", "act.c"))
FLAGS = ("-std=gnu11", "-O2", "-g", "-fPIC", "-shared", "-fvisibility=hidden", "-Wall", "-Wextra")
COMPILE_TIMEOUT_S = 120


def compiler(environ: Mapping[str, str] = os.environ) -> Path | Unavailable:
    """The C compiler: the first of cc, gcc, clang on PATH."""
    for name in ("cc", "gcc", "clang"):
        found = shutil.which(name, path=environ.get("PATH"))
        if found:
            return Path(found)
    return Unavailable("no C compiler (cc, gcc or clang) is on PATH", "apt-get install gcc libc6-dev")


def cache(environ: Mapping[str, str] = os.environ) -> Path:
    """Where compiled libraries are kept: `$XDG_CACHE_HOME/dtprobe/build`, by default below ~/.cache."""
    home = environ.get("XDG_CACHE_HOME")
    return (Path(home) if home and Path(home).is_absolute() else Path.home() / ".cache") / "dtprobe" / "build"


def shim(environ: Mapping[str, str] = os.environ, folder: Path | None = None) -> Path | Unavailable:
    """The compiled shim, or why there is none."""
    return library("libdtprobe-nccl.so", SHIM_SOURCES, environ=environ, folder=folder)


def library(
    name: str,
    sources: Sequence[Path],
    *,
    flags: Sequence[str] = (),
    environ: Mapping[str, str] = os.environ,
    folder: Path | None = None,
) -> Path | Unavailable:
    """The shared library `name` made of `sources` in `folder` (default: the cache), compiled unless it is there already."""
    cc = compiler(environ)
    if isinstance(cc, Unavailable):
        return cc
    place = (folder or cache(environ)) / f"{name.partition('.')[0]}-{_key(cc, sources, flags)}"
    made = place / name
    if any(letter in str(made) for letter in ": \t\n"):
        return Unavailable(f"LD_PRELOAD cannot name {str(made)!r}: colons and spaces separate", "set XDG_CACHE_HOME elsewhere")
    if made.is_file():
        return made
    try:
        place.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.TemporaryDirectory(dir=place) as scratch:
            fresh = Path(scratch) / name
            command = [str(cc), *FLAGS, *flags, "-o", str(fresh), *map(str, sources), "-ldl", "-lpthread"]
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=COMPILE_TIMEOUT_S, check=False, stdin=subprocess.DEVNULL
            )
            if done.returncode:
                said = next((line for line in done.stderr.splitlines() if "error" in line), done.stderr.strip()[:200])
                return Unavailable(f"{cc.name} cannot compile {name}: {said}", "apt-get install gcc libc6-dev")
            fresh.replace(made)  # whole or not at all, whoever else compiles it now
    except (OSError, subprocess.TimeoutExpired) as error:
        return Unavailable(f"cannot compile {name} into {place}: {error}", "set XDG_CACHE_HOME to a folder that can be written")
    return made


def _key(cc: Path, sources: Sequence[Path], flags: Sequence[str]) -> str:
    digest = hashlib.sha256(repr((str(cc.resolve()), cc.stat().st_mtime_ns, platform.machine(), FLAGS, tuple(flags))).encode())
    headers = sorted({header for source in sources for header in source.parent.glob("*.h")})
    for file in (*sources, *headers):
        digest.update(file.name.encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:16]
