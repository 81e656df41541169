"""What recorders cost: how often more of it is found, and how often it is where nothing changed."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

sys.path.insert(0, str(Path(__file__).parent))
from simulated import DATA

sys.path.pop(0)

from dtprobe.store.rows import COST
from dtprobe.trends.costs import ALPHA, WINDOWS, ranked

NIGHTS, SERIES = 6, 36
"""What 12 nights leave of 75 series when each night measures half of the scenarios."""
LEVEL = ALPHA / len(WINDOWS) / 2
"""For the one set of recorders that enough scenarios use, and all together."""


@pytest.fixture(scope="module")
def real() -> tuple[np.ndarray, np.ndarray]:
    """Medians of the logarithm of the cost in each scenario, and by how much single runs lay beside them."""
    rows = pd.read_parquet(DATA)
    rows = rows[rows["metric"].str.startswith(COST, na=False)]
    cost = np.log(rows["value"])
    medians = cost.groupby([rows["scenario"], rows["variant"], rows["metric"]]).transform("median")
    beside = (cost - medians).to_numpy()
    return medians.drop_duplicates().to_numpy()[::2][:SERIES], beside[beside != 0]


def share(real: tuple[np.ndarray, np.ndarray], *, more: float, window: int, scatter: float, level: float, times: int) -> float:
    """Of so many histories, the share in which the cost of the last nights is found to be more."""
    medians, beside = real
    rng = np.random.default_rng(7)
    found = 0
    for _ in range(times):
        nights = medians[:, None] + scatter * rng.choice(beside, (medians.size, NIGHTS + window))
        nights[:, NIGHTS:] += np.log1p(more)
        found += ranked([(one[:NIGHTS], one[NIGHTS:]) for one in np.exp(nights)]) < level
    return found / times


@pytest.mark.parametrize("window", [1, 3])
def test_where_nothing_changed_the_chance_is_what_it_says(real, window):
    assert 0.01 <= share(real, more=0, window=window, scatter=1.0, level=0.05, times=100) <= 0.11


@pytest.mark.nightly
@pytest.mark.parametrize("window", [1, 3])
def test_where_nothing_changed_in_2000_histories_the_chance_is_what_it_says(real, window):
    assert 0.04 <= share(real, more=0, window=window, scatter=1.0, level=0.05, times=2000) <= 0.06
    assert share(real, more=0, window=window, scatter=1.0, level=LEVEL, times=2000) <= 2 * LEVEL


@pytest.mark.parametrize(
    ("more", "window", "scatter", "least"),
    [(0.1, 3, 1.0, 0.25), (0.05, 1, 0.25, 0.5), (0.05, 3, 0.5, 0.25), (0.05, 3, 0.25, 0.9), (0.2, 1, 1.0, 0.4)],
)
def test_what_costs_more_is_found_the_sooner_the_less_nights_scatter(real, more, window, scatter, least):
    assert share(real, more=more, window=window, scatter=scatter, level=LEVEL, times=40) >= least


def test_equal_and_absent_costs_say_nothing():
    assert ranked([(np.ones(5), np.ones(1))] * 20) == 1.0 and ranked([]) == 1.0
