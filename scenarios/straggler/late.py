"""Who is slow, from the ranks' own times: shared with `honest-jitter`, which must never be called a straggler by it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pandas as pd

SLOWER = 2.0
"""A straggler's own work takes at least so many times that of the others, in the median of the steps."""
LAST = 0.8
"""And it is the last to come in at least this share of them."""


def stragglers(steps: pd.DataFrame) -> dict[tuple[str, int], int]:
    """(arm, repeat) -> the rank that is slower than the others in nearly every step and by a factor, where there is one.

    `steps` has a row a step and rank with `work_s`. Ranks that take turns at being last, or that one long batch delays, are not meant.
    """
    found = {}
    for (arm, repeat), own in steps.groupby(["arm", "repeat"]):
        table = own.pivot_table(index="step", columns="rank", values="work_s").dropna()
        if len(table) < 10 or table.shape[1] < 2:
            continue
        last = table.idxmax(axis="columns").value_counts(normalize=True)
        rank, of_steps = last.index[0], float(last.iloc[0])
        others = table.drop(columns=rank).median(axis="columns")
        if of_steps >= LAST and float((table[rank] / others).median()) >= SLOWER:
            found[str(arm), int(repeat)] = int(rank)
    return found


def spread(steps: pd.DataFrame) -> pd.DataFrame:
    """How unequal a rank's steps are: `spread` is the 95th percentile of `cpu_s` over its median, one row an arm, repeat and rank.

    Processor time, since on a busy machine equal work takes unequal times.
    """
    grouped = steps.groupby(["arm", "repeat", "rank"])["cpu_s"]
    return (grouped.quantile(0.95) / grouped.median()).rename("spread").reset_index()


def timed(steps: pd.DataFrame) -> pd.DataFrame:
    """The steps with the columns of this worker, null in those that did not end."""
    import pandas as pd

    columns = ("step", "work_s", "cpu_s", "wait_s")
    return steps.assign(**{name: pd.to_numeric(steps[name]) if name in steps else float("nan") for name in columns})
