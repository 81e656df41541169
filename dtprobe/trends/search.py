"""The search for what has become worse in the latest night.

Hundreds of metrics are looked at every night, and few nights tell little of their tails: a value that comes once in four nights is new to every
third series that has eight. So nothing is said of a metric before it was measured CONFIRMED times in the night, and each time beyond what
the earlier nights have shown; `suspects` names the scenarios whose first run asks for that. Beyond means:

- outside the range of all earlier nights by half that range or more; where what is counted always had one value, any other;
- and for a share (k of n) by Fisher's exact test against the pooled earlier nights, for what scatters by the prediction interval of a t
  distribution, both at ALPHA over the number of series (Bonferroni).

What recorders cost is one number for all scenarios, since that of one pair of runs scatters by tens of percent: tonight's ranks among each
scenario's own nights, summed (`_ranked`). What is better is known of costs only; for other metrics any change counts.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pandas as pd

from dtprobe import stats
from dtprobe.store.archive import COST
from dtprobe.suite.standing import CONFIRMED, Earlier, standing
from dtprobe.trends.found import Regression, attributed, bisecting, gone_since
from dtprobe.trends.series import KEYS, Series, change_points, rows, series

if TYPE_CHECKING:
    import numpy as np

    from dtprobe.store import Reading

ALPHA = 0.01
"""The most that the chance of any false alarm in one night may be."""
BEFORE = 5
"""Earlier nights without which nothing is said of a metric."""
NOISY_BEFORE = 10
BEYOND = 0.5
"""So many times the range of all earlier nights a noisy value must lie outside it."""
WINDOW = 60
"""Nights that count as earlier, back from the latest change."""
COST_NIGHTS = 3
"""Few percent more are seen over these, where the nights scatter too much for one to show it."""
ALL = f"{COST}all recorders"
LEVEL = 15
"""Nights after a change of level from which on only the new level counts."""
SCATTERING = ("s", "ratio", "Mbit/s", "cores", "times the median")
"""Units of what is never twice the same: equal values of these come from somewhere else than a measurement."""
WHOLE = 0.8
"""A night with this share of the scenarios of the one before was meant to be as whole as that."""

RUNS = """
    SELECT DISTINCT run, scenario || CASE WHEN coalesce(variant, '') = '' THEN '' ELSE ':' || variant END AS scenario, verdict, as_expected,
           coalesce(night, run) AS night, night IS NOT NULL AS of_night, started_ns, torch, python, kernel, host, cores, git,
           world_size, launch
    FROM history ORDER BY started_ns, run
"""


def regressions(reading: Reading, night: str | None = None) -> tuple[Regression, ...]:
    """What is worse in the night (default: the latest one in the history) than before it, surest first."""
    runs = reading.sql(RUNS)
    if runs.empty:
        return ()
    tonight = night if night is not None else str(runs["night"].iloc[-1])
    if not runs["night"].eq(tonight).any():
        return ()
    began_ns = int(runs.loc[runs["night"].eq(tonight), "started_ns"].min())
    runs = runs[(runs["started_ns"] < began_ns) | runs["night"].eq(tonight)]
    frame = rows(reading)
    frame = _alike(frame[(frame["started_ns"] < began_ns) | frame["night"].eq(tonight)], tonight)
    moved = series(_moved(frame, tonight, began_ns))
    costs = series(frame[frame["metric"].str.startswith(COST)])
    found = [
        *_verdicts(_alike(runs, tonight), tonight),
        *_gone(runs, tonight),
        *_metrics(moved, _tests(frame, tonight), tonight, began_ns),
        *_costs([one for one in costs if one.frame["night"].eq(tonight).any()]),
    ]
    return tuple(sorted(found, key=lambda one: -one.confidence))


def _alike(frame: pd.DataFrame, tonight: str) -> pd.DataFrame:
    """Without runs under another world size or launcher than the scenario's tonight: those measured something else. Runs that do not say stay."""
    columns = ["world_size", "launch"]
    keys = pd.MultiIndex.from_frame(frame[["scenario", *columns]])
    return frame[keys.isin(keys[frame["night"].eq(tonight)]) | frame[columns].isna().any(axis=1)]


def _verdicts(runs: pd.DataFrame, tonight: str) -> list[Regression]:
    """Scenarios that are broken or flaky tonight and were not before."""
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
    """Scenarios that ran in the whole nights before and not in this one."""
    nights = runs[runs["of_night"].astype(bool)].groupby("night", sort=False)["scenario"].agg(set)
    if tonight not in nights or len(nights) < 2:
        return []
    now = nights[tonight]
    whole = [name for name in nights.index if name != tonight and len(nights[name]) * WHOLE <= len(now)]
    last = nights[whole[-1]] if whole else set()
    if len(now) < WHOLE * len(last):
        return []
    found = []
    for name in sorted(last - now):
        good = runs[runs["scenario"].eq(name)].iloc[-1]
        bad = runs[runs["night"].eq(tonight)].iloc[0]
        found.append(
            _regression(
                kind="gone",
                scenario=name,
                before=str(good["verdict"]),
                after=None,
                good=good,
                bad=bad,
                p=0.0,
                why=f"it ran in {good['night']} and is not in {tonight}, which has {len(now)} scenarios",
            )
        )
    return found


