"""The decisive evidence of a run, chosen from its frames: how the ranks ended, where they parted, where they stood, what differs.

Every finding names the artifact that shows it. Worker output is hostile input: texts are cut here, escaped by the renderers.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import pandas as pd

from dtprobe.report import hosts, words
from dtprobe.report.load import Place, RunFolder
from dtprobe.report.timeline import QUIET, ended_badly, last_dump

GROUPS = 6
ROWS = 10
FRAMES_OF_A_STACK = 12
ARMS_BY_INTEREST = ("fault", "mitigated", "control")


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How the ranks of an arm ended: equal endings counted over the repeats."""

    arm: str
    who: str
    ending: str
    count: int
    of: int
    wall: str
    bad: bool


@dataclass(frozen=True, kw_only=True)
class Injected:
    """A fault that was put into an arm: how often it fired in how many of its runs, and where the first times."""

    arm: str
    fault: str
    count: int
    runs: int
    where: str


@dataclass(frozen=True, kw_only=True)
class Last:
    """The last collective a rank entered in one group. `behind` is how many collectives it is short of the furthest rank."""

    rank: int
    group: str
    entered: str
    state: str
    behind: int
    call_site: str
    place: Place


@dataclass(frozen=True, kw_only=True)
class Parting:
    """The last collective of every rank of one arm, and in one sentence who is missing where."""

    arm: str
    sentence: str
    rows: tuple[Last, ...]


@dataclass(frozen=True, kw_only=True)
class Stack:
    """Ranks whose main thread stood at the same place; `minority` where most others stood elsewhere."""

    arm: str
    who: str
    count: int
    top: str
    frames: tuple[str, ...]
    minority: bool
    places: tuple[Place, ...]


@dataclass(frozen=True, kw_only=True)
class Table:
    """Counts that differ between the arms, a row a thing and a column an arm. Cells are ready to print."""

    name: str
    title: str
    what: str
    arms: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str
    places: tuple[Place, ...]


def outcomes(folder: RunFolder) -> tuple[Outcome, ...]:
    """How the ranks ended, arm by arm: ranks that always ended alike share a row."""
    rows = [
        {
            "arm": item["arm"],
            "rank": member.get("rank"),
            "ending": words.ending(
                member.get("exit_code"),
                member.get("signal"),
                member.get("timed_out", bool(item.get("timed_out")) and member.get("exit_code") is None),
            ),
            "wall_s": member.get("wall_s"),
            "bad": ended_badly(member),
        }
        for item in folder.arm_runs
        if item.get("arm") in folder.arms
        for member in item.get("ranks") or []
        if isinstance(member, dict)
    ]
    frame = pd.DataFrame(rows, columns=["arm", "rank", "ending", "wall_s", "bad"])
    found = []
    for arm in folder.arms:
        mine = frame[frame["arm"] == arm].astype({"rank": "Int64"})
        runs = mine.groupby("rank", dropna=False).size().max() if len(mine) else 0
        per_rank = mine.groupby(["rank", "ending"], dropna=False, sort=False).agg(
            n=("bad", "size"), walls=("wall_s", list), bad=("bad", "max")
        )
        for (ending, n), rows in per_rank.reset_index().groupby(["ending", "n"], sort=False):
            walls = [float(wall) for some in rows["walls"] for wall in some if not pd.isna(wall)]
            found.append(
                Outcome(
                    arm=arm,
                    who=words.ranks(rows["rank"]),
                    ending=ending,
                    count=int(n),
                    of=int(runs),
                    wall=words.interval(min(walls), max(walls), "s") if walls else "-",
                    bad=bool(rows["bad"].any()),
                )
            )
    return tuple(found)


