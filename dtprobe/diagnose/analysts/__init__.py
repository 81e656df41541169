"""Analysts: each joins what was read into findings. One question a module."""

from __future__ import annotations

from collections.abc import Sequence

from dtprobe.diagnose.analysts import (
    absent,
    attempts,
    blocked,
    checks,
    collectives,
    direct,
    exchanges,
    exits,
    feeding,
    gpu_faults,
    groups,
    healthy,
    joined,
    limits,
    moments,
    nccl_calls,
    nccl_errors,
    nccl_makings,
    numbers,
    own_checks,
    own_pace,
    pace,
    placement,
    progress,
    ras,
    rdma_counters,
    reports,
    restarts,
    slow_path,
    stacks,
    states,
    tracebacks,
    transcripts,
    units,
    visibility,
    watchdog,
)
from dtprobe.diagnose.case import Analyst, Case, Finding
from dtprobe.readers.artifact import Problem, one_line

ANALYSTS: tuple[Analyst, ...] = (
    direct.analyse,
    joined.analyse,
    gpu_faults.analyse,
    placement.analyse,
    watchdog.analyse,
    reports.analyse,
    groups.analyse,
    progress.analyse,
    pace.analyse,
    slow_path.analyse,
    feeding.analyse,
    numbers.analyse,
    tracebacks.analyse,
    exits.analyse,
    nccl_calls.analyse,
    nccl_errors.analyse,
    nccl_makings.analyse,
    ras.analyse,
    stacks.analyse,
    states.analyse,
    transcripts.analyse,
    attempts.analyse,
    checks.analyse,
    restarts.analyse,
    absent.analyse,
    healthy.analyse,
    collectives.analyse,
    moments.analyse,
    exchanges.analyse,
    units.analyse,
    blocked.analyse,
    limits.analyse,
    own_pace.analyse,
    own_checks.analyse,
    rdma_counters.analyse,
    visibility.analyse,
)
"""All of them; their order does not matter."""


def conclude(case: Case, analysts: Sequence[Analyst] = ANALYSTS) -> tuple[list[Finding], list[Problem]]:
    """What all of them find. One that fails on hostile evidence takes nothing from the others: it is said to be missing."""
    found: list[Finding] = []
    failed: list[Problem] = []
    for analyse in analysts:
        try:
            found += analyse(case)
        except Exception as error:  # noqa: BLE001 -- said in the answer
            name = analyse.__module__.rpartition(".")[2]
            told = one_line(f"{type(error).__name__}: {error}")
            failed.append(Problem(f"analyst {name}", "failed", f"it could not judge these artifacts ({told})"))
    return found, failed
