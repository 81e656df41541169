"""Groups that wait longer than the job's own limit: their time-out is the library's default, not that of the job."""

from __future__ import annotations

from collections.abc import Iterator

from dtprobe.diagnose import seen
from dtprobe.diagnose.analysts.collectives.findings import quote as quote_call
from dtprobe.diagnose.analysts.collectives.recording import DEFAULT, Recording
from dtprobe.diagnose.case import Case, Finding, quote
from dtprobe.diagnose.facts.units import calls_in
from dtprobe.diagnose.seen.observed import Observation
from dtprobe.readers.artifact import as_float

ANALYST = "limits"
WAITED = 0.8
DEFAULTS_MS = (1_800_000, 600_000)
"""Of gloo and of NCCL (torch.distributed.constants)."""
NAMES = ("default_s", "default_timeout_s", "timeout_s", "pg_timeout_s")
"""What workers call the limit that the job set."""


def analyse(case: Case) -> Iterator[Finding]:
    """The first unit of work in which a call of such a group was waited for longer than the limit; nothing without dumps."""
    recording = case.recording
    if recording is None:
        return
    found = seen.of(case)
    for one in sorted(found.tries, key=lambda each: each.begun_ns):
        if one.ended_ns is None:
            continue
        limit_ns, said = _limit(recording, found.observations, one.rank)
        calls = recording.ranks.get(one.rank)
        if calls is None or limit_ns is None or one.ended_ns - one.begun_ns <= limit_ns:
            continue
        for call in calls_in(recording, one):
            own_ms = calls.limits.get(call.lane.group, 0)
            if own_ms in DEFAULTS_MS and own_ms * 1_000_000 > limit_ns and calls.described.get(call.lane.group) != DEFAULT:
                yield Finding(
                    mode="timeout-not-inherited",
                    analyst=ANALYST,
                    likelihood=WAITED,
                    because=f"rank {one.rank} waited {(one.ended_ns - one.begun_ns) / 1e9:.1f} s in a call of group {call.lane.group}, beyond the job's "
                    f"limit of {limit_ns / 1e9:g} s: the group has the library's default of {own_ms // 60_000} min",
                    first="all",
                    at_ns=one.begun_ns,
                    evidence=(
                        quote_call(recording, call, "cause", f"time-out {own_ms} ms: "),
                        *((quote(said.line, "cause"),) if said is not None else ()),
                        quote(one.line, "effect"),
                    ),
                    not_proven="Which rank came late, and why.",
                )
                return


def _limit(recording: Recording, observed: tuple[Observation, ...], rank: int) -> tuple[int | None, Observation | None]:
    """The limit that the rank says the job set, else that of its default group, in ns."""
    for one in observed:
        value = next((number for name in NAMES if (number := as_float(one.fields.get(name))) is not None), None)
        if one.rank == rank and value is not None and value > 0:
            return int(value * 1e9), one
    calls = recording.ranks.get(rank)
    limits = (
        [calls.limits[group] for group, text in calls.described.items() if text == DEFAULT and group in calls.limits]
        if calls
        else []
    )
    return (min(limits) * 1_000_000 if limits else None), None