def suspects(reading: Reading, night: str) -> list[str]:
    """Scenarios of which a metric lies beyond the earlier nights in every run of this one, and which have had fewer than CONFIRMED runs in it."""
    frame = _alike(rows(reading), night)
    if not frame["night"].eq(night).any():
        return []
    began_ns = int(frame.loc[frame["night"].eq(night), "started_ns"].min())
    every = series(_moved(frame, night, began_ns))
    found = (
        one.scenario for one, _, now, _, _ in _beyond(every, _tests(frame, night), night, began_ns) if len(now) < CONFIRMED
    )
    return sorted(set(found))


def _moved(frame: pd.DataFrame, tonight: str, began_ns: int) -> pd.DataFrame:
    """The rows of series whose values tonight lie outside the range of the last LEVEL runs: only these can lie beyond more of them."""
    earlier, now = frame[frame["started_ns"] < began_ns], frame[frame["night"].eq(tonight)]
    last = earlier.groupby(KEYS, dropna=False).tail(LEVEL).groupby(KEYS, dropna=False)["value"].agg(["min", "max", "size"])
    here = now.groupby(KEYS, dropna=False)["value"].agg(["min", "max"])
    both = last.join(here, how="inner", suffixes=("_last", "_now"))
    out = (both["size"] >= BEFORE) & ((both["min_now"] > both["max_last"]) | (both["max_now"] < both["min_last"]))
    wanted = both.index[out & ~both.index.get_level_values("metric").str.startswith(COST)]
    return frame[_keys(frame).isin(wanted)]


def _keys(frame: pd.DataFrame) -> pd.MultiIndex:
    """The key of each row."""
    return pd.MultiIndex.from_frame(frame[KEYS])


def _tests(frame: pd.DataFrame, tonight: str) -> int:
    """How many series were measured tonight: so many tests are made."""
    own = frame[frame["night"].eq(tonight) & ~frame["metric"].str.startswith(COST)]
    return len(own[KEYS].drop_duplicates())


def _beyond(
    every: Sequence[Series], tests: int, tonight: str, began_ns: int
) -> Iterator[tuple[Series, pd.DataFrame, pd.DataFrame, float, str]]:
    """Series all of whose runs tonight lie beyond the earlier nights: with these nights, tonight's runs, and the test's p and words."""
    for one in every:
        now = one.frame[one.frame["night"].eq(tonight)]
        earlier = one.frame["started_ns"] < began_ns
        if not earlier.sum() >= BEFORE:
            continue
        nights = replace(one, frame=one.frame[earlier]).nights.tail(WINDOW)
        levels = change_points(nights["value"].to_numpy())
        before = nights.iloc[levels[-1] :] if levels and len(nights) - levels[-1] >= LEVEL else nights
        if len(before) < BEFORE:
            continue
        scale = _scale(one.unit, pd.concat([before["value"], now["value"]]))
        nearest = _nearest(scale(before["value"]), now.assign(value=scale(now["value"])))
        if nearest is None:
            continue
        if one.unit == "share":
            answer = _share(before, now.loc[nearest])
        else:
            answer = _value(scale(before["value"]), float(scale(now.loc[[nearest], "value"]).iloc[0]), one.unit)
        if answer is not None and answer[0] * tests < ALPHA:
            yield one, before, now, answer[0] * tests, answer[1]


def _scale(unit: str, values: pd.Series) -> Callable[[pd.Series], pd.Series]:
    """Durations and rates scatter by factors, so their logarithms are compared; everything else as it is."""
    import numpy as np

    return np.log if unit in SCATTERING and values.gt(0).all() else _as_it_is


def _as_it_is(values: pd.Series) -> pd.Series:
    return values


def _nearest(before: pd.Series, now: pd.DataFrame) -> Any:
    """The label of the run tonight that is nearest to the earlier nights, None unless all lie outside their range on one side by BEYOND of it."""
    low, high = float(before.min()), float(before.max())
    room = BEYOND * (high - low) + 1e-9 * max(abs(low), abs(high), 1.0)
    if (now["value"] > high + room).all():
        return now["value"].idxmin()
    if (now["value"] < low - room).all():
        return now["value"].idxmax()
    return None


def _metrics(every: Sequence[Series], tests: int, tonight: str, began_ns: int) -> list[Regression]:
    found = []
    for one, before, now, p, why in _beyond(every, tests, tonight, began_ns):
        if len(now) < CONFIRMED:
            continue
        old, new = float(before["value"].median()), float(now["value"].median())
        side = "above" if new > old else "below"
        found.append(
            _regression(
                kind="metric",
                scenario=one.scenario,
                metric=one.metric,
                arm=one.arm,
                unit=one.unit,
                before=old,
                after=new,
                good=before.iloc[-1],
                bad=now.iloc[0],
                p=p,
                why=f"{one.metric} of the {one.arm} arm: {old:g} {one.unit} in {len(before)} nights, {new:g} in {len(now)} runs now; {why}",
                step=f" --metric {shlex.quote(one.metric)} --arm {one.arm} --{side} {(old + new) / 2:g}",
            )
        )
    return found


