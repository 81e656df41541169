"""Metrics over nights, and the places at which they change."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas as pd

    from dtprobe.store import Reading

LEAST = 4
"""Nights on each side of a change that `change_points` can tell from one odd night."""

PENALTY = 5.0
"""Times the logarithm of the length, in units of the noise's variance. The BIC of one further mean and place is 2 log n (Yao 1988), for a noise
that is known; here it is estimated from few nights: with 5, of 300 flat series of 24 and of 36 nights 2.3 and 0.7 % have a level, with 3 they are
6 %; a step by three standard deviations is found within a night in 94 % against 96 %."""

ROWS = """
    SELECT scenario || CASE WHEN coalesce(variant, '') = '' THEN '' ELSE ':' || variant END AS scenario, metric, arm, unit, value,
           run, coalesce(night, run) AS night, started_ns, torch, python, kernel, host, cores, git, world_size, launch
    FROM history WHERE metric IS NOT NULL AND value IS NOT NULL AND isfinite(value) AND verdict NOT IN ('unsupported', 'error')
    ORDER BY started_ns, run
"""


@dataclass(frozen=True, kw_only=True)
class Series:
    """One metric of one arm of a scenario on one host: `frame` has a row a run in time's order (columns of ROWS)."""

    scenario: str
    metric: str
    arm: str
    unit: str
    host: str
    frame: pd.DataFrame

    @property
    def nights(self) -> pd.DataFrame:
        """A row a night in time's order: median `value`, and the rest of its first run."""
        frame = self.frame
        first = frame.drop_duplicates("night").set_index("night")
        return first.assign(value=frame.groupby("night", sort=False)["value"].median()).reset_index()


KEYS = ["scenario", "metric", "arm", "host"]


def rows(reading: Reading) -> pd.DataFrame:
    """Every measured value of the history, oldest first, with the columns of ROWS."""
    return reading.sql(ROWS)


def series(frame: pd.DataFrame) -> list[Series]:
    """Every series of such rows."""
    return [
        Series(
            scenario=str(name[0]),
            metric=str(name[1]),
            arm=str(name[2]),
            host=str(name[3]),
            unit=str(own["unit"].iloc[-1]),
            frame=own,
        )
        for name, own in frame.groupby(KEYS, dropna=False, sort=True)
    ]


def noise(values: Sequence[float] | Any) -> float:
    """The standard deviation of a series that may have steps: from the differences of neighbours, by their median (robust to the steps)."""
    import numpy as np

    steps = np.abs(np.diff(np.asarray(values, dtype=float)))
    return float(np.median(steps) / (0.6745 * np.sqrt(2))) if steps.size else 0.0


def change_points(values: Sequence[float] | Any) -> list[int]:
    """Indices at which a new level begins (ruptures' PELT, least squares; Killick et al. 2012); none under 2 x LEAST values.

    One odd night is no level: each has LEAST values at least, and of three neighbours the median counts.
    """
    import numpy as np
    import ruptures
    from scipy.ndimage import median_filter

    x = np.asarray(values, dtype=float)
    if x.size < 2 * LEAST or np.ptp(x) == 0:
        return []
    scale = noise(x) or float(np.ptp(x)) * 1e-3
    smooth = median_filter(x, 3, mode="mirror")
    found = (
        ruptures.KernelCPD(kernel="linear", min_size=LEAST, jump=1)
        .fit((smooth / scale).reshape(-1, 1))
        .predict(pen=PENALTY * np.log(x.size))
    )
    ends = [0, *found]
    levels = [float(smooth[begin:end].mean()) for begin, end in pairwise(ends)]
    # Where fewer than LEAST nights lie elsewhere, the segment that was made of them begins with nights of the old level.
    return [
        int(at)
        for at, old, new in zip(found[:-1], levels, levels[1:], strict=False)
        if abs(smooth[at] - new) < abs(smooth[at] - old)
    ]
