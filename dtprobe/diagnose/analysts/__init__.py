"""Analysts: each joins what was read into findings. One question a module."""

from __future__ import annotations

from dtprobe.diagnose.analysts import direct, exits, groups, healthy, progress, tracebacks, watchdog
from dtprobe.diagnose.case import Analyst

ANALYSTS: tuple[Analyst, ...] = (
    direct.analyse,
    watchdog.analyse,
    groups.analyse,
    progress.analyse,
    tracebacks.analyse,
    exits.analyse,
    healthy.analyse,
)
"""All of them; their order does not matter."""