def _share(before: pd.DataFrame, now: pd.Series) -> tuple[float, str] | None:
    """Fisher's exact test of a run's k of n against that of all earlier nights; as any value where n is not known."""
    from scipy.stats import fisher_exact

    known = before.dropna(subset=["n"])
    if not len(known) or now["n"] != now["n"]:
        return _value(before["value"], float(now["value"]), "share")
    n1, n0 = int(now["n"]), int(known["n"].sum())
    k1, k0 = round(float(now["value"]) * n1), round(float((known["value"] * known["n"]).sum()))
    p = float(fisher_exact([[k1, n1 - k1], [k0, n0 - k0]]).pvalue)
    return p, f"{k1} of {n1} against {k0} of {n0} (Fisher, p={p:.1g})"


def _value(before: pd.Series, value: float, unit: str) -> tuple[float, str] | None:
    import numpy as np
    from scipy.stats import t

    x = before.to_numpy(dtype=float)
    if x.min() == x.max() and unit not in SCATTERING:
        return 0.0, "it was the same in all of them"
    if np.unique(x).size < (NOISY_BEFORE if unit in SCATTERING else 2) or x.size < NOISY_BEFORE:
        return None
    score = abs(value - float(x.mean())) / (float(x.std(ddof=1)) * np.sqrt(1 + 1 / x.size))
    p = float(2 * t.sf(score, x.size - 1))
    return p, f"{score:.1f} standard errors from {x.size} nights (p={p:.1g})"


def _costs(every: Sequence[Series]) -> list[Regression]:
    """What each set of recorders costs now (series that end with tonight): tonight alone, then the last COST_NIGHTS; where no set tells, all together."""
    own: dict[str, list[pd.DataFrame]] = {}
    for one in every:
        own.setdefault(one.metric, []).append(one.nights)
    sets = list(own.items())
    tests = 2 * (len(sets) + 1)
    found = [worse for metric, nights in sets if (worse := _dearer(metric, nights, tests)) is not None]
    if not found and (worse := _dearer(ALL, [night for _, nights in sets for night in nights], tests)) is not None:
        found.append(worse)
    return found


def _dearer(metric: str, series: Sequence[pd.DataFrame], tests: int) -> Regression | None:
    for window in (1, COST_NIGHTS):
        pairs = [(one.iloc[:-window].tail(WINDOW), one.tail(window)) for one in series if len(one) >= BEFORE + window]
        if len(pairs) < NOISY_BEFORE:
            continue
        p = _ranked([(old["value"].to_numpy(dtype=float), new["value"].to_numpy(dtype=float)) for old, new in pairs]) * tests
        if p < ALPHA:
            return _cost(metric, pairs, window, p)
    return None


def _ranked(pairs: Sequence[tuple[np.ndarray, np.ndarray]]) -> float:
    """The chance that values now rank so high among those of before and now, when nothing has changed; a pair is a scenario's.

    Then every order of a scenario's nights is equally likely, whatever its distribution, skew or tails: the mean rank of the new ones has
    a known mean and variance, ties included (Lehmann, Nonparametrics, 1975, section 1.4), and the sum over many scenarios is near normal.
    Against 5 % more in 75 series of 12 nights before (drawn with the scatter of real ones, alpha 0.0025): found in 14 % of first and 67 %
    of third nights where nights scatter as on a machine that is now quiet and now loaded, in 81 % and all where they scatter half as much.
    """
    import numpy as np
    from scipy.stats import norm, rankdata

    above, variance = 0.0, 0.0
    for old, new in pairs:
        ranks = rankdata(np.concatenate([old, new]))
        above += float(ranks[old.size :].mean() - ranks.mean())
        variance += float(ranks.var(ddof=1)) * (1 / new.size - 1 / ranks.size)
    return float(norm.sf(above / np.sqrt(variance))) if variance else 1.0


def _cost(metric: str, pairs: Sequence[tuple[pd.DataFrame, pd.DataFrame]], window: int, p: float) -> Regression:
    both = [(float(old["value"].median()), float(new["value"].median())) for old, new in pairs]
    more = stats.measured([new / old - 1 for old, new in both if old > 0])
    good = max((old.iloc[-1] for old, _ in pairs), key=lambda row: row["started_ns"])
    bad = min((new.iloc[0] for _, new in pairs), key=lambda row: row["started_ns"])
    return _regression(
        kind="cost",
        scenario="",
        metric=metric,
        arm="control",
        unit="ratio",
        before=stats.measured([old for old, _ in both]).value,
        after=stats.measured([new for _, new in both]).value,
        good=good,
        bad=bad,
        p=p,
        why=f"{metric} in {len(pairs)} series: {more.value:+.1%} (95 % {more.low:+.1%} to {more.high:+.1%}) in "
        f"{'this night' if window == 1 else f'the last {window} nights'} against each one's median of the nights before (ranks, p={p:.1g})",
    )


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
