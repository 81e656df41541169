"""The calls into libnccl of every rank, recorded by a preloaded library, and which of them are under way.

A flight recorder knows an operation once torch has handed it to NCCL. The ring also knows the calls in which the host itself
waits: the creation of a communicator to which a rank does not come, and the first operation on one. The library is
that of `injectors/nccl`, without any fault; it costs a call less than a microsecond.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pandas as pd

from dtprobe.errors import Unavailable
from dtprobe.probes import Recorded, Recorder, Where
from dtprobe.probes.stall import UNLIMITED_MS, Operation, Records
from dtprobe.readers.nccl_ring import read_nccl_ring

FOLDER = "DTPROBE_NCCL_FOLDER"
"""The variable that tells the library where to put `rank<k>/nccl-<pid>.ring`."""


@dataclass(frozen=True, kw_only=True)
class NcclCalls:
    """Preloads `library`, the compiled one of `injectors/nccl`, into the job."""

    name: ClassVar[str] = "nccl_calls"
    heavy: ClassVar[bool] = False

    library: Path | Unavailable

    def probe(self) -> Unavailable | None:
        return self.library if isinstance(self.library, Unavailable) else None

    def recorder(self, where: Where) -> Recorder:
        return _Recorder(self, where)


class _Recorder(Recorder):
    def __init__(self, config: NcclCalls, where: Where) -> None:
        self._library = config.library
        self._where = where

    def environ(self, rank: int | None) -> Mapping[str, str]:
        return {"LD_PRELOAD": str(self._library), FOLDER: str(self._where.folder)}

    def stop(self) -> Recorded:
        return Recorded(files=tuple(sorted(self._where.folder.glob("rank*/nccl-*.ring"))))


def ring(folder: Path, pid: int) -> Path | None:
    """The ring of a process of the job that records into `folder`, where there is one."""
    return next(folder.glob(f"rank*/nccl-{pid}.ring"), None)


def records(rings: Mapping[int, Path], world_size: int) -> dict[int, Records]:
    """What each rank called, in the form of a flight recorder: a call is open while it has not returned to the program.

    Communicators that also send and receive are left out: their ranks' calls do not correspond by number. Raises ReaderError.
    """
    frames = {rank: read_nccl_ring(path) for rank, path in rings.items()}
    p2p = _with_p2p(frames)
    users: dict[str, set[int]] = {}
    sizes: dict[str, int] = {}
    for rank, frame in frames.items():
        known = frame.dropna(subset=["comm", "nranks"])
        for comm, nranks in zip(known["comm"], known["nranks"], strict=True):
            users.setdefault(comm, set()).add(rank)
            sizes[comm] = int(nranks)
    members = {comm: frozenset(ranks) for comm, ranks in users.items() if len(ranks) == sizes[comm]}
    members |= {comm: frozenset(range(world_size)) for comm, size in sizes.items() if size == world_size}
    members[_creation(world_size)] = frozenset(range(world_size))
    return {
        rank: Records(operations=tuple(_operations(frame, p2p)), members=members if rank == min(frames) else {})
        for rank, frame in frames.items()
    }


@dataclass(frozen=True, kw_only=True)
class Differing:
    """The first call on a communicator that its ranks made with other arguments: each rank's, and the ranks that are `odd`.

    Those depart from most, or, where no most are, from what was called on it before; none where neither tells.
    """

    comm: str
    seq: int
    calls: Mapping[int, str]
    odd: tuple[int, ...]

    def __str__(self) -> str:
        by_call: dict[str, list[int]] = {}
        for rank, call in sorted(self.calls.items()):
            by_call.setdefault(call, []).append(rank)
        said = "; ".join(f"rank {', '.join(map(str, ranks))}: {call}" for call, ranks in by_call.items())
        return f"call {self.seq} on NCCL communicator {self.comm[:8]} is not the same on all ranks ({said})"


def differing(frames: Mapping[int, pd.DataFrame]) -> Differing | None:
    """The earliest call that ranks made together and with other arguments, from their frames `nccl_calls`.

    All ranks of a collective of NCCL hand over the same count, type, root and operation; torch's flight recorder holds no roots and no operations.
    Communicators that also send and receive are left out, as in `records`.
    """
    found, p2p = [], _with_p2p(frames)
    for comm, calls in _arguments(frames).items():
        if comm in p2p:
            continue
        shared = set.intersection(*(set(own) for own in calls.values()))
        for seq in sorted(shared):
            at = {rank: own[seq][1] for rank, own in calls.items()}
            if len(set(at.values())) > 1:
                when = min(own[seq][0] for own in calls.values())
                found.append((when, Differing(comm=comm, seq=seq, calls=at, odd=_odd(at, calls, seq))))
                break
    return min(found, key=lambda one: one[0])[1] if found else None


def _with_p2p(frames: Mapping[int, pd.DataFrame]) -> set[str]:
    """Communicators on which somebody sent or received: that counts too, so that the ranks' calls do not correspond by number."""
    return {comm for frame in frames.values() for comm in frame.loc[frame["kind"] == "p2p", "comm"].dropna()}


