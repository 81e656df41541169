"""Batches of sends and receives around a ring: their halves are matched by count, and the blame ends where the waits end."""

from __future__ import annotations

import pickle
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from dtprobe.diagnose import diagnose, intake
from dtprobe.diagnose.analysts.collectives.recording import gather

T0_NS = 1_790_000_000_000_000_000
LATER_NS = 600_000_000_000
"""The watchdog looks again before it dumps."""
STEPS = 6


def _entry(rank: int, step: int, name: str, state: str) -> dict[str, Any]:
    done = state == "completed"
    return {
        "record_id": 0, "pg_id": 0, "process_group": ("0", "default_pg"), "collective_seq_id": 0, "p2p_seq_id": step, "op_id": step,
        "profiling_name": name, "time_created_ns": T0_NS + step * 1_000_000 + rank, "input_sizes": [[64]], "input_dtypes": ["Float"],
        "output_sizes": [[64]], "output_dtypes": ["Float"], "state": state, "retired": done, "timeout_ms": 600_000, "is_p2p": True,
        "time_discovered_started_ns": None if state == "scheduled" else T0_NS + (0 if done else LATER_NS),
        "time_discovered_completed_ns": T0_NS + step * 1_000_000 if done else None,
    }  # fmt: skip


def _ring(folder: Path, size: int, gone: int) -> None:
    """Rank `gone` stops after STEPS batches. Its neighbours hang in the next one, theirs in the one after it, and so on."""
    for rank in range(size):
        apart = min((rank - gone) % size, (gone - rank) % size)
        last = STEPS if apart == 0 else STEPS + min(apart, 2) if apart < 3 else STEPS + 2
        entries = []
        for step in range(1, last + 1):
            hangs = 0 < apart < 3 and step == STEPS + apart
            state = "started" if hangs else "completed"
            names = (f"nccl:send {rank}->{(rank + 1) % size}", f"nccl:recv {rank}<-{(rank - 1) % size}")
            entries += [_entry(rank, step, name, "scheduled") for name in names]
            entries.append(_entry(rank, step, "nccl:coalesced", state) | {"input_sizes": [], "output_sizes": []})
        dump = {
            "version": "2.10",
            "pg_config": {"0": {"name": "0", "desc": "default_pg", "ranks": str(list(range(size)))}},
            "entries": entries,
        }
        (folder / f"nccl_trace_rank_{rank}").write_bytes(pickle.dumps(dump, 2))


@pytest.mark.parametrize(("size", "gone"), [(6, 3), (6, 0), (5, 4)])
def test_whose_batches_are_complete_is_not_blamed_for_the_other_half_of_its_neighbours(
    tmp_path: Path, size: int, gone: int
) -> None:
    _ring(tmp_path, size, gone)
    answer = diagnose([tmp_path])
    assert (answer.first_failing_rank, answer.suspects) == (gone, (gone,)), answer.because


def test_a_list_of_waits_that_is_cut_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _ring(tmp_path, 6, 2)
    with intake.taken([tmp_path]) as taken:
        recording = gather(taken.artifacts, [])
    assert recording is not None
    module = import_module("dtprobe.diagnose.analysts.collectives.findings")
    (whole,) = module.findings(recording)
    monkeypatch.setattr(module, "MOST_EDGES", 2)
    (cut,) = module.findings(recording)
    assert "waits are listed" not in whole.not_proven
    assert f"2 of {len(whole.waits)} waits are listed" in cut.not_proven
