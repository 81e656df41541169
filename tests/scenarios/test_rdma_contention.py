"""What of a measurement counts: the figures of its artifacts, and the reasons for which it is left out."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pandas as pd
import pytest

from dtprobe import catalog
from dtprobe.evidence import OUTCOMES, Evidence
from dtprobe.readers.folder import read_folder

CORPUS = Path(__file__).parents[1] / "corpus" / "rdma"


@pytest.fixture(scope="module")
def figures():
    folder = next(path for path in catalog.content_folders("scenarios") if path.name == "rdma-contention")
    return catalog.load_module(Path(folder) / "figures.py", "_test_rdma_contention_figures")


def evidence(tmp_path: Path, *tries: dict[str, object], arm: str = "fault") -> Evidence:
    """What one arm run left: real artifacts in a folder a try, and the worker's record of it."""
    vm = tmp_path / "rank0" / "vm"
    vm.mkdir(parents=True)
    lines = []
    for number, one in enumerate(tries):
        case = vm / f"case{number}-0"
        case.mkdir()
        for name in (
            "ib_write_bw.txt",
            "iperf3-tcp.json",
            "iperf3-udp.json",
            "hw_counters-before.txt",
            "hw_counters-after.txt",
        ):
            shutil.copy(CORPUS / name, case)
        said = {"what": "fifo:rdma+tcp", "try": number, "took_s": 9.0, "error": "", "text": "", "folder": case.name}
        facts = {"rate_mbit": 22, "idle": 0.1, "drops": 885, "from_s": -0.5, "to_s": 60.0, "invalid": ""}
        lines += [{"kind": "begun", "what": "fifo:rdma+tcp", "try": number}, {"kind": "attempt", **said, **facts, **one}]
    (vm / "events.jsonl").write_text("".join(json.dumps({"t_ns": 1, "rank": 0, **line}) + "\n" for line in lines))
    frames = {name: frame.assign(arm=arm, repeat=0) for name, frame in read_folder(tmp_path).items()}
    return Evidence(
        folder=tmp_path,
        seed=0,
        world_size=1,
        outcomes=pd.DataFrame(columns=list(OUTCOMES)).astype(OUTCOMES),
        frames=frames,
        unavailable={},
        suspicions=pd.DataFrame(),
    )


def test_a_case_s_figures_come_from_its_own_artifacts(figures, tmp_path):
    [row] = figures.goodput(evidence(tmp_path, {})).to_dict("records")

    assert row["valid"], row["why"]
    assert row["rdma_mbit"] == pytest.approx(10.007)
    assert row["out_of_seq_request"] == 34 and row["duplicate_request"] == 0
    assert 0 < row["tcp_mbit"] < 16 and 0 <= row["udp_loss"] < 1


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"invalid": "perftest printed 0"}, "perftest printed 0"),
        ({"invalid": "2% of the processor idle"}, "2% of the processor idle"),
        ({"from_s": 1.0, "to_s": 2.3}, "no interval of TCP"),
        ({"rate_mbit": 100}, "all flows together"),
        ({"rate_mbit": 5}, "all flows together"),
        ({"error": "RuntimeError", "text": "ib_write_bw ended with [1, 1]"}, "RuntimeError: ib_write_bw ended"),
    ],
)
def test_what_says_nothing_about_the_link_is_left_out_and_said_so(figures, tmp_path, changed, why):
    rows = figures.goodput(evidence(tmp_path, {}, changed))

    assert rows["valid"].tolist() == [True, False]
    assert why in rows["why"].iloc[1]
    assert figures.discarded(rows).startswith(" Left out 1 of 2 measurements: ") and why in figures.discarded(rows)
    assert figures.discarded(rows[rows["valid"]]) == ""


@pytest.mark.parametrize(
    ("status", "after_s", "timely"), [(12, 2.2, True), (12, 1.0, False), (12, 9.0, False), (5, 2.2, False), (0, None, False)]
)
def test_only_status_12_at_its_time_counts(figures, tmp_path, status, after_s, timely):
    told = {"fault": "kill", "retries": 3, "promised_s": 2.15, "watched_s": 7.0, "completed": 1}

    [row] = figures.losses(evidence(tmp_path, {**told, "status": status, "after_s": after_s})).to_dict("records")

    assert row["in_time"] is timely


def test_on_a_device_whose_rate_is_unknown_no_sum_is_asked_for(figures, tmp_path):
    [row] = figures.goodput(evidence(tmp_path, {"rate_mbit": None})).to_dict("records")
    assert row["valid"], row["why"]
