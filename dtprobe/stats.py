"""Honest statistics for judges: counts with Wilson intervals, measures with bootstrap intervals or a rank test.

scipy is imported when a function is called, so that importing a scenario stays light.
"""

from __future__ import annotations

from collections.abc import Sequence

from dtprobe.scenario import Estimate

CONFIDENCE = 0.95
ENOUGH_FOR_A_TEST = 5
"""Fewer samples than this on a side give no rank test a chance (n=4 against 4 reaches p=0.029 at best)."""


def wilson(k: int, n: int) -> Estimate:
    """The proportion k/n with its 95 % Wilson score interval (Wilson 1927; scipy's `binomtest`).

    Raises ValueError unless 0 <= k <= n and n > 0.
    """
    if n <= 0 or not 0 <= k <= n:
        raise ValueError(f"wilson: k={k} of n={n} is no proportion")
    from scipy.stats import binomtest

    interval = binomtest(k, n).proportion_ci(confidence_level=CONFIDENCE, method="wilson")
    return Estimate(value=k / n, low=float(interval.low), high=float(interval.high), n=n, method="Wilson 95 %")


def measured(samples: Sequence[float], *, seed: int = 0) -> Estimate:
    """The median of samples with a 95 % bootstrap percentile interval; under five samples their range, and it says so.

    Raises ValueError for no samples or one that is not finite.
    """
    import numpy as np

    values = np.asarray(samples, dtype=float)
    if values.size == 0 or not np.isfinite(values).all():
        raise ValueError(f"measured: {values.size} samples, {int((~np.isfinite(values)).sum())} of them not finite")
    middle = float(np.median(values))
    if values.size < ENOUGH_FOR_A_TEST or np.ptp(values) == 0:
        return Estimate(value=middle, low=float(values.min()), high=float(values.max()), n=values.size, method="range")
    from scipy.stats import bootstrap

    found = bootstrap((values,), np.median, confidence_level=CONFIDENCE, method="percentile", rng=np.random.default_rng(seed))
    interval = found.confidence_interval
    return Estimate(value=middle, low=float(interval.low), high=float(interval.high), n=values.size, method="bootstrap 95 %")


def separated(first: Sequence[float], second: Sequence[float]) -> bool:
    """Whether two sets of samples differ by more than their noise.

    With five or more on both sides a two-sided Mann-Whitney rank test at 0.01. With fewer no test can decide: then their
    ranges must not overlap and their medians must lie further apart than the wider of the two ranges.
    Raises ValueError when a side is empty.
    """
    import numpy as np

    a, b = np.asarray(first, dtype=float), np.asarray(second, dtype=float)
    if a.size == 0 or b.size == 0:
        raise ValueError(f"separated: {a.size} against {b.size} samples")
    if min(a.size, b.size) >= ENOUGH_FOR_A_TEST:
        from scipy.stats import mannwhitneyu

        return bool(mannwhitneyu(a, b).pvalue < 0.01)
    apart = a.max() < b.min() or b.max() < a.min()
    return bool(apart and abs(np.median(a) - np.median(b)) > max(np.ptp(a), np.ptp(b)))


def separated_counts(k1: int, n1: int, k2: int, n2: int) -> bool:
    """Whether k1 of n1 and k2 of n2 differ by more than chance: two-sided Fisher exact test at 0.05."""
    for k, n in ((k1, n1), (k2, n2)):
        if n <= 0 or not 0 <= k <= n:
            raise ValueError(f"separated_counts: k={k} of n={n} is no proportion")
    from scipy.stats import fisher_exact

    return bool(fisher_exact([[k1, n1 - k1], [k2, n2 - k2]]).pvalue < 0.05)


def ratio(with_it: Sequence[float], without: Sequence[float], *, seed: int = 0) -> Estimate:
    """The ratio of medians with/without with a 95 % bootstrap interval; samples are paired by position when equally many.

    Pairs that ran next to each other share the machine's mood, so the ratio within pairs is far less noisy than the ratio
    of pooled medians. Raises ValueError for empty sides or values that are not positive.
    """
    import numpy as np

    a, b = np.asarray(with_it, dtype=float), np.asarray(without, dtype=float)
    if a.size == 0 or b.size == 0 or not (np.isfinite(a).all() and np.isfinite(b).all()) or (a <= 0).any() or (b <= 0).any():
        raise ValueError(f"ratio: {a.size} against {b.size} samples, all of which must be positive and finite")
    if a.size == b.size:
        return measured(list(a / b), seed=seed)
    rng = np.random.default_rng(seed)
    draws = [np.median(rng.choice(a, a.size)) / np.median(rng.choice(b, b.size)) for _ in range(2000)]
    low, high = np.quantile(draws, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    middle = float(np.median(a) / np.median(b))
    return Estimate(value=middle, low=float(low), high=float(high), n=min(a.size, b.size), method="bootstrap 95 %")
