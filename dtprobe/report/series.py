"""What the ranks held over time, arm against arm: threads, descriptors, mappings, memory, processor, and the worker's own values.

Everything is computed here; `figures` only draws.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from dtprobe.report import words
from dtprobe.report.load import RunFolder

GRID = 72
"""Points along a line: one each 3 or 4 pixels of the narrowest panel."""

PANELS = 6
VALUED_PANELS = 4
WINDOWS = 12
BEFORE = 0.15
"""How much of the time before zero is shown, as a share of the time after it."""


@dataclass(frozen=True, kw_only=True)
class Measure:
    """A column of the `proc` frame as a reader knows it. `least` is the difference that is worth a picture, in `unit`."""

    column: str
    title: str
    unit: str
    least: float


MEASURES = (
    Measure(column="threads", title="Threads", unit="", least=2),
    Measure(column="fds", title="Open descriptors", unit="", least=4),
    Measure(column="sockets", title="Sockets", unit="", least=4),
    Measure(column="pipes", title="Pipes", unit="", least=4),
    Measure(column="maps", title="Memory mappings", unit="", least=20),
    Measure(column="rss_bytes", title="Resident memory", unit="B", least=16 << 20),
    Measure(column="cpu_percent", title="Processor, % of one core", unit="%", least=25),
)


@dataclass(frozen=True, kw_only=True)
class Window:
    """A span of one arm in which its fault was in place, in seconds after the arm began; a moment where both ends are equal."""

    arm: str
    begin_s: float
    end_s: float
    text: str


@dataclass(frozen=True, kw_only=True)
class Panel:
    """One measure over time.

    `lines` has the columns arm, t_s, low, mid, high: the median over all repeats and ranks and the span they cover.
    `last` maps each arm to the final median, `peak` is the arm with the highest one. `summary` says in words what the picture shows.
    """

    name: str
    title: str
    unit: str
    lines: pd.DataFrame
    last: dict[str, float]
    peak: str
    windows: tuple[Window, ...]
    summary: str


@dataclass(frozen=True, kw_only=True)
class Growth:
    """The panels that are worth a look, and the measures that stayed the same in all arms.

    `aligned` says that time zero is the worker's own first report, not the start of its process.
    """

    panels: tuple[Panel, ...]
    unchanged: tuple[str, ...]
    aligned: bool


def growth(folder: RunFolder) -> Growth:
    """Panels of the run: first what differs between its arms, most first, then the values that the worker reported."""
    zeros = first_reports(folder)
    windows = fault_windows(folder, zeros)
    panels, unchanged = _proc_panels(folder, zeros or starts(folder), windows)
    valued = _valued_panels(folder, zeros or starts(folder), windows)
    return Growth(panels=tuple([*panels, *valued]), unchanged=tuple(unchanged), aligned=zeros is not None)


def starts(folder: RunFolder) -> dict[tuple[str, int], int]:
    """When each arm run began, in nanoseconds, by arm and repeat; the bare runs are no part of it."""
    return {
        (item["arm"], item["repeat"]): item["started_ns"]
        for item in folder.arm_runs
        if item.get("arm") in folder.arms and item.get("started_ns") is not None and item.get("repeat") is not None
    }


def first_reports(folder: RunFolder) -> dict[tuple[str, int], int] | None:
    """When the first rank of each arm run reported something of its own; None unless each of them did.

    How long a rank starts up (mostly the import of torch) varies by seconds. Repeats can only be laid over each other from
    where their work begins.
    """
    began = starts(folder)
    events = folder.frame("events", "t_ns")
    first = events.dropna(subset=["t_ns", "arm", "repeat"]).groupby(["arm", "repeat"])["t_ns"].min()
    found = {(str(arm), int(repeat)): int(t_ns) for (arm, repeat), t_ns in first.items()}
    return {key: found[key] for key in began} if began and began.keys() <= found.keys() else None


def fault_windows(folder: RunFolder, zeros: Mapping[tuple[str, int], int] | None = None) -> tuple[Window, ...]:
    """When the fault was in place in each arm's traced repeat: events `fault_begin` and `fault_end`, and fired injections.

    A span that never ended goes on to the end of its arm; an injection that fired at one call is a moment. Seconds count from
    `zeros`, else from the start of the arm run.
    """
    found: list[Window] = []
    began = zeros or starts(folder)
    events = folder.frame("events", "t_ns", "kind", "name", "rank")
    events = events[events["kind"].isin(["fault_begin", "fault_end"])].dropna(subset=["t_ns"])
    for arm in folder.arms:
        repeat = folder.traced_repeat(arm)
        start = began.get((arm, repeat)) if repeat is not None else None
        run = folder.arm_run(arm, repeat)
        if start is None or run is None:
            continue
        ended = run.get("ended_ns") or start
        mine = events[(events["arm"] == arm) & (events["repeat"] == repeat)].sort_values("t_ns")
        spans = []
        for row in mine[mine["kind"] == "fault_begin"].itertuples():
            after = mine[(mine["kind"] == "fault_end") & (mine["t_ns"] >= row.t_ns)]
            same = after[after["rank"].eq(row.rank).fillna(False)] if not pd.isna(row.rank) else after
            end = int((same if len(same) else after)["t_ns"].iloc[0]) if len(after) else ended
            spans.append((int(row.t_ns), end, row.name if isinstance(row.name, str) and row.name else "fault"))
        for fault, firing in fired(run):
            spans.append((firing["t_ns"], firing.get("ended_ns") or firing["t_ns"], fault))
        for begin, end, text in spans:
            found.append(Window(arm=arm, begin_s=(begin - start) / 1e9, end_s=(end - start) / 1e9, text=words.clip(text, 60)))
    merged: dict[tuple[str, str, float, float], Window] = {}
    for window in found:  # all ranks report one fault at nearly the same moment
        merged.setdefault((window.arm, window.text, round(window.begin_s, 1), round(window.end_s, 1)), window)
    return tuple(list(merged.values())[:WINDOWS])


def fired(run: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """(fault in the grammar, firing) for each time that an injection of an arm run fired."""
    for item in run.get("injections") or []:
        for firing in item.get("fired") or []:
            if firing.get("t_ns") is not None:
                yield str(item.get("fault")), firing


def _proc_panels(
    folder: RunFolder, zeros: Mapping[tuple[str, int], int], windows: tuple[Window, ...]
) -> tuple[list[Panel], list[str]]:
    columns = [measure.column for measure in MEASURES if measure.column != "cpu_percent"]
    frame = folder.frame("proc", "t_ns", "rank", *columns, "cpu_user_s", "cpu_system_s", "state")
    # a process that is ending has no memory and one thread left: its last breath is no measurement
    frame = frame[frame["rss_bytes"].ne(0).fillna(True) & ~frame["state"].isin(["Z", "X"])]
    frame = _working(folder, _clocked(folder, zeros, frame))
    if frame.empty:
        return [], []
    frame["cpu_s"] = frame["cpu_user_s"] + frame["cpu_system_s"]
    scored: list[tuple[float, Panel]] = []
    unchanged = []
    for measure in MEASURES:
        rate = measure.column == "cpu_percent"
        values = frame[["arm", "repeat", "rank", "t_s"]].assign(value=frame["cpu_s" if rate else measure.column])
        lines = _lines(values.dropna(subset=["value"]), rate=rate)
        if lines.empty:
            continue
        score = _difference(lines, measure)
        if score <= 0:
            unchanged.append(measure.title.split(",", maxsplit=1)[0].lower())
            continue
        panel = _panel(measure.column, measure.title, measure.unit, lines, windows)
        scored.append((score, panel))
    scored.sort(key=lambda item: -item[0])
    return [panel for _, panel in scored[:PANELS]], unchanged


def _valued_panels(folder: RunFolder, zeros: Mapping[tuple[str, int], int], windows: tuple[Window, ...]) -> Iterator[Panel]:
    frame = folder.frame("events", "t_ns", "rank", "kind", "name", "value")
    frame = _clocked(folder, zeros, frame[frame["value"].notna()])
    if frame.empty:
        return
    frame["what"] = frame["name"].fillna(frame["kind"]).astype(str)
    shown = 0
    for what, rows in frame.groupby("what", sort=True):
        longest = rows.groupby(["arm", "repeat", "rank"], dropna=False).size().max()
        if longest < 4 or rows["value"].nunique() < 2 or shown == VALUED_PANELS:
            continue
        shown += 1
        title = words.clip(str(what).replace("_", " "), 40)
        lines = _lines(rows[["arm", "repeat", "rank", "t_s", "value"]], rate=False)
        yield _panel(f"event-{shown}", f"{title[:1].upper()}{title[1:]}, as the worker reports it", "", lines, windows)


def _panel(name: str, title: str, unit: str, lines: pd.DataFrame, windows: tuple[Window, ...]) -> Panel:
    last = {str(arm): float(rows["mid"].iloc[-1]) for arm, rows in lines.groupby("arm", sort=False)}
    parts = []
    for arm, rows in lines.groupby("arm", sort=False):
        first, peak, end = rows["mid"].iloc[0], rows["mid"].max(), rows["mid"].iloc[-1]
        over = f", {words.number(peak, unit)} at most" if peak > max(first, end) else ""
        parts.append(f"{arm} from {words.number(first, unit)} to {words.number(end, unit)}{over}")
    return Panel(
        name=name,
        title=title,
        unit=unit,
        lines=lines,
        last=last,
        peak=str(lines["arm"][lines["mid"].idxmax()]),
        windows=windows,
        summary=f"{title}: {'; '.join(parts)}.",
    )


def _working(folder: RunFolder, frame: pd.DataFrame) -> pd.DataFrame:
    """Samples without those of a rank that had reported its last and then exited: how it takes itself apart is no finding.

    Only of a rank that reported for at least half of its time, or its last report would say little about its work. A rank
    that was killed, or went on to a collective and then failed, keeps its end: there it may have hung.
    """
    key = ["arm", "repeat", "rank"]
    reports = folder.frame("events", "t_ns", "rank").dropna().groupby(key)["t_ns"].agg(["min", "max"])
    entered = folder.frame("collectives", "t_ns", "rank").dropna().groupby(key)["t_ns"].max()
    ended = frame.groupby(key)["t_ns"].max()
    exits = {
        (run["arm"], run["repeat"], member.get("rank")): member.get("exit_code")
        for run in folder.arm_runs
        for member in run.get("ranks") or []
    }
    until: dict[object, int] = {}
    for who, first, last in reports.itertuples():
        exited = exits.get(who) == 0 or (exits.get(who) is not None and last >= entered.get(who, last))
        if exited and 2 * (last - first) >= ended.get(who, last) - first:
            until[who] = int(last)
    whose = zip(frame["arm"], frame["repeat"], frame["rank"], strict=True)
    limit = pd.Series([None if pd.isna(who[2]) else until.get(who) for who in whose], index=frame.index, dtype="Int64")
    return frame[(frame["t_ns"] <= limit).fillna(True)]


def _clocked(folder: RunFolder, zeros: Mapping[tuple[str, int], int], frame: pd.DataFrame) -> pd.DataFrame:
    """Rows of arm runs with `t_s`, the seconds since the zero of their arm run; of what lies before it only the last part."""
    frame = frame[frame["t_ns"].notna() & frame["arm"].isin(folder.arms)].copy()
    zero = [zeros.get((arm, repeat)) for arm, repeat in zip(frame["arm"], frame["repeat"], strict=True)]
    frame["t_s"] = (frame["t_ns"].astype("Int64") - pd.array(zero, dtype="Int64")).astype("Float64") / 1e9
    frame = frame[frame["t_s"].notna()]
    return frame[frame["t_s"] >= -BEFORE * float(frame["t_s"].max())] if len(frame) else frame


def _lines(frame: pd.DataFrame, *, rate: bool) -> pd.DataFrame:
    """The median over the traces of each arm on a grid of times, with the span of the traces around it.

    A trace is one rank of one repeat. Where fewer than half of an arm's traces have begun, or not yet ended, the arm has no
    line. With `rate` the values count up and their slope in percent is drawn (processor seconds a second).
    """
    made = []
    order = {"control": 0, "fault": 1, "mitigated": 2}
    for arm in sorted(frame["arm"].unique(), key=lambda name: order.get(name, 9)):
        rows = frame[frame["arm"] == arm]
        end = float(rows["t_s"].max())
        grid = np.linspace(min(0.0, float(rows["t_s"].min())), end, GRID // 2 if rate else GRID)
        traces = []
        for _, trace in rows.groupby(["repeat", "rank"], dropna=False):
            ordered = trace.sort_values("t_s")
            times, values = ordered["t_s"].to_numpy(dtype=float), ordered["value"].to_numpy(dtype=float)
            traces.append(_slope(grid, times, values) if rate else _steps(grid, times, values))
        stack = np.vstack(traces)
        present = (~np.isnan(stack)).sum(axis=0) * 2 >= len(traces)
        if not present.any():
            continue
        stack = stack[:, present]
        made.append(
            pd.DataFrame(
                {
                    "arm": arm,
                    "t_s": grid[present],
                    "low": np.nanmin(stack, axis=0),
                    "mid": np.nanmedian(stack, axis=0),
                    "high": np.nanmax(stack, axis=0),
                }
            )
        )
    return pd.concat(made, ignore_index=True) if made else pd.DataFrame(columns=["arm", "t_s", "low", "mid", "high"])


def _steps(grid: np.ndarray, times: np.ndarray, values: np.ndarray) -> np.ndarray:
    index = np.searchsorted(times, grid, side="right") - 1
    step = grid[1] - grid[0] if len(grid) > 1 else 0
    inside = (index >= 0) & (grid <= times[-1] + step / 2)
    return np.where(inside, values[np.clip(index, 0, None)], np.nan)


def _slope(grid: np.ndarray, times: np.ndarray, values: np.ndarray) -> np.ndarray:
    if len(times) < 2 or len(grid) < 2:
        return np.full(len(grid), np.nan)
    total = np.interp(grid, times, values)
    slope = np.diff(total, prepend=total[0]) / (grid[1] - grid[0]) * 100
    return np.where((grid > times[0]) & (grid <= times[-1]), slope, np.nan)


def _difference(lines: pd.DataFrame, measure: Measure) -> float:
    """How far the arms lie apart, relative to the largest value; 0 where it is not worth a look.

    What a process holds is compared at its peak, since its end and often its start are alike; a rate over all of the time.
    With one arm alone its own change counts.
    """
    levels = lines[lines["t_s"] >= 0].groupby("arm")["mid"].agg(["first", "max", "mean"])
    if levels.empty:
        return 0.0
    if len(levels) == 1:
        apart = float((levels["max"] - levels["first"]).iloc[0])
    else:
        apart = float(np.ptp(levels["mean" if measure.unit == "%" else "max"]))
    largest = float(levels["max"].abs().max())
    share = apart / largest if largest else 0.0
    return share if apart >= measure.least and share >= 0.15 else 0.0
