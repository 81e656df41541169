"""What each rank called last, by the flight recorders: bars of the timeline."""

from __future__ import annotations

import math
from itertools import chain

from dtprobe.diagnose.analysts.collectives.recording import Call, Recording
from dtprobe.diagnose.case import Case
from dtprobe.diagnose.diagnosis import Operation
from dtprobe.readers.flight_columns import DONE

MOST = 20_000
"""Calls of all ranks together."""
EACH = 200
"""Calls of a rank, its last ones."""


def operations(case: Case) -> tuple[Operation, ...]:
    """The last calls of every rank in the order of its calls, at most MOST in all; none where there are no dumps."""
    recording = case.recording
    if recording is None or not recording.ranks:
        return ()
    each = max(1, min(EACH, MOST // len(recording.ranks)))
    return tuple(chain.from_iterable(_of_rank(recording, rank, each) for rank in list(recording.ranks)[:MOST]))


def _of_rank(recording: Recording, rank: int, most: int) -> list[Operation]:
    calls = [
        Call(rank, lane, place)
        for lane, column in recording.ranks[rank].columns.items()
        for place in range(max(0, len(column) - most), len(column))
    ]
    calls.sort(key=lambda call: recording.column(call).order[call.place])
    return [_operation(recording, call) for call in calls[-most:] if recording.created(call) > 0]


def _operation(recording: Recording, call: Call) -> Operation:
    """Where a call is done and no time of its end is recorded (CPU backends, no timing), it ends where it begins."""
    begin_ns, took_ms = recording.created(call), recording.column(call).took[call.place]
    done = recording.state(call) == DONE
    end_ns = begin_ns + int(max(took_ms, 0.0) * 10**6) if math.isfinite(took_ms) else begin_ns
    return Operation(
        rank=call.rank,
        name=recording.kind(call).op,
        begin_ns=begin_ns,
        end_ns=end_ns if done else None,
        group=recording.described(call.rank, call.lane.group),
        seq=recording.seq(call),
        state="completed" if done else "open",
    )
