"""What recorders cost: one number for all scenarios, since that of one pair of runs scatters by tens of percent.

A recorder also says itself how much of a core it used and for how long it stopped ranks, which scatters by percents of that only: one that takes
a hundredth of a core more is found the next night.

What the pairs of runs show (tests/trends/test_costs.py; 36 series with 6 nights before, which is what 12 nights leave when each measures half of the
scenarios, drawn from the deviations of real runs, 200 histories each): 5 % more is found in the first, by the third, by the seventh night of a series in 2, 9 and 20 %
of histories where nights scatter by 17 % (interquartile range over 1.35; the machine of the real runs, now quiet and now loaded), in 16, 53 and
83 % where by 9 %, in 78 %, all and all where by 4 %; 10 % more in 15, 52 and 82 % of the noisiest, 20 % more in 68 %, all and all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from dtprobe import stats
from dtprobe.store.rows import COST, OWN
from dtprobe.trends.series import Series

ALPHA = 0.002
"""The most that the chance of a false alarm about costs in one night may be."""
BEFORE = 5
"""Earlier nights that a scenario must have."""
SERIES = 10
"""Scenarios without which nothing is said."""
WINDOW = 60
WINDOWS = (1, 3, 7)
"""Last nights that are looked at together: the more, the less of a change they show."""
ALL = f"{COST}all recorders"
LEAST_OWN = 0.01
"""Of a core, or of the ranks' time: a recorder that takes so much more by its own account is news, whatever its share was before."""


@dataclass(frozen=True, kw_only=True)
class Dearer:
    """The recorders `metric` cost more in the last `nights` than before. `pairs` are rows a night before and since, one pair a scenario; `p` is corrected."""

    metric: str
    pairs: tuple[tuple[pd.DataFrame, pd.DataFrame], ...]
    nights: int
    p: float

    @property
    def before(self) -> float:
        """The median over scenarios of each one's median."""
        return float(np.median([old["value"].median() for old, _ in self.pairs]))

    @property
    def after(self) -> float:
        return float(np.median([new["value"].median() for _, new in self.pairs]))

    @property
    def more(self) -> stats.Estimate:
        """By which share, over scenarios."""
        both = [(float(old["value"].median()), float(new["value"].median())) for old, new in self.pairs]
        return stats.measured([new / old - 1 for old, new in both if old > 0])


def dearer(every: Sequence[Series]) -> list[Dearer]:
    """What costs more, of such series that end with tonight: each set of recorders; where none does, all sets together."""
    own: dict[str, list[pd.DataFrame]] = {}
    said: dict[str, list[pd.DataFrame]] = {}
    for one in every:
        (said if one.metric.startswith(OWN) else own).setdefault(one.metric, []).append(one.nights)
    many = [nights for nights in own.values() if len(nights) >= SERIES]
    tests = len(WINDOWS) * (len(many) + 1)
    found = [worse for metric, nights in own.items() if (worse := _dearer(metric, nights, tests)) is not None]
    if not found and (worse := _dearer(ALL, [night for nights in own.values() for night in nights], tests)) is not None:
        found.append(worse)
    return [*found, *_by_their_own_account(said)]


def _by_their_own_account(said: dict[str, list[pd.DataFrame]]) -> list[Dearer]:
    tests = len(WINDOWS) * len(said)
    found = (_dearer(metric, nights, tests) for metric, nights in said.items())
    return [one for one in found if one is not None and one.after - one.before >= LEAST_OWN]


def _dearer(metric: str, series: Sequence[pd.DataFrame], tests: int) -> Dearer | None:
    found = []
    for window in WINDOWS:
        pairs = tuple((one.iloc[:-window].tail(WINDOW), one.tail(window)) for one in series if len(one) >= BEFORE + window)
        if len(pairs) >= SERIES:
            p = ranked([(old["value"].to_numpy(dtype=float), new["value"].to_numpy(dtype=float)) for old, new in pairs])
            found.append(Dearer(metric=metric, pairs=pairs, nights=window, p=p * tests))
    surest = min(found, key=lambda one: one.p, default=None)
    return surest if surest is not None and surest.p < ALPHA else None


def ranked(pairs: Sequence[tuple[np.ndarray, np.ndarray]]) -> float:
    """The chance that values now rank so high among those of before and now, when nothing has changed; a pair is a scenario's.

    Then every order of a scenario's nights is equally likely, whatever its distribution, skew or tails: the mean rank of the new ones has
    a known mean and variance, ties included (Lehmann, Nonparametrics, 1975, section 1.4), and the sum over many scenarios is near normal.
    """
    from scipy.stats import norm, rankdata

    above, variance = 0.0, 0.0
    for old, new in pairs:
        ranks = rankdata(np.concatenate([old, new]))
        above += float(ranks[old.size :].mean() - ranks.mean())
        variance += float(ranks.var(ddof=1)) * (1 / new.size - 1 / ranks.size)
    return float(norm.sf(above / np.sqrt(variance))) if variance else 1.0
