"""A job's artifacts cut into shares: ranges of files, which with regular names are ranges of ranks, each to be read by one task.

A share travels as text on the command line of its task: nothing but the artifacts themselves needs to be where both sides see it.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import zlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from dtprobe import __version__
from dtprobe.diagnose.case import Artifact
from dtprobe.diagnose.lines import Reading
from dtprobe.errors import DtprobeError, UsageError
from dtprobe.readers import hosts

SCHEMA = "dtprobe.share/1"
Unit = Reading | Artifact
"""A text artifact, or a flight recorder's dump."""

PIECE_S, LEAST_S, FEW = 10.0, 3.0, 8
"""Seconds of one core that a share takes; where that gives fewer than FEW of them, smaller ones, but not below LEAST_S: a task takes 0.7
to start."""
MOST = 400
"""Shares at most: an array of Slurm has 500 elements here (engines/slurm.py)."""
LONGEST_TEXT = 100_000
"""Letters of a share: one argument of a program may have 128 KiB (execve(2), MAX_ARG_STRLEN)."""
_DUMP_S, _TEXT_S, _SCAN_S = 30e-9, 130e-9, 3e-9
"""Seconds for a byte of a dump, of a log read whole, and of a log in which anchors are looked for: benchmarks/postmortem_cut.py."""
_LINE_S = 15e-6
"""Seconds for a line that is taken from a log in which anchors are looked for."""


@dataclass(frozen=True, kw_only=True)
class Share:
    """What one task reads. `roots` are the paths that the user gave; they must be there for the task, too."""

    roots: tuple[Path, ...]
    texts: tuple[Reading, ...]
    dumps: tuple[Artifact, ...]

    @property
    def artifacts(self) -> tuple[Artifact, ...]:
        """All of them, as they are ordered among each other."""
        return tuple(sorted((*(one.artifact for one in self.texts), *self.dumps), key=lambda one: one.name))

    @property
    def cost_s(self) -> float:
        units: tuple[Unit, ...] = (*self.texts, *self.dumps)
        return sum(map(cost_s, units))


def cost_s(unit: Unit) -> float:
    """About how long one core reads it, in seconds."""
    if isinstance(unit, Artifact):
        return unit.size * _DUMP_S
    if unit.whole:
        return unit.artifact.size * _TEXT_S
    return unit.artifact.size * _SCAN_S + unit.most * _LINE_S


def cut(units: Sequence[Unit], roots: Sequence[Path], pieces: int | None = None) -> list[Share]:
    """Ranges of these in their order, about equally long to read. `pieces` of them, or as many as are worth a process."""
    costs = [cost_s(one) for one in units]
    total = sum(costs)
    if pieces is None:
        pieces = min(MOST, max(1, min(FEW, int(total / LEAST_S)), math.ceil(total / PIECE_S)))
    found: list[list[Unit]] = [[] for _ in range(pieces)]
    before = 0.0
    for one, cost in zip(units, costs, strict=True):
        place = int((before + cost / 2) / total * pieces) if total else 0
        found[min(place, pieces - 1)].append(one)
        before += cost
    return [share for some in found if some for share in _fitting(some, tuple(roots))]


def _fitting(units: Sequence[Unit], roots: tuple[Path, ...]) -> list[Share]:
    """One share of these, or several where its text would be too long."""
    share = Share(
        roots=roots,
        texts=tuple(one for one in units if isinstance(one, Reading)),
        dumps=tuple(one for one in units if isinstance(one, Artifact)),
    )
    if len(units) == 1 or len(packed(share)) <= LONGEST_TEXT:
        return [share]
    middle = len(units) // 2
    return [*_fitting(units[:middle], roots), *_fitting(units[middle:], roots)]


def packed(share: Share) -> str:
    """The share as text."""
    measured: dict[hosts.Host, int] = {}
    told = {
        "schema": SCHEMA,
        "dtprobe": __version__,
        "roots": [str(one) for one in share.roots],
        "texts": [[*_told(one.artifact, measured), one.near_ns, one.whole, one.most] for one in share.texts],
        "dumps": [_told(one, measured) for one in share.dumps],
        "hosts": [asdict(one) for one in measured],
    }
    return base64.urlsafe_b64encode(zlib.compress(json.dumps(told, separators=(",", ":")).encode(), 9)).decode()


def mark(text: str) -> str:
    """What tells this share's partial result from that of another one."""
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def unpacked(text: str) -> Share:
    """The share again. Raises UsageError for other text, DtprobeError for the text of another version."""
    try:
        told = json.loads(zlib.decompress(base64.urlsafe_b64decode(text)))
        made = told["schema"], told["dtprobe"]
    except (ValueError, zlib.error, KeyError, TypeError) as error:
        raise UsageError(f"no share of a postmortem: {error}", "run dtprobe postmortem --on, which makes them") from error
    if made != (SCHEMA, __version__):
        raise DtprobeError(
            f"the postmortem runs dtprobe {made[1]} ({made[0]}), this node has {__version__} ({SCHEMA})",
            "install the same version on all nodes",
        )
    measured = [_host(one) for one in told["hosts"]]
    return Share(
        roots=tuple(map(Path, told["roots"])),
        texts=tuple(
            Reading(artifact=_artifact(one, measured), near_ns=near_ns, whole=whole, most=most)
            for *one, near_ns, whole, most in told["texts"]
        ),
        dumps=tuple(_artifact(one, measured) for one in told["dumps"]),
    )


def _told(one: Artifact, measured: dict[hosts.Host, int]) -> list[Any]:
    host = None if one.measured is None else measured.setdefault(one.measured, len(measured))
    path = str(one.path.absolute())
    return [one.name, path, one.kind, one.size, one.rank, one.local_rank, one.host, one.dated_ns, one.near_ns, host]


def _artifact(told: Sequence[Any], measured: Sequence[hosts.Host]) -> Artifact:
    name, path, kind, size, rank, local_rank, host, dated_ns, near_ns, number = told
    return Artifact(
        name=name,
        path=Path(path),
        kind=kind,
        size=size,
        rank=rank,
        local_rank=local_rank,
        host=host,
        dated_ns=dated_ns,
        near_ns=near_ns,
        measured=None if number is None else measured[number],
    )


def _host(told: dict[str, Any]) -> hosts.Host:
    one = hosts.Host(**{**told, "ranks": tuple(told["ranks"]), "before": hosts.Reading(**told["before"])})
    return one if told["after"] is None else replace(one, after=hosts.Reading(**told["after"]))
