"""uv, or venv and pip: what resolves the requirements of a venv, and what fills it."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Protocol

from dtprobe.errors import Unavailable
from dtprobe.matrix.cells import Install

RESOLVE_TIMEOUT_S = 300.0
FILL_TIMEOUT_S = 3600.0
"""A torch with CUDA is gigabytes, on whichever line."""
ENVIRONMENT = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "PIP_REQUIRE_VIRTUALENV", "PIP_TARGET", "PIP_USER")
"""Variables that would make another venv than the one that is meant."""
_NOISE = re.compile(r"^\W*(error|cause|warning|hint)?[:,]?\s*", re.I)


class Installer(Protocol):
    """Fills venvs. What it could not do is Unavailable, in its own words."""

    @property
    def name(self) -> str:
        """With its version."""

    def resolve(self, python: Path, requirements: Sequence[str]) -> tuple[str, ...] | Unavailable:
        """Pins (`name==version`) that meet the requirements for this interpreter. Downloads no wheel that the index describes otherwise."""

    def build(self, python: Path, place: Path, pins: Sequence[str]) -> Unavailable | None:
        """A venv at `place` with just these."""


def chosen(install: Install, environ: Mapping[str, str]) -> Installer | Unavailable:
    """uv where it is to be found (on PATH, or beside this Python), else pip; or the one that was asked for."""
    uv = shutil.which("uv", path=environ.get("PATH")) or shutil.which("uv", path=str(Path(sys.executable).parent))
    if install.installer == "uv" and uv is None:
        return Unavailable("no uv on this machine", "pip install uv, or installer = 'pip'")
    if uv is None or install.installer == "pip":
        return Pip(install, environ)
    return Uv(install, environ, uv)


@dataclass(frozen=True)
class Uv:
    """uv, told what pip is configured with: it reads none of pip's files."""

    install: Install
    environ: Mapping[str, str]
    program: str

    @property
    def name(self) -> str:
        return "uv " + _run([self.program, "--version"], self.environ, 30).stdout.split()[1]

    def resolve(self, python: Path, requirements: Sequence[str]) -> tuple[str, ...] | Unavailable:
        argv = ["pip", "compile", "-", "--python", str(python), "--no-header", "--no-annotate", *self._sources()]
        done = self._uv(argv, RESOLVE_TIMEOUT_S, "\n".join(requirements))
        return tuple(_pins(done.stdout)) if done.returncode == 0 else Unavailable(_why(done))

    def build(self, python: Path, place: Path, pins: Sequence[str]) -> Unavailable | None:
        # Relocatable: its scripts find their interpreter also after the rename that ends the building.
        made = self._uv(["venv", "--relocatable", "--python", str(python), str(place)], RESOLVE_TIMEOUT_S)
        if made.returncode == 0:
            # As pip does; else every rank compiles torch anew where PYTHONDONTWRITEBYTECODE is set, as in many containers.
            into = ["--python", str(place / "bin" / "python"), "--no-deps", "--compile-bytecode", "-r", "-"]
            made = self._uv(["pip", "install", *into, *self._sources()], FILL_TIMEOUT_S, "\n".join(pins))
        return None if made.returncode == 0 else Unavailable(_why(made))

    def _uv(self, words: Sequence[str], timeout_s: float, stdin: str = "") -> subprocess.CompletedProcess[str]:
        return _run([self.program, "--quiet", "--no-python-downloads", *words], self.environ, timeout_s, stdin)

    @cached_property
    def _told(self) -> list[str]:
        configured = pip_configuration(self.environ)
        options = ("index-url", "extra-index-url", "find-links", "constraint")
        found = [word for option in options for value in configured.get(option, ()) for word in (f"--{option}", value)]
        offline = configured.get("no-index", ("0",))[0].lower() in ("1", "true", "yes", "on")
        return found + (["--no-index"] if offline else [])

    def _sources(self) -> list[str]:
        # All indexes are asked, as pip does: a build for CPUs often lies beside one with CUDA of the same version.
        return [*self._told, *_sources(self.install), "--index-strategy", "unsafe-best-match"]


