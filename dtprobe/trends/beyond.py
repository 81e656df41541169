"""Metrics that have moved beyond all that was measured before.

Hundreds of series are looked at every night, and a few nights tell little of a metric's tails: a value that comes once in four runs is new to
every fourth series. So nothing is assumed of distributions, and the decision is exact: where nothing has changed, each order of n runs before
and m runs since is equally likely, so the chance that all m lie above all n, or all below, is 2 / C(n + m, m) at most, whatever the noise, its
tails and its ties. A change counts where that, times the number of series and divided by the share of ALPHA that its number of nights has, is
below ALPHA (Bonferroni's correction over all series and windows: the chance of any false alarm in a night).

Few runs decide little: with 12 runs before and 900 series it takes 13 since. A night therefore runs again what `suspects` names, until it is
decided; noise ends that after a run or two, since one run among the others is enough. Beside that the runs since must leave the range of those
before by half of it, because real nights are not quite alike (another load, another neighbour): that is a margin, not a test.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import comb

import numpy as np
import pandas as pd

from dtprobe.store.rows import COST
from dtprobe.trends.series import KEYS, Series, change_points, series

ALPHA = 0.001
"""The most that the chance of any false alarm among the metrics of one night may be."""
BEFORE = 5
"""Earlier nights without which nothing is said of a metric."""
BEYOND = 0.5
"""So many times the range of the earlier runs those since must lie outside it; of logarithms where all are positive."""
WINDOW = 60
"""Nights that count as earlier, back from the latest change of level."""
LEVEL = 15
"""Nights after a change of level from which on only the new level counts."""
SINCE = 7
"""So many nights a change stays told, and the nights over which runs may gather that decide it."""
SHARES = (0.5, *[0.5 / (SINCE - 1)] * (SINCE - 1))
"""Of ALPHA for a change since tonight, since the night before, and so on."""
MOST = 16
"""Runs of a scenario in a night that may be asked for."""


@dataclass(frozen=True, kw_only=True)
class Move:
    """A series whose runs of the last nights (`now`) all lie beyond those `before`, on the side of `above`; `p` is corrected for all tests."""

    series: Series
    before: pd.DataFrame
    now: pd.DataFrame
    above: bool
    nights: int
    p: float
    wanted: int
    """Runs since that it takes to decide it."""


def moves(frame: pd.DataFrame, tonight: str) -> list[Move]:
    """Of each series of such rows (oldest first, none after tonight's) the move that is decided and oldest; else the one that lacks fewest runs."""
    own = frame[~frame["metric"].str.startswith(COST)]
    tests = len(own.loc[own["night"].eq(tonight), KEYS].drop_duplicates())
    found = []
    for one, windows in _outside(own, tonight):
        seen = [move for nights in windows if (move := _move(one, nights, tests)) is not None]
        decided = [move for move in seen if move.p < ALPHA]
        if decided:
            found.append(max(decided, key=lambda move: move.nights))
        elif seen:
            found.append(min(seen, key=lambda move: move.wanted - len(move.now)))
    return found


def wanted_of(before: int, tests: int, nights: int = 1) -> int:
    """Runs since a change that it takes to decide it, MOST + 1 where more than MOST."""
    return next((m for m in range(1, MOST + 1) if chance(before, m, tests, nights) < ALPHA), MOST + 1)


def chance(before: int, since: int, tests: int, nights: int = 1) -> float:
    """Of any of so many series, that all runs since lie on one side of all before though nothing has changed; at its share of ALPHA."""
    return min(1.0, 2 / comb(before + since, since) * tests / SHARES[nights - 1])


def _outside(frame: pd.DataFrame, tonight: str) -> Iterator[tuple[Series, list[int]]]:
    """Series measured tonight, with the numbers of last nights that lie wholly outside the LEVEL nights before them: no other can be beyond."""
    if frame.empty:
        return
    codes = frame.groupby(KEYS, dropna=False, sort=False).ngroup().to_numpy()
    nights = (
        pd.DataFrame({"code": codes, "night": frame["night"].to_numpy(), "value": frame["value"].to_numpy(dtype=float)})
        .groupby(["code", "night"], sort=False)["value"]
        .agg(["min", "max"])
        .reset_index()
        .sort_values("code", kind="stable")
    )
    ends = np.flatnonzero(np.diff(nights["code"].to_numpy(), append=-1)) + 1
    names, lows, highs = (nights[name].to_numpy() for name in ("night", "min", "max"))
    for code, begin, end in zip(nights["code"].to_numpy()[ends - 1], [0, *ends[:-1]], ends, strict=True):
        low, high, last = lows[begin:end], highs[begin:end], names[end - 1]
        if last != tonight:
            continue
        windows = []
        for count in range(1, min(SINCE, low.size - BEFORE) + 1):
            near = slice(max(0, low.size - count - LEVEL), low.size - count)
            if low[-count:].min() > high[near].max() or high[-count:].max() < low[near].min():
                windows.append(count)
        if windows:
            (one,) = series(frame[codes == code])
            yield one, windows


def _move(one: Series, count: int, tests: int) -> Move | None:
    nights = one.nights
    now = one.frame[one.frame["night"].isin(nights["night"].tail(count))]
    earlier = nights.iloc[:-count].tail(WINDOW)
    levels = change_points(earlier["value"].to_numpy())
    if levels and len(earlier) - levels[-1] >= LEVEL:
        earlier = earlier.iloc[levels[-1] :]
    before = one.frame[one.frame["night"].isin(earlier["night"])]
    above = _beyond(before["value"].to_numpy(dtype=float), now["value"].to_numpy(dtype=float))
    if above is None:
        return None
    return Move(
        series=one,
        before=before,
        now=now,
        above=above,
        nights=count,
        p=chance(len(before), len(now), tests, count),
        wanted=wanted_of(len(before), tests, count),
    )


def _beyond(before: np.ndarray, now: np.ndarray) -> bool | None:
    """Whether all now lie above all before by BEYOND of their range (True) or below (False), else None."""
    if before.min() > 0 and now.min() > 0:
        before, now = np.log(before), np.log(now)
    low, high = float(before.min()), float(before.max())
    room = BEYOND * (high - low) + 1e-9 * max(abs(low), abs(high), 1.0)
    if now.min() > high + room:
        return True
    return False if now.max() < low - room else None