def partings(folder: RunFolder) -> tuple[Parting, ...]:
    """The last collective of every rank of each arm run that ended badly, where the ranks did not come equally far.

    Where a hang was suspected, as they stood then: afterwards time-outs and late arrivals hide it. In a healthy arm run ranks
    are merely recorded at slightly different moments: that they differ there is no finding.
    """
    frame = folder.frame(
        "collectives", "t_ns", "rank", "source", "kind", "group", "group_desc", "op", "seq", "op_id", "state", "retired",
        "t_started_ns", "t_completed_ns", "call_site",
    )  # fmt: skip
    found = []
    for arm in ARMS_BY_INTEREST:
        repeat = folder.traced_repeat(arm)
        run = folder.arm_run(arm, repeat) or {}
        if not (run.get("timed_out") or any(ended_badly(member) for member in run.get("ranks") or [])):
            continue
        moments = [item["t_ns"] for item in run.get("suspected") or [] if item.get("t_ns") is not None]
        mine = frame[(frame["arm"] == arm) & (frame["repeat"] == repeat) & frame["rank"].notna()]
        rows: list[Last] = []
        sentences = []
        for group, members in last_dump(mine).groupby("group", dropna=False, sort=False):
            found_rows, sentence = _parting_of_group(folder, str(group), members, min(moments, default=None))
            if sentence:
                rows.extend(found_rows)
                sentences.append(sentence)
        if rows:
            found.append(Parting(arm=arm, sentence=" ".join(sentences[:GROUPS]), rows=tuple(rows[: 4 * ROWS])))
    return tuple(found)


def _parting_of_group(folder: RunFolder, group: str, frame: pd.DataFrame, moment_ns: int | None) -> tuple[list[Last], str]:
    frame = frame[frame["seq"].notna() & frame["kind"].ne("p2p").fillna(True)]
    then = frame[frame["t_ns"] <= moment_ns] if moment_ns is not None else frame
    if then.empty:
        return [], ""
    last = then.sort_values(["seq", "t_ns"], kind="stable").groupby("rank").last()
    furthest = int(last["seq"].max())
    rows = []
    for rank, row in last.iterrows():
        rows.append(
            Last(
                rank=int(rank),
                group=_group_name(group, row["group_desc"]),
                entered=f"{words.clip(row['op'], 40)} #{int(row['seq'])}",
                state="waiting" if row["waited"] else "done",
                behind=furthest - int(row["seq"]),
                call_site=words.clip(row["call_site"], 160) if isinstance(row["call_site"], str) else "",
                place=folder.place(row["source"], row["arm"], row["repeat"]),
            )
        )
    late = [row.rank for row in rows if row.behind > 0]
    waiting = [row.rank for row in rows if row.behind == 0 and row.state == "waiting"]
    ops = {row.entered for row in rows if row.behind == 0}
    name = rows[0].group
    if late:
        ahead = next(row for row in rows if row.behind == 0).entered
        there = f"; {words.ranks(waiting)} waited there" if waiting else ""
        came = frame[frame["rank"].isin(late) & (frame["seq"] == furthest)]["t_ns"]
        if moment_ns is not None and len(came):
            later = words.number((int(came.max()) - moment_ns) / 1e9, "s")
            return (
                rows,
                f"In group {name}, {words.ranks(late)} came to {ahead} only {later} after the hang was suspected{there}.",
            )
        return rows, f"In group {name}, {words.ranks(late)} never entered {ahead}{there}."
    if len(ops) > 1:
        return rows, f"In group {name} the ranks met with different operations: {words.listed(sorted(ops))}."
    if waiting:
        return rows, f"In group {name} every rank entered {rows[0].entered}, and {words.ranks(waiting)} waited in it."
    return [], ""


def _group_name(group: str, description: Any) -> str:
    """What people call the group; torch describes one without a description as "undefined"."""
    told = isinstance(description, str) and description not in ("", "undefined")
    return words.clip(description if told else group, 60)


