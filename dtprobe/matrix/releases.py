"""When versions of torch and Python were released; the table and its sources are in releases.toml."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from datetime import date
from functools import cache
from pathlib import Path

from packaging.version import InvalidVersion, Version

from dtprobe.matrix.cells import NONE

TABLE = Path(__file__).with_name("releases.toml")


@cache
def table() -> Mapping[str, Mapping[str, date]]:
    """`{"torch": {"2.13.0": date}, "python": {"3.12": date}}`."""
    with TABLE.open("rb") as file:
        return tomllib.load(file)


def public(version: str) -> str:
    """Without what a build adds: `2.13.0+cpu` is 2.13.0."""
    return version.partition("+")[0]


def order(version: str) -> tuple[int, Version]:
    """A key by which versions sort; no torch, and what is no version, comes first."""
    try:
        return (0, Version("0")) if version == NONE else (1, Version(public(version)))
    except InvalidVersion:
        return (0, Version("0"))


def released(axis: str, version: str) -> date | None:
    """The day, of Python that of its minor version; None where the table does not know it."""
    known = table().get(axis, {})
    return known.get(public(version)) or (known.get(".".join(version.split(".")[:2])) if axis == "python" else None)


def between(axis: str, low: str, high: str) -> tuple[str, ...]:
    """Known versions strictly between two, in order; of Python none of the same minor version as either."""
    mine = {".".join(one.split(".")[:2]) for one in (low, high)} if axis == "python" else set()
    if NONE in (low, high):
        return ()
    found = [one for one in table().get(axis, {}) if order(low) < order(one) < order(high) and one not in mine]
    return tuple(sorted(found, key=order))
