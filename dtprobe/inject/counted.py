"""Faults at counted collectives, seen from the harness: what the ranks need to count, and why a fault never fired."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dtprobe.catalog import load_module
from dtprobe.inject import Site, Target
from dtprobe.inject.inrank import HOOK, lines
from dtprobe.inject.spec import closest

_ops = load_module(HOOK / "_dtprobe_ops.py", "_dtprobe_hook_ops")
NAMES: tuple[str, ...] = _ops.NAMES
"""Collectives by torch.distributed's names; isend and irecv are send and recv."""
REDUCING: tuple[str, ...] = _ops.REDUCING
ROOTED: tuple[str, ...] = _ops.ROOTED
WITHOUT_DATA: tuple[str, ...] = _ops.WITHOUT_DATA

COUNTED = ("op", "group", "nth", "every", "times", "probability")
"""Keys of `Target` that are about counted calls."""


def check_op(name: str | None) -> None:
    """Raises ValueError, with the closest names, for a collective that does not exist."""
    if name is not None and name not in NAMES:
        raise ValueError(f"no collective is called {name!r}; {closest(name, NAMES)}")


def part(target: Target, site: Site) -> dict[str, Any]:
    """What of a fault's part in the plan makes a rank count: as `_dtprobe_calls` reads it."""
    return {
        "index": site.index,
        "seed": site.seed,
        "rank": target.rank,
        "after_s": target.after_s or 0.0,
        "counted": {name: getattr(target, name) for name in COUNTED},
    }


def why_not(target: Target, site: Site, what: str = "collective") -> list[str]:
    """Why no targeted rank came to the call, in words, from what the ranks have said; for a fault that never fired.

    `what` is counted where the target names no op.
    """
    told: dict[int, dict[str, Mapping[str, Any]]] = {}
    for line in lines(site):
        if line["rank"] is not None:
            told.setdefault(line["rank"], {})[line["kind"]] = line
    seen = sorted(int(folder.name[4:]) for folder in site.folder.glob("rank*") if folder.name[4:].isdigit())
    absent = sorted(set(target.rank or ()) - set(seen))
    found = []
    if absent:
        there = f"ranks {_several(seen)} did" if len(seen) > 1 else f"rank {seen[0]} did" if seen else "no other did either"
        found.append(
            f"rank {_several(absent)} never started Python with the hook; {there}"
            " (the hook needs RANK or an MPI rank in the environment; python -I, -E and -S pass it by)"
        )
    elif not told:
        found.append("no rank started Python with the hook (the hook needs RANK or an MPI rank in the environment)")
    for rank, kinds in sorted(told.items()):
        if "refused" in kinds or "loaded" not in kinds:
            continue
        if "torch" not in kinds:
            found.append(f"rank {rank}: Python ran, but torch was never imported")
        elif "counted" not in kinds:
            found.append(
                f"rank {rank}: it ended before the call came, by a signal or os._exit, and could not say how many calls it made"
            )
        else:
            found.append(f"rank {rank}: {_came(target, target.op or what, kinds['counted']['nth'])}")
    return found


def _came(target: Target, what: str, count: int) -> str:
    where = f" on group {target.group}" if target.group else ""
    if count == 0:
        return f"torch was imported, but no {what} came{where}"
    asked = [f"{key}={value:g}" for key in ("every", "probability", "after_s") if (value := getattr(target, key)) is not None]
    if target.nth:
        asked.insert(0, f"nth={_several(target.nth)}")
    return f"{count} {what} calls came{where}" + (f", which {' and '.join(asked)} did not meet" if asked else "")


def _several(numbers: tuple[int, ...] | list[int]) -> str:
    return ", ".join(map(str, numbers))
