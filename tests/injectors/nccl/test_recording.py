"""The ring shows every call from outside, whatever state the rank is in; a bad plan or place never disturbs the job."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from dtprobe.readers.nccl_ring import read_nccl_header

pytestmark = pytest.mark.needs("cc")

STUCK = {0: [["init"], ["all_reduce"], ["all_reduce", 7]], 1: [["init"], ["all_reduce"], ["wait", "go"], ["all_reduce", 7]]}


def state(pid):
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_a_finished_job_s_calls_are_all_there_with_their_arguments(start):
    steps = {
        rank: [
            ["init", "config"],
            ["all_reduce", 5, 2],
            ["broadcast", 1],
            ["group_start"],
            ["send", 1 - rank],
            ["recv", 1 - rank],
            ["group_end"],
            ["finalize"],
            ["destroy"],
        ]
        for rank in (0, 1)
    }
    job = start(steps)
    job.finish()
    ring = job.ring(1)
    assert ring["call"].tolist() == [
        "ncclCommInitRankConfig",
        "ncclAllReduce",
        "ncclBroadcast",
        "ncclGroupStart",
        "ncclSend",
        "ncclRecv",
        "ncclGroupEnd",
        "ncclCommFinalize",
        "ncclCommDestroy",
    ]
    assert ring["kind"].tolist() == [
        "init", "collective", "collective", "group", "p2p", "p2p", "group", "life", "life",
    ]  # fmt: skip
    reduced, broadcast, sent = ring.iloc[1], ring.iloc[2], ring.iloc[4]
    assert (reduced["count"], reduced["dtype"], reduced["redop"], reduced["seq"]) == (5, "float32", "max", 1)
    assert (broadcast["root"], broadcast["dtype"], broadcast["seq"]) == (1, "int32", 2)
    assert (sent["peer"], sent["count"], bool(sent["in_group"])) == (0, 1, True)
    assert ring["result"].tolist() == ["ncclSuccess"] * 9
    assert set(ring["rank"]) == {1} and set(ring["pid"]) == {job.processes[1].pid}
    assert ring["nranks"].dropna().unique().tolist() == [2] and ring["comm_rank"].dropna().unique().tolist() == [1]
    assert (ring["duration_s"] >= 0).all() and not ring["in_flight"].any() and ring["fired"].isna().all()
    assert job.ring(0)["comm"].dropna().unique().tolist() == ring["comm"].dropna().unique().tolist()


@pytest.mark.parametrize("how", ["running", "stopped", "holding the interpreter's lock"])
def test_a_hung_rank_is_read_from_outside(start, how):
    steps = dict(STUCK)
    if how == "holding the interpreter's lock":
        steps = {
            0: [["init"], ["all_reduce"], ["hold_gil", "held"]],
            1: [["init"], ["all_reduce"], ["wait", "go"], ["all_reduce", 1]],
        }
    job = start(steps)
    victim = job.processes[0]
    job.eventually(job.hangs(0, 2), "rank 0 hangs in a collective")
    if how == "stopped":
        victim.send_signal(signal.SIGSTOP)
        job.eventually(lambda: state(victim.pid) == "T", "rank 0 is stopped")
    ring = job.ring(0)
    hanging = ring[ring["in_flight"]]
    assert hanging[["call", "seq"]].values.tolist() == [["ncclAllReduce", 2]]
    assert hanging["result"].isna().all() and hanging["duration_s"].isna().all()
    assert job.ring(1)["seq"].max() == 1
    victim.send_signal(signal.SIGCONT)
    (job.shared / "go").touch()
    job.finish()
    assert not job.ring(0)["in_flight"].any()


def test_a_killed_rank_leaves_its_last_call_in_the_ring(start):
    job = start(STUCK)
    job.eventually(job.hangs(0, 2), "rank 0 hangs in a collective")
    job.processes[0].kill()
    job.processes[0].wait(30)
    assert job.ring(0)[job.ring(0)["in_flight"]]["count"].tolist() == [7]


def test_a_hanging_call_outlives_any_number_of_later_ones(start):
    """The ring wraps around several times, as when another thread of a hung rank goes on calling."""
    steps = {
        0: [["init"], ["all_reduce_in_a_thread", 9], ["wait", "hanging"], ["empty_groups", 20000], ["touch", "done"]],
        1: [["init"], ["wait", "go"], ["all_reduce", 9]],
    }
    job = start(steps)
    job.eventually(job.hangs(0), "rank 0 hangs")
    (job.shared / "hanging").touch()
    job.eventually((job.shared / "done").exists, "rank 0's other thread has made its calls")
    ring = job.ring(0)
    assert ring[ring["in_flight"]][["call", "count"]].values.tolist() == [["ncclAllReduce", 9]]
    assert ring["call"].value_counts()["ncclGroupEnd"] > 4000 and ring["call"].iloc[0] == "ncclAllReduce"
    one = read_nccl_header(next((job.folder / "rank0").glob("*.ring")))
    assert one.called["ncclGroupEnd"] == 20000 and one.lost == 0
    (job.shared / "go").touch()
    job.finish()
    assert not job.ring(0)["in_flight"].any()


def test_what_is_read_while_calls_go_on_is_never_a_mixture(start):
    job = start([["init"], ["hammer", "go"]], world_size=1)
    job.eventually(lambda: len(job.ring(0)) > 8000, "the ring is full")
    words = ["sum", "prod", "max", "min"]
    for _ in range(15):
        ring = job.ring(0)
        calls = ring[ring["call"] == "ncclAllReduce"]
        assert len(calls) > 4000
        assert (calls["count"] == calls["seq"] % 7 + 1).all()
        assert (calls["redop"] == calls["seq"].map(lambda seq: words[seq % 4])).all()
        assert calls["seq"].is_monotonic_increasing and calls["seq"].is_unique
    (job.shared / "go").touch()
    turns = job.finish()[0][1]["values"][0]
    assert job.ring(0)["seq"].max() == turns


def test_polls_are_counted_and_recorded_only_where_they_report_something_new(start):
    job = start([["init"], ["async_error", 50]], "nccl:async_error,rank=0,nth=40")
    job.finish()
    called = {rank: read_nccl_header(next((job.folder / f"rank{rank}").glob("*.ring"))).called for rank in (0, 1)}
    assert called[0]["ncclCommGetAsyncError"] == called[1]["ncclCommGetAsyncError"] == 50
    assert (job.ring(1)["call"] == "ncclCommGetAsyncError").sum() == 0
    assert 1 <= (job.ring(0)["call"] == "ncclCommGetAsyncError").sum() <= 11


def test_header_counts_what_matched_and_what_fired(start):
    fault = "nccl:delay,rank=1,call=ncclAllReduce,every=2,seconds=0.001"
    job = start([["init"], *[["all_reduce", 1]] * 5], fault)
    job.finish()
    one = read_nccl_header(next((job.folder / "rank1").glob("*.ring")))
    (label,) = one.matched
    assert label.startswith("nccl:delay,rank=1") and one.matched[label] == 5 and one.fired[label] == 2
    assert one.library.endswith("libnccl.so.2") and one.nccl_version == 22809
    assert one.exited and not one.plan_refused and not one.forked


def test_the_child_of_a_fork_has_a_ring_of_its_own(start):
    job = start([["init"], ["fork"], ["all_reduce"]])
    told = job.finish()
    child = int(told[0][1]["values"][0])
    assert read_nccl_header(job.folder / "rank0" / f"nccl-{child}.ring").forked
    ring = job.ring(0)
    assert ring[ring["pid"] == child]["call"].tolist() == ["ncclGetUniqueId"]
    assert ring[ring["pid"] == job.processes[0].pid]["call"].tolist() == [
        "ncclGetUniqueId",
        "ncclCommInitRank",
        "ncclAllReduce",
    ]


GOOD = "fault action=fail call=ncclAllReduce result=2"


@pytest.mark.parametrize(
    "plan",
    [
        "",
        "some other file\n",
        f"dtprobe-nccl-plan 2\n{GOOD}\n",
        "dtprobe-nccl-plan 1\nnonsense\n",
        "dtprobe-nccl-plan 1\nfault\n",
        f"dtprobe-nccl-plan 1\n{GOOD} surprise=1\n",
        f"dtprobe-nccl-plan 1\n{GOOD} nth=\n",
        f"dtprobe-nccl-plan 1\n{GOOD} nth=-1\n",
        f"dtprobe-nccl-plan 1\n{GOOD} nth=99999999999999999999999\n",
        f"dtprobe-nccl-plan 1\n{GOOD} rank=1++2\n",
        f"dtprobe-nccl-plan 1\n{GOOD} comm=12\n",
        "dtprobe-nccl-plan 1\nfault action=explode call=ncclAllReduce\n",
        "dtprobe-nccl-plan 1\nfault action=fail call=ncclNothing result=2\n",
        "dtprobe-nccl-plan 1\nfault action=fail call=ncclAllReduce\n",
        "dtprobe-nccl-plan 1\nfault action=block call=ncclAllReduce\n",
        "dtprobe-nccl-plan 1\n" + f"{GOOD}\n" * 65,
        f"dtprobe-nccl-plan 1\n{GOOD} nth={'1+' * 20000}1\n",
        f"dtprobe-nccl-plan 1\n{GOOD} label={'x' * 200000}\n",
        f"dtprobe-nccl-plan 1\n{GOOD}\n\0{GOOD}\n",
    ],
)
def test_a_bad_plan_is_refused_whole_and_the_job_runs_as_without_it(start, plan):
    job = start([["init"], ["all_reduce"]], plan=plan)
    told = job.finish()
    assert told[0][1] == {"step": "all_reduce", "result": 0, "values": [3.0] * 4}
    assert all("the plan is refused" in line["text"] for line in job.log("problem")) and job.log("problem")
    assert read_nccl_header(next((job.folder / "rank0").glob("*.ring"))).plan_refused


@pytest.mark.parametrize("kind", ["missing", "folder", "fifo"])
def test_a_plan_that_is_no_file_is_said_and_does_not_disturb(start, tmp_path, kind):
    place = tmp_path / "odd"
    if kind == "folder":
        place.mkdir()
    elif kind == "fifo":
        os.mkfifo(place)
    job = start([["init"], ["all_reduce"]], environ={"DTPROBE_NCCL_PLAN": str(place)})
    assert job.finish()[0][1]["values"] == [3.0] * 4
    assert len(job.log("problem")) == 2


def test_a_longest_label_is_cut_and_the_fault_works(start):
    plan = f"dtprobe-nccl-plan 1\nfault action=fail call=ncclAllReduce result=2 label={'x' * 3000}\n"
    job = start([["init"], ["all_reduce"]], plan=plan)
    assert job.finish()[0][1]["result"] == 2
    assert job.ring(0)["fired"].dropna().str.len().tolist() == [127]


@pytest.mark.parametrize("place", ["/proc/nowhere", "x" * 5000, ""], ids=["cannot be made", "too long", "empty"])
def test_no_place_for_the_ring_does_not_disturb(start, place):
    job = start([["init"], ["all_reduce"]], environ={"DTPROBE_NCCL_FOLDER": place})
    assert job.finish()[0][1]["values"] == [3.0] * 4


def test_without_any_variable_the_shim_only_passes_on(start):
    job = start([["init"], ["all_reduce"]], environ={"DTPROBE_NCCL_FOLDER": "", "DTPROBE_NCCL_PLAN": ""})
    assert job.finish()[1][1]["values"] == [3.0] * 4
    assert list(job.folder.iterdir()) == []
