"""What each rank did when: its life, its collectives, what it reported, and where nothing moved.

Everything is computed here; `figures` only draws.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import pandas as pd

from dtprobe.report import words
from dtprobe.report.load import RunFolder
from dtprobe.report.series import Window, fault_windows, starts

LANES = 16
BARS = 240
"""Bars a lane at most: neighbours closer than the width of a pixel become one."""
MARKS = 40
STALL_S = 1.5
STALL_SHARE = 0.2
"""A stall is at least so long, and at least this share of the arm: shorter gaps are the ordinary pace of a job and its end."""
START_UP_SHARE = 0.08
QUIET = ("fault_begin", "fault_end")


@dataclass(frozen=True, kw_only=True)
class Span:
    """A stretch of a lane in seconds after the arm began. `kind` is collective, waiting, stall or start.

    `waited` marks a collective that some dump found open, though its end is not known.
    """

    begin_s: float
    end_s: float
    kind: str
    text: str
    waited: bool = False


@dataclass(frozen=True, kw_only=True)
class Mark:
    """A moment of a lane: an event that the worker reported, `count` times without a visible gap.

    `common` is how often all ranks of the arm run reported this kind.
    """

    t_s: float
    text: str
    common: int
    count: int = 1


@dataclass(frozen=True, kw_only=True)
class Lane:
    """One rank: from its start to its end, what it did in between, how it ended ("" where a launcher's child was not awaited)."""

    name: str
    begin_s: float
    end_s: float
    ending: str
    bad: bool
    spans: tuple[Span, ...]
    marks: tuple[Mark, ...]


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """One arm run on its own clock. `left_out` ranks did what others did and are not drawn."""

    arm: str
    repeat: int
    length_s: float
    lanes: tuple[Lane, ...]
    windows: tuple[Window, ...]
    suspected_s: tuple[float, ...]
    left_out: int
    summary: str


def timelines(folder: RunFolder) -> tuple[Timeline, ...]:
    """A timeline of each arm's traced repeat: the fault first, as that is what the reader came for."""
    windows = fault_windows(folder)
    collectives = folder.frame(
        "collectives",
        "t_ns",
        "rank",
        "kind",
        "group",
        "op",
        "seq",
        "op_id",
        "state",
        "retired",
        "t_started_ns",
        "t_completed_ns",
    )
    events = folder.frame("events", "t_ns", "rank", "kind", "name")
    alive = folder.frame("proc", "t_ns", "rank")
    made = [_timeline(folder, arm, collectives, events, alive, windows) for arm in ("fault", "mitigated", "control")]
    return tuple(item for item in made if item is not None and item.lanes)


def ended_badly(member: Mapping[str, Any]) -> bool:
    """Whether a rank of `run.json` ended by a signal, at the deadline or with a code; an unknown end is not known to be bad."""
    return bool(member.get("exit_code")) or member.get("signal") is not None or bool(member.get("timed_out"))


def last_dump(collectives: pd.DataFrame) -> pd.DataFrame:
    """One row a collective of a rank, in the order of time, from however many dumps a recorder took.

    `done` says whether the last dump knows the rank to have left it; a completion that any dump saw counts. `waited` says
    whether some dump found the rank inside: on gloo a collective that failed looks completed afterwards, so that counts.
    """
    key = ["arm", "repeat", "rank", "group", "kind", "seq", "op_id", "t_ns"]
    rows = collectives.dropna(subset=["t_ns"])
    retired = rows["retired"].astype("boolean").fillna(False).astype(bool)
    completed = rows["state"].astype("string").eq("completed").fillna(False).astype(bool)
    done = retired | completed | rows["t_completed_ns"].notna()
    found = rows.assign(done=done, waited=~done).groupby(key, dropna=False, as_index=False, sort=False)
    last = found.last()
    waited = found["waited"].max()["waited"]
    if "source" in last:
        last["source"] = found["source"].first()["source"]  # the first dump that has it is the one that saw it open
    left = last["done"].astype(bool) | last["t_completed_ns"].notna()
    return last.assign(done=left, waited=waited.astype(bool)).sort_values("t_ns", kind="stable")


def _timeline(
    folder: RunFolder,
    arm: str,
    collectives: pd.DataFrame,
    events: pd.DataFrame,
    alive: pd.DataFrame,
    windows: tuple[Window, ...],
) -> Timeline | None:
    repeat = folder.traced_repeat(arm)
    run = folder.arm_run(arm, repeat)
    if run is None or repeat is None:
        return None
    start = starts(folder).get((arm, repeat))
    if start is None:
        return None
    ended = run.get("ended_ns") or max(
        [start, *events.loc[(events["arm"] == arm) & (events["repeat"] == repeat), "t_ns"].dropna().tolist()]
    )
    if ended <= start:
        return None
    length_s = (ended - start) / 1e9
    mine = last_dump(collectives[(collectives["arm"] == arm) & (collectives["repeat"] == repeat)])
    seen = events[(events["arm"] == arm) & (events["repeat"] == repeat) & ~events["kind"].isin(QUIET)].dropna(subset=["t_ns"])
    members = [item for item in run.get("ranks") or [] if isinstance(item, dict)]
    known = {item.get("rank") for item in members}
    found = sorted({int(rank) for frame in (mine, seen) for rank in frame["rank"].dropna().unique()} - known)
    for rank in found:  # a launcher's children, seen by what they left only: alive until the last sample of them
        samples = alive[(alive["arm"] == arm) & (alive["repeat"] == repeat) & alive["rank"].eq(rank).fillna(False)][
            "t_ns"
        ].dropna()
        wall_s = (int(samples.max()) - start) / 1e9 if len(samples) else None
        members.append({"rank": rank, "launched": True, "wall_s": wall_s})
    lanes = [_lane(item, start, length_s, mine, seen, bool(run.get("timed_out"))) for item in members]
    # with more ranks than fit, those that ended badly or stalled are the ones to see
    chosen = sorted(lanes, key=lambda lane: (not lane.bad, not any(span.kind == "stall" for span in lane.spans)))[:LANES]
    shown = tuple(lane for lane in lanes if lane in chosen)
    suspected = tuple(
        (item["t_ns"] - start) / 1e9
        for item in run.get("suspected") or []
        if isinstance(item, dict) and item.get("t_ns") is not None
    )
    return Timeline(
        arm=arm,
        repeat=repeat,
        length_s=length_s,
        lanes=shown,
        windows=tuple(window for window in windows if window.arm == arm),
        suspected_s=suspected[:8],
        left_out=len(lanes) - len(shown),
        summary=_summary(arm, length_s, shown),
    )


def _lane(
    member: dict, start: int, length_s: float, collectives: pd.DataFrame, events: pd.DataFrame, arm_timed_out: bool
) -> Lane:
    rank = member.get("rank")
    wall_s = member.get("wall_s")
    end_s = min(float(wall_s), length_s) if wall_s is not None else length_s
    late = member.get("timed_out", arm_timed_out and member.get("exit_code") is None)
    spans = _spans(collectives[collectives["rank"].eq(rank).fillna(False)], start, end_s, length_s)
    own = events[events["rank"].eq(rank).fillna(False)].sort_values("t_ns", kind="stable")
    moments = [(int(t) - start) / 1e9 for t in own["t_ns"]]
    named = _names(own)
    marks = _marks(moments, named, length_s, Counter(_names(events)))
    silences = _silences(spans, moments, end_s, length_s, clean=not ended_badly(member))
    return Lane(
        name="command" if rank is None else f"rank {rank}",
        begin_s=0.0,
        end_s=end_s,
        ending="" if member.get("launched") else words.ending(member.get("exit_code"), member.get("signal"), late),
        bad=ended_badly(member),
        spans=(*silences, *spans),
        marks=tuple(marks),
    )


def _names(events: pd.DataFrame) -> list[str]:
    """What each event is called in a picture: its name, else its kind."""
    pairs = zip(events["kind"], events["name"], strict=True)
    return [words.clip(name if isinstance(name, str) and name else kind, 32) for kind, name in pairs]


def _spans(rows: pd.DataFrame, start: int, end_s: float, length_s: float) -> list[Span]:
    """Bars of one rank's collectives; those without a known completion last to the next one, or for ever where not retired."""
    spans: list[Span] = []
    least = length_s / BARS
    run_of = 0
    for row in rows.itertuples():
        begin_s = (int(row.t_ns) - start) / 1e9
        known = not pd.isna(row.t_completed_ns)
        finish_s = (int(row.t_completed_ns) - start) / 1e9 if known else begin_s if row.done else end_s
        kind = "collective" if row.done else "waiting"
        number = "" if pd.isna(row.seq) else f" #{int(row.seq)}"
        text = f"{words.clip(row.op, 40)}{number}"
        waited = row.done and row.waited and not known
        near = bool(spans) and begin_s - spans[-1].end_s < least
        if near and kind == "collective" and spans[-1].kind == kind and not (waited or spans[-1].waited):
            run_of += 1
            before = spans[-1]
            first = before.text.split(" to ")[0] if run_of > 1 else before.text
            spans[-1] = Span(begin_s=before.begin_s, end_s=max(before.end_s, finish_s), kind=kind, text=f"{first} to {text}")
            continue
        run_of = 0
        spans.append(Span(begin_s=begin_s, end_s=max(finish_s, begin_s), kind=kind, text=text, waited=waited))
    return spans


def _marks(moments: list[float], names: list[str], length_s: float, common: Mapping[str, int]) -> list[Mark]:
    marks: list[Mark] = []
    least = length_s / BARS * 2
    for t_s, name in zip(moments, names, strict=True):
        if marks and marks[-1].text == name and t_s - marks[-1].t_s < least * marks[-1].count:
            marks[-1] = replace(marks[-1], count=marks[-1].count + 1)
        else:
            marks.append(Mark(t_s=t_s, text=name, common=common[name]))
    if len(marks) > MARKS:  # evenly thinned; the first and last of a kind say most
        keep = {round(i * (len(marks) - 1) / (MARKS - 1)) for i in range(MARKS)}
        marks = [mark for i, mark in enumerate(marks) if i in keep]
    return marks


def _silences(spans: list[Span], moments: list[float], end_s: float, length_s: float, *, clean: bool) -> list[Span]:
    """The start-up of a rank, and the gaps between its signs of life that are long for this arm: waits and stalls.

    A gap that begins at a collective which some dump found open is a wait in it. Other gaps are stalls, but for those before
    a worker that reports what it does has said anything, and for the end of a process that exited well or had reported last.
    """
    signs = sorted([span.begin_s for span in spans] + [span.end_s for span in spans] + moments)
    if not signs:
        return []
    found = []
    if signs[0] > START_UP_SHARE * length_s:
        found.append(Span(begin_s=0.0, end_s=min(signs[0], end_s), kind="start", text="start-up"))
    begun = min(moments, default=signs[0])
    entered = {span.end_s: span for span in spans if span.waited}
    least = max(STALL_S, STALL_SHARE * length_s)
    for a, b in pairwise([*signs, end_s]):
        if b - a < least or any(span.begin_s <= a and span.end_s >= b for span in spans):
            continue
        last = b == end_s and (clean or a in moments)
        if a in entered:
            found.append(Span(begin_s=entered[a].begin_s, end_s=b, kind="waiting", text=entered[a].text))
        elif a >= begun and not last:
            found.append(Span(begin_s=a, end_s=b, kind="stall", text=f"silent for {words.number(b - a, 's')}"))
    return found


def _summary(arm: str, length_s: float, lanes: tuple[Lane, ...]) -> str:
    parts = []
    for lane in lanes[:LANES]:
        waiting = [span for span in lane.spans if span.kind == "waiting"]
        stalls = [span for span in lane.spans if span.kind == "stall"]
        text = f"{lane.name}: {lane.ending or 'end not recorded'}"
        if waiting:
            text += f", waited in {waiting[-1].text} for {words.number(waiting[-1].end_s - waiting[-1].begin_s, 's')}"
        elif stalls:
            longest = max(stalls, key=lambda span: span.end_s - span.begin_s)
            text += f", {longest.text} from {words.number(longest.begin_s, 's')}"
        parts.append(text)
    return f"Timeline of the {arm} arm, {words.number(length_s, 's')} long. {'; '.join(parts)}."
