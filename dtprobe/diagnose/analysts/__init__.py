"""Analysts: each joins what was read into findings. One question a module."""

from __future__ import annotations

from dtprobe.diagnose.analysts import (
    attempts,
    collectives,
    direct,
    exits,
    gpu_faults,
    groups,
    healthy,
    joined,
    nccl_calls,
    nccl_errors,
    nccl_makings,
    placement,
    progress,
    ras,
    stacks,
    states,
    tracebacks,
    watchdog,
)
from dtprobe.diagnose.case import Analyst

ANALYSTS: tuple[Analyst, ...] = (
    direct.analyse,
    joined.analyse,
    gpu_faults.analyse,
    placement.analyse,
    watchdog.analyse,
    groups.analyse,
    progress.analyse,
    tracebacks.analyse,
    exits.analyse,
    nccl_calls.analyse,
    nccl_errors.analyse,
    nccl_makings.analyse,
    ras.analyse,
    stacks.analyse,
    states.analyse,
    attempts.analyse,
    healthy.analyse,
    collectives.analyse,
)
"""All of them; their order does not matter."""
