"""What a matrix is made of: cells, each a Python, a torch, and perhaps a world size and a launcher of its own; said by options or a TOML file.

```toml
python = ["3.11", "3.12"]            # default: the one that runs dtprobe
torch = ["2.9.1", "2.13.0", "none"]  # default: the one beside dtprobe; "none": no torch at all
world_size = [2, 4]                  # default: each scenario's own
launcher = ["local", "torchrun"]     # default: each scenario's own

[[exclude]]                          # cells that all given values match are left out
python = "3.13"
torch = "2.9.1"

[install]
index = "https://..."                # of torch alone, such as PyTorch's own index of CPU builds
find_links = ["wheels/"]             # folders or pages with further wheels; relative to this file
build = "cpu"                        # "any": also builds that need CUDA (gigabytes). Default: "cpu" unless there is a GPU
extras = ["network", "fuse"]         # extras of dtprobe that each venv gets
installer = "uv"                     # or "pip". Default: uv where it is to be found
```
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any

from packaging.version import InvalidVersion, Version

from dtprobe.errors import UsageError

NONE = "none"
"""In place of a torch version: a venv without torch."""
AXES = ("torch", "python", "world_size", "launcher")
BUILDS = ("cpu", "any")
INSTALLERS = ("uv", "pip")
EXTRAS = ("network", "fuse")
CELLS_MAX = 256
_PYTHON = re.compile(r"3\.\d{1,2}(\.\d{1,3})?")


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One combination. `world_size` and `launcher` are None where each scenario has its own."""

    python: str
    torch: str
    world_size: int | None = None
    launcher: str | None = None

    @property
    def id(self) -> str:
        """`python3.12-torch2.13.0-ranks4-torchrun`: what files and lines of progress call it."""
        parts = [f"python{self.python}", "no-torch" if self.torch == NONE else f"torch{self.torch}"]
        parts += [f"ranks{self.world_size}"] if self.world_size is not None else []
        return "-".join([*parts, *([self.launcher.replace(":", "")] if self.launcher is not None else [])])

    @property
    def words(self) -> list[str]:
        """Options of `dtprobe nightly` that make a night this cell's."""
        found = [] if self.world_size is None else ["--world-size", str(self.world_size)]
        return found + ([] if self.launcher is None else ["--launcher", self.launcher])


@dataclass(frozen=True, kw_only=True)
class Install:
    """How venvs are filled. `build` is "cpu" or "any", `installer` "uv", "pip" or "" for uv where it is to be found."""

    index: str = ""
    find_links: tuple[str, ...] = ()
    build: str
    extras: tuple[str, ...] = EXTRAS
    installer: str = ""


@dataclass(frozen=True, kw_only=True)
class Spec:
    """A whole matrix."""

    cells: tuple[Cell, ...]
    install: Install

    def as_json(self) -> dict[str, Any]:
        return {"cells": [asdict(cell) for cell in self.cells], "install": asdict(self.install)}

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> Spec:
        install: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in data["install"].items()
        }
        return cls(cells=tuple(Cell(**one) for one in data["cells"]), install=Install(**install))


@dataclass(frozen=True, kw_only=True)
class Axes:
    """The values of each axis as they were asked for; an empty axis is not varied."""

    python: tuple[str, ...] = ()
    torch: tuple[str, ...] = ()
    world_size: tuple[int, ...] = ()
    launcher: tuple[str, ...] = ()
    exclude: tuple[Mapping[str, Any], ...] = ()
    install: Mapping[str, Any] = field(default_factory=dict)

    def spec(self, *, python: str, torch: str, build: str) -> Spec:
        """All combinations but the excluded ones; the arguments stand in for what was not given. Raises UsageError where none is left."""
        cells = [
            Cell(python=one, torch=two, world_size=three, launcher=four)
            for one, two, three, four in product(
                self.python or (python,), self.torch or (torch,), self.world_size or (None,), self.launcher or (None,)
            )
        ]
        kept = [cell for cell in cells if not any(_matches(cell, one) for one in self.exclude)]
        if not kept:
            raise UsageError(f"a matrix without a cell: all {len(cells)} are excluded", "take an [[exclude]] out")
        if len(kept) > CELLS_MAX:
            raise UsageError(f"a matrix of {len(kept)} cells", f"at most {CELLS_MAX}: give fewer values, or an [[exclude]]")
        return Spec(cells=tuple(kept), install=Install(**{"build": build, **self.install}))


def from_options(python: str | None, torch: str | None, world_size: str | None, launcher: str | None) -> Axes:
    """From `--python 3.11,3.12` and its like; None is an axis that was not given. Raises UsageError."""
    return Axes(
        python=_pythons(_split(python), "--python"),
        torch=_torches(_split(torch), "--torch"),
        world_size=_sizes(_split(world_size), "--world-size"),
        launcher=_launchers(_split(launcher), "--launcher"),
    )