def _arguments(frames: Mapping[int, pd.DataFrame]) -> dict[str, dict[int, dict[int, tuple[int, str]]]]:
    """Of each communicator that several ranks have, each rank's collectives by number: when, and what in words."""
    found: dict[str, dict[int, dict[int, tuple[int, str]]]] = {}
    for rank, frame in frames.items():
        for row in frame[frame["kind"] == "collective"].dropna(subset=["comm", "seq"]).itertuples():
            words = [str(row.call)]
            words += [f"{row.count} {row.dtype}"] if not pd.isna(row.count) else []
            words += [f"{row.redop}"] if not pd.isna(row.redop) else []
            words += [f"root {row.root}"] if not pd.isna(row.root) else []
            found.setdefault(row.comm, {}).setdefault(rank, {})[int(row.seq)] = int(row.t_ns), " ".join(words)
    return {comm: calls for comm, calls in found.items() if len(calls) > 1}


def _odd(at: Mapping[int, str], calls: Mapping[int, Mapping[int, tuple[int, str]]], seq: int) -> tuple[int, ...]:
    call, most = Counter(at.values()).most_common(1)[0]
    usual = {call} if most > len(at) / 2 else set()
    if not usual:
        before = {one for own in calls.values() for number, (_, one) in own.items() if number < seq}
        usual = before & set(at.values())
    return tuple(sorted(rank for rank, one in at.items() if one not in usual)) if len(usual) == 1 else ()


def _operations(frame: pd.DataFrame, leave_out: set[Any]) -> list[Operation]:
    found = []
    created: dict[str, int] = {}
    under_way = _under_way(frame)
    for row in frame.itertuples():
        name = f"nccl:{row.call}"
        if row.kind == "init" and not pd.isna(row.nranks):
            group = _creation(int(row.nranks))
            created[group] = created.get(group, 0) + 1
            place, desc, size = created[group], f"communicators of {row.nranks} ranks", ""
        elif row.kind == "collective" and not pd.isna(row.seq) and row.comm not in leave_out:
            group, place, desc = row.comm, int(row.seq), f"NCCL communicator {row.comm[:8]}"
            size = f"[{row.count}]" if not pd.isna(row.count) else ""
        else:
            continue
        found.append(
            Operation(
                name=name,
                group=group,
                group_desc=desc,
                seq=place,
                sizes=size,
                created_ns=int(row.t_ns),
                timeout_ms=UNLIMITED_MS,
                open=row.Index in under_way,
            )
        )
    return found


def _creation(ranks: int) -> str:
    """Communicators have no name before they exist: their creations go by size and order."""
    return f"creation of {ranks}"


def _under_way(frame: pd.DataFrame) -> set[Any]:
    """Calls that have not returned, and those of a group whose end has not."""
    found = set(frame.index[frame["in_flight"].fillna(False)])
    for _, calls in frame.groupby("tid"):
        if calls["call"].iloc[-1] == "ncclGroupEnd" and calls["in_flight"].iloc[-1]:
            for row in calls.iloc[-2::-1].itertuples():
                if row.call == "ncclGroupEnd" or not (row.in_group or row.call == "ncclGroupStart"):
                    break
                found.add(row.Index)
    return found