def stacks(folder: RunFolder) -> tuple[Stack, ...]:
    """Main threads at the last dump of each rank, equal ones together: the few that stood elsewhere come first."""
    frame = folder.frame("stacks", "t_ns", "rank", "source", "thread_name", "active", "top", "frames", "digest")
    frame = frame[frame["rank"].notna() & frame["frames"].notna()]
    found: list[Stack] = []
    for arm in ARMS_BY_INTEREST:
        mine = frame[frame["arm"] == arm]
        if mine.empty:
            continue
        counts = mine.groupby("repeat")["rank"].nunique()
        mine = mine[mine["repeat"] == counts[counts == counts.max()].index[-1]]
        mine = mine.assign(main=mine["thread_name"].astype(str).str.contains("MainThread"))
        last = mine.sort_values(["main", "t_ns"], kind="stable", na_position="first").groupby("rank").last().reset_index()
        groups = sorted(last.groupby("digest", dropna=False, sort=False), key=lambda item: len(item[1]))
        largest = len(groups[-1][1])
        for _, rows in groups[:GROUPS]:
            first = rows.iloc[0]
            frames = [words.clip(text, 160) for text in str(first["frames"]).split(";", FRAMES_OF_A_STACK)]
            if len(frames) > FRAMES_OF_A_STACK:
                frames[-1] = "(outer frames left out)"
            found.append(
                Stack(
                    arm=arm,
                    who=words.ranks(rows["rank"]),
                    count=len(rows),
                    top=words.clip(first["top"] if isinstance(first["top"], str) else frames[0], 160),
                    frames=tuple(frames),
                    minority=len(groups) > 1 and len(rows) < largest,
                    places=tuple(folder.place(row["source"], arm, row["repeat"]) for _, row in rows.head(3).iterrows()),
                )
            )
    return tuple(found)


def injected(folder: RunFolder) -> tuple[Injected, ...]:
    """The injections of all arm runs; one that never fired is said so, as it proves nothing."""
    found: dict[tuple[str, str], list[tuple[Any, Any]]] = {}
    runs: dict[tuple[str, str], int] = {}
    for run in folder.arm_runs:
        for item in run.get("injections") or []:
            key = (run["arm"], words.clip(item.get("fault"), 200))
            runs[key] = runs.get(key, 0) + 1
            found.setdefault(key, []).extend((firing, run.get("started_ns")) for firing in item.get("fired") or [])
    return tuple(
        Injected(arm=arm, fault=fault, count=len(firings), runs=runs[arm, fault], where=_firings(firings[:3]))
        for (arm, fault), firings in found.items()
    )


def _firings(firings: Iterable[tuple[Any, Any]]) -> str:
    told = []
    for firing, start in firings:
        parts = [f"rank {firing['rank']}"] if firing.get("rank") is not None else []
        if firing.get("call"):
            parts.append(words.clip(firing["call"], 40) + (f" #{firing['nth']}" if firing.get("nth") is not None else ""))
        if start is not None and firing.get("t_ns") is not None:
            parts.append(f"after {words.number((firing['t_ns'] - start) / 1e9, 's')}")
        if firing.get("detail"):
            parts.append(words.clip(firing["detail"], 120))
        told.append(", ".join(parts))
    return "; ".join(told)


def tables(folder: RunFolder) -> tuple[Table, ...]:
    """What tells the arms apart: hosts and their clocks, system calls, kernel events, file events, and what the worker reported."""
    made = (
        hosts.table(folder),
        _calls(folder),
        _counts(folder, "perf_counts", "event", "count", "Kernel events", "event"),
        _files(folder),
        _events(folder),
    )
    return tuple(table for table in made if table is not None)


def _calls(folder: RunFolder) -> Table | None:
    frame = folder.frame("syscalls", "source", "kind", "name", "errno", "duration_s")
    frame = frame[frame["kind"].eq("syscall").fillna(False)]
    failed = frame["errno"].notna()
    frame = frame.assign(
        what=frame["name"].astype(str).where(~failed, frame["name"].astype(str) + " failed with " + frame["errno"].astype(str))
    )
    return _pivot(folder, frame, "syscalls", "System calls", "call", "In the traced repeat of each arm, all ranks together.")


