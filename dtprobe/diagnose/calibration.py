"""From the likelihood that findings add up to, to the confidence that is stated: of answers given with 0.8 about eight in ten are right."""

from __future__ import annotations

import tomllib
from functools import cache
from importlib.resources import files
from math import exp, log

HELD = 0.01
"""Nothing is surer than this from either end."""


def odds(likelihood: float) -> float:
    """The log-odds, within reason."""
    held = min(max(likelihood, HELD), 1 - HELD)
    return log(held / (1 - held))


def mapped(likelihood: float, slope: float, shift: float) -> float:
    """The confidence: a logistic of the log-odds, monotone for a slope above zero."""
    return 1 / (1 + exp(-(slope * odds(likelihood) + shift)))


@cache
def fitted() -> tuple[float, float]:
    """Slope and shift as `benchmarks/postmortem_calibration.py` found them on cases seen for the first time."""
    text = (files("dtprobe.diagnose") / "knowledge" / "calibration.toml").read_text(encoding="utf-8")
    data = tomllib.loads(text)
    return float(data["slope"]), float(data["shift"])


def calibrated(likelihood: float) -> float:
    """The confidence to state for this likelihood."""
    return min(mapped(likelihood, *fitted()), 1 - HELD)