@dataclass(frozen=True)
class Pip:
    """The standard library's venv and the pip that comes with the interpreter."""

    install: Install
    environ: Mapping[str, str]

    @property
    def name(self) -> str:
        return "venv and pip"

    def resolve(self, python: Path, requirements: Sequence[str]) -> tuple[str, ...] | Unavailable:
        told = ["install", "--dry-run", "--ignore-installed", "--quiet", "--report", "-", *_sources(self.install)]
        done = self._pip(python, [*told, *requirements], RESOLVE_TIMEOUT_S)
        if done.returncode != 0:
            return Unavailable(_why(done))
        items = json.loads(done.stdout)["install"]
        return tuple(sorted(f"{one['metadata']['name']}=={one['metadata']['version']}" for one in items))

    def build(self, python: Path, place: Path, pins: Sequence[str]) -> Unavailable | None:
        made = _run([str(python), "-I", "-m", "venv", str(place)], self.environ, RESOLVE_TIMEOUT_S)
        if made.returncode == 0:
            made = self._pip(
                place / "bin" / "python", ["install", "--quiet", "--no-deps", *_sources(self.install), *pins], FILL_TIMEOUT_S
            )
        return None if made.returncode == 0 else Unavailable(_why(made))

    def _pip(self, python: Path, words: Sequence[str], timeout_s: float) -> subprocess.CompletedProcess[str]:
        return _run([str(python), "-m", "pip", "--disable-pip-version-check", *words], self.environ, timeout_s)


def pip_configuration(environ: Mapping[str, str]) -> Mapping[str, tuple[str, ...]]:
    """Of pip's files and variables the values of each option, by its name without a section; empty where there is no pip."""
    done = _run([sys.executable, "-m", "pip", "config", "list"], environ, 30)
    found: dict[str, tuple[str, ...]] = {}
    for line in done.stdout.splitlines() if done.returncode == 0 else ():
        key, equals, value = line.partition("=")
        if equals:
            (text,) = shlex.split(value) or [""]
            # What a variable says replaces what a file does; pip lists it last.
            found[key.rpartition(".")[2]] = tuple(text.split())
    return found


def absent(reason: str) -> bool:
    """Whether an installer says that there is no such version or wheel, and not that it could not look."""
    return re.search(r"no versions? of|no wheels?|no matching|find a version|unsatisfiable", reason, re.I) is not None


def _sources(install: Install) -> list[str]:
    words = ["--extra-index-url", install.index] if install.index else []
    return words + [word for one in install.find_links for word in ("--find-links", one)]


def _run(
    argv: Sequence[str], environ: Mapping[str, str], timeout_s: float, stdin: str = ""
) -> subprocess.CompletedProcess[str]:
    clean = {key: value for key, value in environ.items() if key not in ENVIRONMENT}
    try:
        return subprocess.run(
            argv, check=False, env=clean, input=stdin, capture_output=True, text=True, errors="replace", timeout=timeout_s
        )
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(argv, 1, "", f"{Path(argv[0]).name} did not end within {timeout_s:g} s")
    except OSError as error:
        return subprocess.CompletedProcess(argv, 1, "", f"{argv[0]}: {error.strerror}")


def _pins(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines() if "==" in line and not line.startswith("#")]


def _why(done: subprocess.CompletedProcess[str]) -> str:
    """The line that says why, without the ornaments around it."""
    lines = [_NOISE.sub("", line).strip() for line in done.stderr.splitlines()]
    lines = [line for line in lines if line]
    telling = [line for line in lines if re.search(r"no version|no wheel|no matching|not find|because|unsatisf", line, re.I)]
    return " ".join((telling or lines or [f"exit code {done.returncode}"])[0].split())[:400]