def _counts(folder: RunFolder, name: str, what: str, weight: str, title: str, noun: str) -> Table | None:
    frame = folder.frame(name, "source", what, weight)
    frame = frame.assign(what=frame[what].astype(str), weight=frame[weight]) if len(frame) else frame
    return _pivot(folder, frame, name, title, noun, "In the traced repeat of each arm, all ranks together.")


def _files(folder: RunFolder) -> Table | None:
    frame = folder.frame("file_events", "source", "kind", "path", "holders")
    if frame.empty:
        return None
    short = frame["path"].astype(str).str.rsplit("/", n=1).str[-1].str.slice(0, 60)
    frame = frame.assign(what=frame["kind"].astype(str) + " " + short)
    note = "In the traced repeat of each arm."
    held = _holders(frame["holders"].dropna())
    if held:
        note += f" Seen with the files open: {held}."
    return _pivot(folder, frame, "file_events", "File events", "event and file", note)


def _holders(values: Iterable[Any]) -> str:
    names: dict[str, int] = {}
    for text in list(values)[:5000]:
        try:
            for entry in json.loads(text):
                name = words.clip(entry[1], 40)
                names[name] = names.get(name, 0) + 1
        except (ValueError, TypeError, IndexError):
            continue
    return words.listed(sorted(names, key=lambda name: -names[name]), 5)


def _events(folder: RunFolder) -> Table | None:
    frame = folder.frame("events", "source", "kind", "name")
    frame = frame[~frame["kind"].isin(QUIET)]
    if frame.empty:
        return None
    named = frame["name"].notna() & frame["name"].ne("").fillna(False)
    frame = frame.assign(
        what=frame["kind"].astype(str).where(~named, frame["kind"].astype(str) + " " + frame["name"].astype(str))
    )
    note = "In the traced repeat of each arm, all ranks together."
    return _pivot(folder, frame, "events", "What the worker reported", "observation", note)


def _pivot(folder: RunFolder, frame: pd.DataFrame, name: str, title: str, what: str, note: str) -> Table | None:
    """Counts by thing and arm, those with the largest difference between arms first; None where nothing differs."""
    arms = [arm for arm in folder.arms if arm in set(frame["arm"])]
    chosen = [(arm, folder.traced_repeat(arm)) for arm in arms]
    mine = (
        pd.concat([frame[(frame["arm"] == arm) & (frame["repeat"] == repeat)] for arm, repeat in chosen]) if chosen else frame
    )
    if mine.empty:
        return None
    weight = mine["weight"].astype("Float64") if "weight" in mine else pd.Series(1, index=mine.index)
    counts = (
        weight.groupby([mine["what"].str.slice(0, 80), mine["arm"]])
        .sum()
        .unstack(fill_value=0)
        .reindex(columns=arms, fill_value=0)
    )
    if len(arms) > 1:
        counts["apart"] = counts[arms].max(axis=1) - counts[arms].min(axis=1)
        counts = counts[counts["apart"] > 0]
    else:
        counts["apart"] = counts[arms[0]]
    if counts.empty:
        return None
    counts = counts.sort_values("apart", ascending=False, kind="stable").head(ROWS)
    rows = tuple((words.clip(thing, 80), *(words.number(row[arm]) for arm in arms)) for thing, row in counts.iterrows())
    sources = [
        folder.place(source, arm, repeat)
        for arm, repeat in chosen
        for source in mine.loc[(mine["arm"] == arm) & mine["source"].notna(), "source"].unique()[:2]
    ]
    return Table(
        name=name, title=title, what=what, arms=tuple(arms), rows=rows, note=note,
        places=tuple(item for item in sources if item.href is not None)[:6],
    )  # fmt: skip
