"""How often an answer of a stated confidence is right, on log cases as they were seen for the first time.

`python benchmarks/postmortem_calibration.py [--sight FILE]` fits the monotone map of `knowledge/calibration.toml` (a logistic of the
log-odds, two numbers) to `tests/corpus/logs/first-sight.csv`: the likelihood and the outcome that each of our own cases had before any
rule was changed for it. It prints the table of reliability under leave-one-out, the Brier score of the bare likelihood and of the map, and
the two numbers.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Sequence
from math import log
from pathlib import Path

from dtprobe.diagnose.calibration import mapped

SIGHT = Path(__file__).resolve().parents[1] / "tests" / "corpus" / "logs" / "first-sight.csv"
BINS = ((0.0, 0.6), (0.6, 0.7), (0.7, 0.8), (0.8, 0.9), (0.9, 1.01))
SLOPES = [0.5 + 0.1 * step for step in range(16)]
SHIFTS = [-1.0 + 0.1 * step for step in range(21)]
PRIOR = 0.05
"""A pull towards the bare likelihood: few cases are no reason to bend it much."""

Seen = tuple[float, bool]


def fit(seen: Sequence[Seen]) -> tuple[float, float]:
    """Slope (never negative) and shift of the least mean log-loss."""

    def loss(slope: float, shift: float) -> float:
        total = 0.0
        for likelihood, right in seen:
            sure = mapped(likelihood, slope, shift)
            total -= log(sure if right else 1 - sure)
        return total / len(seen) + PRIOR * ((slope - 1) ** 2 + shift**2)

    return min(((slope, shift) for slope in SLOPES for shift in SHIFTS), key=lambda one: loss(*one))


def main() -> None:
    """Print the table."""
    asked = argparse.ArgumentParser(description=__doc__)
    asked.add_argument("--sight", type=Path, default=SIGHT)
    with asked.parse_args().sight.open(newline="") as stream:
        seen: list[Seen] = [(float(row["likelihood"]), row["mode_right"] == "1") for row in csv.DictReader(stream)]
    held_out = [(mapped(one[0], *fit(seen[:at] + seen[at + 1 :])), one[1]) for at, one in enumerate(seen)]
    slope, shift = fit(seen)
    print(f"{len(seen)} answers at first sight, {sum(right for _, right in seen)} right")
    print(f"slope = {slope:.2f}  shift = {shift:.2f}")
    for name, pairs in (("likelihood", seen), ("confidence (leave one out)", held_out)):
        brier = sum((sure - right) ** 2 for sure, right in pairs) / len(pairs)
        print(f"\n{name}: Brier {brier:.3f}\n  stated       n  right  share")
        for low, high in BINS:
            inside = [(sure, right) for sure, right in pairs if low <= sure < high]
            if inside:
                stated = sum(sure for sure, _ in inside) / len(inside)
                share = sum(right for _, right in inside) / len(inside)
                print(f"  {stated:.2f}       {len(inside):3}    {sum(right for _, right in inside):3}   {share:.2f}")


if __name__ == "__main__":
    main()
