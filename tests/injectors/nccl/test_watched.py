"""`dtprobe watch` over jobs that call libnccl (the double of it): hangs in which only the host waits, that no flight recorder knows."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from dtprobe import watch
from dtprobe.probes.hang import Found

pytestmark = pytest.mark.needs("cc", "torch>=2.10")

LAUNCHER = """
import os, subprocess, sys
children = [
    subprocess.Popen([sys.executable, sys.argv[1], steps], env={**os.environ, "RANK": str(rank), "TEST_RANK": str(rank)})
    for rank, steps in enumerate(sys.argv[2:])
]
sys.exit(max(abs(child.wait()) for child in children))
"""

Watch = Callable[[Sequence[Sequence[Sequence[Any]]]], watch.WatchResult]


class _Quiet:
    def hang(self, found: Found) -> None:
        pass

    resumed = hang


@pytest.fixture
def watched(libraries, tmp_path: Path) -> Watch:
    """Run ranks with these steps under watch, which finds the double in LD_LIBRARY_PATH and preloads its own library."""
    foreign = ("RANK", "LD_PRELOAD", "SLURM_PROCID")
    environ: Mapping[str, str] = {
        **{name: value for name, value in os.environ.items() if name not in foreign},
        "LD_LIBRARY_PATH": str(libraries.fake.parent),
        "LIBNCCL": str(libraries.fake),
        "SHARED": str(tmp_path),
        "XDG_STATE_HOME": str(tmp_path / "state"),
    }
    launcher = tmp_path / "launcher.py"
    launcher.write_text(LAUNCHER)

    def run(steps: Sequence[Sequence[Sequence[Any]]]) -> watch.WatchResult:
        return watch.run(
            [sys.executable, str(launcher), str(Path(__file__).with_name("rank.py")), *map(json.dumps, steps)],
            out=tmp_path / "runs",
            suspect_s=2,
            end=True,
            timeout_s=60,
            teller=_Quiet(),
            environ={**environ, "WORLD_SIZE": str(len(steps))},
        )

    return run


@pytest.mark.parametrize("absent", ["stop", "block"])
def test_a_rank_that_does_not_come_to_the_creation_of_a_communicator_is_named(watched, absent):
    result = watched([[["init"], ["all_reduce"], ["init"]], [["init"], ["all_reduce"], [absent]]])
    assert result.hang and result.json["suspects"] == [1], result.json
    assert "ncclCommInitRank" in result.json["hangs"][0]["collective"]["text"]
    assert result.json["hangs"][0]["waiting"] == [0] and result.json["ended_by_watch"]


def test_a_rank_that_does_not_come_to_a_call_in_which_the_host_waits_is_named(watched):
    result = watched([[["init"], ["all_reduce"], ["all_reduce"]]] * 2 + [[["init"], ["all_reduce"], ["stop"]]])
    assert result.hang and result.json["suspects"] == [2], result.json
    assert result.json["hangs"][0]["collective"]["name"] == "nccl:ncclAllReduce"
    assert result.json["hangs"][0]["collective"]["seq"] == 2 and result.json["hangs"][0]["collective"]["timeout_ms"] is None


def test_calls_that_return_are_no_hang(watched):
    result = watched([[["init"], *[["all_reduce"]] * 20, ["destroy"]]] * 2)
    assert result.well and not result.json["hangs"] and not result.json["blind"], result.json


@pytest.mark.parametrize("before", [2, 0])
def test_where_all_have_entered_and_name_different_roots_that_is_why(watched, before):
    """Each waits for what the other one has; what was called before tells who is odd."""
    usual = [["init"], *[["bcast", 0]] * before]
    result = watched([[*usual, ["bcast", 1]], [*usual, ["bcast", 0]]])
    [hang] = result.json["hangs"]
    assert result.hang and result.json["suspects"] == ([0] if before else "all"), result.json
    assert hang["kind"] == "mismatch" and "rank 0: ncclBcast 1 int32 root 1; rank 1: ncclBcast 1 int32 root 0" in hang["reason"]
