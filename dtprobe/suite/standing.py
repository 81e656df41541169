"""What several runs of one scenario say together: as expected, flaky, or broken, by intervals and never by equality."""

from __future__ import annotations

from dataclasses import dataclass

from dtprobe import stats

LIKELY = 0.5


@dataclass(frozen=True, kw_only=True)
class Earlier:
    """Of the earlier runs of a scenario with the same versions of torch and Python, how many were as expected."""

    k: int = 0
    n: int = 0


@dataclass(frozen=True, kw_only=True)
class Standing:
    """`status` is `as-expected`, `flaky`, `broken`, or `not-as-expected` where too few runs tell these two apart. `new`: it is worse than it was, or nothing is known of how it was."""

    status: str
    new: bool
    because: str


def standing(k: int, n: int, earlier: Earlier) -> Standing:
    """k of n runs tonight were as expected; raises ValueError unless 0 <= k <= n and n > 0.

    Broken: the 95 % Wilson interval of k/n lies below one half, so that it fails more often than not, or none was as expected and that
    differs from the earlier runs (Fisher's exact test at 0.05). Flaky: some were as expected and some not. A flaky scenario is no news
    where it was so before and tonight is not worse by the same test.
    """
    share = stats.wilson(k, n)
    told = f"{k} of {n} runs as expected ({share.low:.0%} to {share.high:.0%})"
    if earlier.n:
        told += f", earlier {earlier.k} of {earlier.n}"
    if k == n:
        return Standing(status="as-expected", new=False, because=told)
    worse = bool(earlier.n) and k * earlier.n < earlier.k * n and stats.separated_counts(k, n, earlier.k, earlier.n)
    if share.high < LIKELY or (k == 0 and worse):
        was = bool(earlier.n) and stats.wilson(earlier.k, earlier.n).high < LIKELY
        return Standing(status="broken", new=not was, because=told)
    if k == 0:
        return Standing(status="not-as-expected", new=True, because=told + ", too few to tell flaky from broken")
    known = earlier.k < earlier.n and not worse
    return Standing(status="flaky", new=not known, because=told + (", worse than before" if worse else ""))
