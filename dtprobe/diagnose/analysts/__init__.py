"""Analysts: each joins what was read into findings. One question a module."""

from __future__ import annotations

from dtprobe.diagnose.analysts import direct
from dtprobe.diagnose.case import Analyst

ANALYSTS: tuple[Analyst, ...] = (direct.analyse,)
"""All of them; their order does not matter."""
