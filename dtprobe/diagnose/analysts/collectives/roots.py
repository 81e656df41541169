"""What sizes tell of roots: torch records none, but only the root of a gather has outputs, and only that of a scatter inputs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from dtprobe.diagnose.analysts.collectives.kinds import base
from dtprobe.diagnose.analysts.collectives.recording import Call, Group, Recording
from dtprobe.readers.flight_columns import Kind, Lane


@dataclass(frozen=True, kw_only=True)
class Roots:
    """Several ranks of a group hold themselves for the root of one call."""

    group: Group
    seq: int
    calls: tuple[Call, ...]


def several(recording: Recording) -> Iterator[Roots]:
    """The first such call of every group."""
    rooted = {number for number, kind in enumerate(recording.tables.kinds) if _is_root(kind)}
    if not rooted:
        return
    for group, ranks in recording.groups().items():
        lane = Lane(group.name)
        found: dict[int, list[Call]] = {}
        for rank in ranks:
            column = recording.ranks[rank].columns[lane]
            for place, kind in enumerate(column.kind):
                if kind in rooted:
                    found.setdefault(column.seq[place], []).append(Call(rank, lane, place))
        seq = min((seq for seq, calls in found.items() if len(calls) > 1), default=None)
        if seq is not None:
            yield Roots(group=group, seq=seq, calls=tuple(found[seq]))


def _is_root(kind: Kind) -> bool:
    op = base(kind.op)
    return (op == "gather" and bool(kind.outs) and len(kind.outs or ()) > 1) or (
        op == "scatter" and bool(kind.ins) and len(kind.ins or ()) > 1
    )
