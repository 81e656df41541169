"""The search for what has become worse in the latest night.

A verdict is compared with the earlier ones by `suite.standing`, a metric by `beyond`, what recorders cost by `costs`; a scenario is gone when a
whole night lacks it. All but the verdicts hold the chance of a false alarm in a night to their ALPHA over all series. What has become worse
stays told, with the same first bad run, for SINCE nights. What is better is known of costs only; for other metrics any change counts.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import pandas as pd

from dtprobe import stats
from dtprobe.store.rows import COST, OWN
from dtprobe.trends import beyond, costs
from dtprobe.trends.found import Regression, attributed, bisecting, gone_since
from dtprobe.trends.series import rows, series

if TYPE_CHECKING:
    from dtprobe.store import Reading

WHOLE = 0.8
"""A night with this share of the scenarios of the one before was meant to be as whole as that."""

RUNS = """
    SELECT DISTINCT run, scenario || CASE WHEN coalesce(variant, '') = '' THEN '' ELSE ':' || variant END AS scenario, verdict, as_expected,
           coalesce(night, run) AS night, night IS NOT NULL AS of_night, started_ns, torch, python, kernel, host, cores, git,
           world_size, launch
    FROM history ORDER BY started_ns, run
"""


def regressions(reading: Reading, night: str | None = None) -> tuple[Regression, ...]:
    """What is worse in the night than before it, surest first. Default: the latest night of a suite, the latest run where there is none."""
    runs = reading.sql(RUNS)
    if runs.empty:
        return ()
    nights = runs.loc[runs["of_night"].astype(bool), "night"]
    tonight = night if night is not None else str((nights if len(nights) else runs["night"]).iloc[-1])
    if not runs["night"].eq(tonight).any():
        return ()
    runs = _until(runs, tonight)
    frame = _alike(_until(rows(reading), tonight), tonight)
    found = [
        *_verdicts(_alike(runs, tonight), tonight),
        *_gone(runs, tonight),
        *_metrics(frame, tonight),
        *_costs(frame, tonight),
    ]
    return tuple(sorted(found, key=lambda one: -one.confidence))


def suspects(reading: Reading, night: str) -> dict[str, int]:
    """Scenarios of which a metric lies beyond the earlier nights in every run of this one, but too few to decide it: how many more it takes."""
    frame = rows(reading)
    if not frame["night"].eq(night).any():
        return {}
    found: dict[str, int] = {}
    for one in beyond.moves(_alike(_until(frame, night), night), night):
        lacks = one.wanted - len(one.now)
        if one.p >= beyond.ALPHA and one.wanted <= beyond.MOST:
            found[one.series.scenario] = max(lacks, found.get(one.series.scenario, 0))
    return found


def _until(frame: pd.DataFrame, tonight: str) -> pd.DataFrame:
    """What had been when the night began, and the night."""
    own = frame["night"].eq(tonight)
    return frame[(frame["started_ns"] < frame.loc[own, "started_ns"].min()) | own]


def _alike(frame: pd.DataFrame, tonight: str) -> pd.DataFrame:
    """Without runs under another world size or launcher than the scenario's tonight: those measured something else. Runs that do not say stay.

    Runs of another Python or torch stay where all of them precede the first of tonight's, for an upgrade may be what is found; where both are
    run in turn, as by a matrix, each is compared with its own.
    """
    columns = ["world_size", "launch"]
    keys = pd.MultiIndex.from_frame(frame[["scenario", *columns]])
    frame = frame[keys.isin(keys[frame["night"].eq(tonight)]) | frame[columns].isna().any(axis=1)]
    versions = ["scenario", "python", "torch"]
    keys = pd.MultiIndex.from_frame(frame[versions])
    same = keys.isin(keys[frame["night"].eq(tonight)])
    first = frame["scenario"].map(frame[same].groupby("scenario")["started_ns"].min())
    last = frame.groupby(versions, dropna=False)["started_ns"].transform("max")
    return frame[same | ~(last >= first)]


def _verdicts(runs: pd.DataFrame, tonight: str) -> list[Regression]:
    """Scenarios that are broken or flaky tonight and were not before."""
    from dtprobe.suite.standing import Earlier, standing  # with the suite come pytest and the runner: not for an overview

    found = []
    judged = runs[~runs["verdict"].isin(["unsupported"])]
    for name, own in judged.groupby("scenario"):
        now, before = own[own["night"].eq(tonight)], own[own["night"].ne(tonight)]
        if now.empty or before.empty or now["as_expected"].all():
            continue
        good = before[before["as_expected"].astype(bool)]
        here = standing(int(now["as_expected"].sum()), len(now), Earlier(k=len(good), n=len(before)))
        if not here.new or good.empty:
            continue
        bad = now[~now["as_expected"].astype(bool)].iloc[0]
        later = before[(before["started_ns"] > good["started_ns"].iloc[-1]) & ~before["as_expected"].astype(bool)]
        first = later.iloc[0] if len(later) and len(before) - len(good) == len(later) else bad
        last = good[good["started_ns"] < first["started_ns"]].iloc[-1]
        found.append(
            _regression(
                kind="verdict",
                scenario=str(name),
                before=str(last["verdict"]),
                after=str(bad["verdict"]),
                good=last,
                bad=first,
                p=1.0 - stats.wilson(len(good), len(before)).low if here.status != "broken" else 0.0,
                why=f"{here.status}: {here.because}; {last['verdict']} before, {bad['verdict']} now",
            )
        )
    return found


def _gone(runs: pd.DataFrame, tonight: str) -> list[Regression]:
    """Scenarios that ran in one of the last whole nights and in none since."""
    nights = runs[runs["of_night"].astype(bool)].groupby("night", sort=False)["scenario"].agg(set)
    if tonight not in nights:
        return []
    now = nights[tonight]
    whole = [name for name in nights.index if name == tonight or len(nights[name]) * WHOLE <= len(now)]
    if len(whole) < 2 or len(now) < WHOLE * len(nights[whole[-2]]):
        return []
    last: dict[str, int] = {name: at for at, night in enumerate(whole) for name in nights[night]}
    found = []
    for name, at in sorted(last.items()):
        if not len(whole) - 1 - beyond.SINCE <= at < len(whole) - 1:
            continue
        good = runs[runs["scenario"].eq(name)].iloc[-1]
        bad = runs[runs["night"].eq(whole[at + 1])].iloc[0]
        found.append(
            _regression(
                kind="gone",
                scenario=name,
                before=str(good["verdict"]),
                after=None,
                good=good,
                bad=bad,
                p=0.0,
                why=f"it ran in {whole[at]} and not in {whole[at + 1]}, which has {len(nights[whole[at + 1]])} scenarios, nor since",
            )
        )
    return found


def _metrics(frame: pd.DataFrame, tonight: str) -> list[Regression]:
    found = []
    for one in beyond.moves(frame, tonight):
        if one.p >= beyond.ALPHA:
            continue
        own, old, new = one.series, float(one.before["value"].median()), float(one.now["value"].median())
        side = "above" if one.above else "below"
        since = "tonight" if one.nights == 1 else f"in the last {one.nights} nights"
        found.append(
            _regression(
                kind="metric",
                scenario=own.scenario,
                metric=own.metric,
                arm=own.arm,
                unit=own.unit,
                before=old,
                after=new,
                good=one.before.iloc[-1],
                bad=one.now.iloc[0],
                p=one.p,
                why=f"{own.metric} of the {own.arm} arm: {old:g} {own.unit} before, {new:g} now; all {len(one.now)} runs {since} lie {side} "
                f"all {len(one.before)} before (exact, p={one.p:.1g} over all series)",
                step=f" --metric {shlex.quote(own.metric)} --arm {own.arm} --{side} {(old + new) / 2:g}",
            )
        )
    return found


def _costs(frame: pd.DataFrame, tonight: str) -> list[Regression]:
    every = series(frame[frame["metric"].str.startswith(COST)])
    found = []
    for one in costs.dearer([own for own in every if own.frame["night"].eq(tonight).any()]):
        since = "this night" if one.nights == 1 else f"the last {one.nights} nights"
        if one.metric.startswith(OWN):
            told = f"{one.before:.2%} of a core and of the ranks' time before, {one.after:.2%} in {since}"
        else:
            more = one.more
            told = f"{more.value:+.1%} (95 % {more.low:+.1%} to {more.high:+.1%}) in {since} against each one's median of the nights before"
        found.append(
            _regression(
                kind="cost",
                scenario="",
                metric=one.metric,
                arm="control",
                unit="share" if one.metric.startswith(OWN) else "ratio",
                before=one.before,
                after=one.after,
                good=max((old.iloc[-1] for old, _ in one.pairs), key=lambda row: row["started_ns"]),
                bad=min((new.iloc[0] for _, new in one.pairs), key=lambda row: row["started_ns"]),
                p=one.p,
                why=f"{one.metric} in {len(one.pairs)} series: {told} (ranks, p={one.p:.1g})",
            )
        )
    return found


def _regression(
    *, good: Mapping[str, Any] | pd.Series, bad: Mapping[str, Any] | pd.Series, p: float, why: str, step: str = "", **said: Any
) -> Regression:
    commits, changed = attributed(dict(good), dict(bad))
    beside = [f"commit {commits}"] if commits else []
    beside += [f"{name} {old} -> {new}" for name, (old, new) in changed.items()]
    name = said["scenario"] or str(bad.get("scenario") or "")
    return Regression(
        **said,
        first_bad_run=str(bad["run"]),
        last_good_run=str(good["run"]),
        first_bad_ns=int(bad["started_ns"]),
        commit_range=commits,
        changed=changed,
        confidence=round(max(0.0, 1.0 - p), 6),
        because=f"{said['scenario'] or 'all scenarios'}: {why}; first in run {bad['run']}, last good {good['run']}"
        + (
            f"; between them changed: {', '.join(beside)}" if beside else "; nothing else that is recorded changed between them"
        ),
        bisect=gone_since(name, commits) if said["kind"] == "gone" else bisecting(name, commits, changed, step),
    )