def from_file(path: Path) -> Axes:
    """From a TOML file as this module describes it. Raises UsageError, in one line with the file's name, for whatever is wrong in it."""
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"--matrix {path}: cannot be read: {error.strerror}", "name a TOML file") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"--matrix {path}: is not TOML: {error}", "see `dtprobe matrix example`") from error
    _known(data, (*AXES, "exclude", "install"), f"{path}")
    return Axes(
        python=_pythons(_list(data, "python", (str,), path), f"{path}: python"),
        torch=_torches(_list(data, "torch", (str,), path), f"{path}: torch"),
        world_size=_sizes(_list(data, "world_size", (int,), path), f"{path}: world_size"),
        launcher=_launchers(_list(data, "launcher", (str,), path), f"{path}: launcher"),
        exclude=tuple(_excluded(one, path) for one in _list(data, "exclude", (dict,), path)),
        install=_install(data.get("install", {}), path),
    )


def merged(file: Axes, options: Axes) -> Axes:
    """The file's values, each axis replaced by the options' where they give it."""
    return replace(file, **{axis: getattr(options, axis) for axis in AXES if getattr(options, axis)})


def _split(text: str | None) -> list[str]:
    return [] if text is None else text.split(",")


def _pythons(values: Sequence[Any], where: str) -> tuple[str, ...]:
    for value in values:
        if not _PYTHON.fullmatch(value):
            raise UsageError(f"{where}: {value!r} is no version of Python", "write 3.12 or 3.12.1")
    return tuple(dict.fromkeys(values))


def _torches(values: Sequence[Any], where: str) -> tuple[str, ...]:
    for value in values:
        try:
            whole = value == NONE or len(Version(value).release) == 3
        except InvalidVersion:
            whole = False
        if not whole:
            raise UsageError(f"{where}: {value!r} is no version of torch", f"write all three numbers, as 2.13.0, or {NONE}")
    return tuple(dict.fromkeys(values))


def _sizes(values: Sequence[Any], where: str) -> tuple[int, ...]:
    for value in values:
        if not str(value).isdecimal() or int(value) < 1:
            raise UsageError(f"{where}: {value!r} is no number of ranks", "write 1 or more")
    return tuple(dict.fromkeys(int(value) for value in values))


def _launchers(values: Sequence[Any], where: str) -> tuple[str, ...]:
    from dtprobe import launch

    for value in values:
        try:
            launch.named(value)
        except UsageError as error:
            raise UsageError(f"{where}: {error.message}", error.remedy) from error
    return tuple(dict.fromkeys(values))


def _list(data: Mapping[str, Any], name: str, kinds: tuple[type, ...], path: Path) -> list[Any]:
    value = data.get(name, [])
    if not isinstance(value, list) or not all(isinstance(one, kinds) and not isinstance(one, bool) for one in value):
        shown = {str: 'strings: ["3.12"]', int: "whole numbers: [2, 4]", dict: "tables: [[exclude]]"}[kinds[0]]
        raise UsageError(f"{path}: {name} = {value!r}", f"it is a list of {shown}")
    return value


def _known(data: Mapping[str, Any], names: Iterable[str], where: str) -> None:
    for name in data:
        if name not in names:
            raise UsageError(f"{where}: no such entry: {name!r}", f"there are {', '.join(names)}")


def _excluded(one: Mapping[str, Any], path: Path) -> Mapping[str, Any]:
    _known(one, AXES, f"{path}: exclude")
    if not one:
        raise UsageError(f"{path}: an empty [[exclude]] would leave out every cell", f"give it some of {', '.join(AXES)}")
    return one


def _matches(cell: Cell, excluded: Mapping[str, Any]) -> bool:
    return all(getattr(cell, axis) == value for axis, value in excluded.items())


def _install(data: Any, path: Path) -> Mapping[str, Any]:
    if not isinstance(data, dict):
        raise UsageError(f"{path}: install = {data!r}", "it is a table: [install]")
    _known(data, Install.__dataclass_fields__, f"{path}: install")
    for name, allowed in (("build", BUILDS), ("installer", INSTALLERS)):
        if name in data and data[name] not in allowed:
            raise UsageError(f"{path}: install.{name} = {data[name]!r}", f"it is one of {', '.join(allowed)}")
    if not isinstance(data.get("index", ""), str):
        raise UsageError(f"{path}: install.index = {data['index']!r}", "it is an address")
    links = _list(data, "find_links", (str,), path)
    lists = {
        "find_links": tuple(one if "://" in one else str((path.parent / one).resolve()) for one in links),
        "extras": tuple(_list(data, "extras", (str,), path)),
    }
    return {**data, **{name: value for name, value in lists.items() if name in data}}
