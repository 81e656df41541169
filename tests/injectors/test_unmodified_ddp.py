"""Faults by command line only, into a DDP training script that knows nothing of them, under plain torchrun."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.needs("gloo"), pytest.mark.timeout(600)]

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "train_mlp.py"
LIMIT_S = 280

TEN = [
    # fault, rank on which it fires, how the command ends, what its output must show
    ("collective:delay,rank=1,op=all_reduce,nth=3,seconds=1", 1, 0, "accuracy"),
    ("collective:skip,rank=1,op=all_reduce,nth=5", 1, 1, ""),
    ("collective:nan,rank=1,op=all_reduce,nth=4", 1, 0, "loss nan"),
    ("collective:raise,rank=0,op=barrier", 0, 1, "injected: collective:raise,rank=0,op=barrier"),
    ("process:kill,rank=1,op=all_reduce,nth=6", 1, 1, "Signal 9 (SIGKILL)"),
    ("process:stop,rank=1,op=all_reduce,nth=10,for_s=2", 1, 0, "accuracy"),
    ("process:exception,rank=0,op=all_reduce,nth=7,type=MemoryError", 0, 1, "MemoryError"),
    ("environment:unset,rank=1,var=MASTER_ADDR", 1, 1, "MASTER_ADDR"),
    ("clock:skew,rank=1,seconds=-90", 1, 0, "accuracy"),
    ("resource:nofile,rank=1,limit=8", 1, 1, ""),
]


def inject(job, fault, *more):
    """The result of `dtprobe inject FAULT -- torchrun ... train_mlp.py`, and what the command wrote."""
    torchrun = str(Path(sys.executable).with_name("torchrun"))
    command = [torchrun, "--standalone", "--nproc-per-node", "2", str(SCRIPT), "--epochs", "1", "--timeout-s", "30", *more]
    process = job.cli(fault, "--timeout-s", str(LIMIT_S), "--", *command)
    out, err = process.communicate(timeout=LIMIT_S + 120)
    assert out, err
    result = json.loads(out)
    (folder,) = (job.shared / "runs" / "inject").iterdir()
    logs = "".join((folder / "fault" / "0" / "launcher" / f"{name}.log").read_text() for name in ("stdout", "stderr"))
    return process.returncode, result, folder, logs


@pytest.mark.parametrize(
    ("fault", "rank", "code", "words"),
    [
        pytest.param(*one, id=one[0].split(",")[0], marks=[pytest.mark.nightly] if place > 1 else [])
        for place, one in enumerate(TEN)
    ],
)
def test_a_fault_fires_in_somebody_s_training_and_leaves_a_report(job, fault, rank, code, words):
    status, result, folder, logs = inject(job, fault)
    (one,) = result["faults"]
    assert one["count"] >= 1 and {firing["rank"] for firing in one["fired"]} == {rank}, one
    assert result["exit_code"] == code and status == (0 if code == 0 else 1), logs[-3000:]
    assert words in logs, logs[-3000:]
    report = (folder / "report.html").read_text(encoding="utf-8")
    assert fault in report
    assert not job.processes()


def test_without_a_fault_the_script_learns(job):
    """The example itself is a job that goes well: what the faults break is not broken before."""
    status, result, _, logs = inject(job, "collective:delay,rank=1,op=all_reduce,nth=1000000,seconds=1")
    assert result["exit_code"] == 0 and "accuracy" in logs and float(logs.split("accuracy ")[1].split()[0]) > 0.8
    assert status == 1 and "nth=1000000 did not meet" in result["faults"][0]["problems"][0]
