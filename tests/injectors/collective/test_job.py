"""Faults of collectives in whole jobs: what C++ issues, targets, chance and its replay, reasons, and what is left."""

from __future__ import annotations

import json
import signal
import sys

import pytest

pytestmark = pytest.mark.needs("gloo")

MODEL = """
from torch.nn.parallel import DistributedDataParallel
def gradients(name):
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(3, 1, bias=False), process_group=group(name))
    model(torch.ones(1, 3) * (1 + rank)).sum().backward()
    return model.module.weight.grad.flatten().tolist()
"""


def test_the_all_reduces_of_ddp_are_seen(job, facts):
    """The reducer issues them from C++: corrupted, skipped, raised in backward."""
    code = (
        MODEL
        + "for name in ('right', 'corrupt', 'skip', 'raise'):\n    try:\n        facts[name] = gradients(name)\n    except Exception as error:\n        facts[name] = str(error)\n"
    )
    texts = [
        "collective:corrupt,rank=1,group=corrupt,op=all_reduce,element=2,bit=31",
        "collective:skip,group=skip,op=all_reduce",
        "collective:raise,group=raise,op=all_reduce",
    ]
    first, second = facts(texts, code)
    assert first["right"] == second["right"] == [1.5, 1.5, 1.5]
    assert (first["corrupt"], second["corrupt"]) == ([1.5, 1.5, 1.5], [1.5, 1.5, -1.5])
    assert (first["skip"], second["skip"]) == ([0.5] * 3, [1.0] * 3), "each rank keeps its own, divided by the world size"
    assert "injected: " + texts[2] in first["raise"] and "injected: " in second["raise"]
    assert job.where(0) == [(1, 1)]


def test_functional_and_asynchronous_collectives_are_seen(job, facts):
    code = """
import torch.distributed._functional_collectives as functional
facts["functional"] = [(functional.all_reduce(torch.ones(2), "sum", group("functional")) + 0).tolist()]
own = group("async")
handles = [(tensor := torch.ones(2), dist.all_reduce(tensor, group=own, async_op=True)) for _ in range(3)]
facts["limited"] = [handle.wait(limit(50)) for _, handle in handles]
facts["async"] = [tensor.tolist() for tensor, _ in handles]
facts["future"] = []
for _ in range(2):
    tensor = torch.ones(2)
    future = dist.all_reduce(tensor, group=group("future"), async_op=True).get_future()
    facts["future"].append([one.tolist() for one in future.wait()])
"""
    texts = [f"collective:nan,rank=1,group={name},nth=1" for name in ("functional", "async", "future")]
    first, second = facts(texts, code)
    assert first["functional"] == [[2.0, 2.0]] and str(second["functional"]) == "[[nan, 2.0]]"
    assert first["async"] == [[2.0, 2.0]] * 3 and str(second["async"]) == "[[nan, 2.0], [2.0, 2.0], [2.0, 2.0]]"
    assert first["limited"] == second["limited"] == [True] * 3
    assert first["future"] == [[[2.0, 2.0]]] * 2 and str(second["future"]) == "[[[nan, 2.0]], [[2.0, 2.0]]]"


def test_calls_are_counted_by_rank_op_and_group(job, facts):
    code = """
a, b = group("a"), group("b")
for step in range(12):
    dist.all_reduce(torch.ones(1), group=a)
    dist.broadcast(torch.ones(1), 0, group=a)
    dist.all_reduce(torch.ones(1), group=b)
    dist.all_reduce(torch.ones(1))
say(json.dumps(facts))
sys.exit()
"""
    texts = [
        "collective:delay,seconds=0.001,rank=1,op=all_reduce,group=a,nth=2+7",
        "collective:delay,seconds=0.001,rank=0,op=all_reduce,every=5",
        "collective:delay,seconds=0.001,rank=0+1,op=broadcast,every=4,times=2",
        "collective:delay,seconds=0.001,rank=1,nth=48",
        "collective:delay,seconds=0.001,rank=0,group=default,op=all_reduce",
        "collective:delay,seconds=0.001,rank=0,op=all_reduce,after_s=1000",
    ]
    facts(texts, code)
    assert job.where(0) == [(1, 2), (1, 7)]
    assert job.where(1) == [(0, nth) for nth in range(5, 37, 5)]
    assert sorted(job.where(2)) == [(0, 4), (0, 8), (1, 4), (1, 8)]
    assert job.where(3) == [(1, 48)] and job.fired(3)[0].call == "all_reduce"
    assert job.where(4) == [(0, nth) for nth in range(1, 13)]
    assert job.where(5) == [] and "36 all_reduce calls came, which after_s=1000 did not meet" in job.problems(5)


def test_only_ranks_and_operations_that_are_meant_have_anything_in_the_way(job, facts):
    code = """
has = torch._C._dispatch_has_kernel_for_dispatch_key
facts["in the way"] = [name for name in ("allreduce_", "broadcast_", "barrier") if has(f"c10d::{name}", "BackendSelect")]
"""
    first, second = facts("collective:skip,rank=1,op=all_reduce,nth=5", code)
    assert (first["in the way"], second["in the way"]) == ([], ["allreduce_"])


def test_under_our_own_launcher_too(job):
    code = "import torch, torch.distributed as dist\ndist.init_process_group('gloo')\nx = torch.ones(1)\ndist.all_reduce(x)\nsay(x.item())\n"
    job.run_local("collective:corrupt,rank=1,op=all_reduce,bit=31", code)
    assert (job.said(0), job.said(1)) == (["2.0"], ["-2.0"])
    assert job.where() == [(1, 1)]


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("pass", "rank 1: Python ran, but torch was never imported"),
        ("import torch", "rank 1: torch was imported, but no all_reduce came"),
    ],
)
def test_why_it_never_fired_is_said(job, code, words):
    job.run("collective:skip,rank=1,op=all_reduce,nth=5", job.command(code))
    assert job.where() == [] and job.problems() == words


def test_a_rank_that_never_came_is_named(job):
    job.run("collective:skip,rank=5,op=all_reduce", job.command("pass"))
    assert "rank 5 never started Python with the hook; ranks 0, 1 did" in job.problems()


def test_a_command_without_python_is_said_never_to_have_met_the_fault(job):
    process = job.cli("collective:skip,rank=1,op=all_reduce,nth=5", "--", "sleep", "0.1")
    out, _ = process.communicate(timeout=90)
    assert process.returncode == 1
    result = json.loads(out)
    assert "never fired: collective:skip,rank=1,op=all_reduce,nth=5" in result["because"]
    assert "never started Python with the hook" in result["faults"][0]["problems"][0]


LONG = """
os.environ["GLOO_SOCKET_IFNAME"] = "lo"
import torch, torch.distributed as dist
dist.init_process_group("gloo", init_method=f"file://{shared}/store-{os.environ['DTPROBE_RUN_ID']}", rank=rank, world_size=2)
for step in range(STEPS):
    dist.all_reduce(torch.ones(1))
    say(step)
"""


def test_what_a_rank_said_before_it_died_is_kept(job):
    code = "STEPS = 4\n" + LONG.replace("say(step)", "say(step)\n    if rank == 1 and step == 1: os.kill(os.getpid(), 9)")
    job.run("collective:delay,rank=1,nth=2,seconds=0.01", job.command(code))
    assert job.exit_of(1) == -signal.SIGKILL and job.where() == [(1, 2)]


def test_a_rank_that_is_started_anew_counts_anew_but_is_not_hit_twice(job):
    again = """
import os, subprocess, sys
for attempt in range(2):
    ranks = [subprocess.Popen(sys.argv[1:], env=os.environ | {"RANK": str(k), "DTPROBE_RUN_ID": str(attempt)}) for k in (0, 1)]
    codes = [rank.wait() for rank in ranks]
sys.exit(any(codes))
"""
    (job.shared / "again.py").write_text(again)
    program = job.command("STEPS = 5\n" + LONG)[-2:]
    record = job.run("collective:raise,rank=1,op=all_reduce,nth=3", [sys.executable, str(job.shared / "again.py"), *program])
    assert record.exits[0].exit_code == 0, "the second attempt came through"
    assert job.where() == [(1, 3)]


def test_nothing_is_left_when_the_harness_is_killed_while_a_rank_is_late(job, killed):
    def late():
        return [file for file in job.shared.glob("runs/**/rank1/injected.jsonl") if '"fired"' in file.read_text()]

    killed(["collective:delay,rank=1,op=all_reduce,nth=2,seconds=600", "--", *job.command("STEPS = 5\n" + LONG)], late)


def replays(job, many):
    def fired(*words):
        for old in [*job.shared.glob("store-*"), *job.shared.glob("said-*")]:
            old.unlink()
        process = job.cli(*words, "--", *job.command("STEPS = 30\n" + LONG))
        out, err = process.communicate(timeout=120)
        assert process.returncode == 0, err
        result = json.loads(out)
        return result["run"], sorted((one["rank"], one["nth"]) for fault in result["faults"] for one in fault["fired"])

    run, first = fired("collective:delay,op=all_reduce,probability=0.3,seconds=0.001", "--seed", "7")
    assert {rank for rank, _ in first} == {0, 1} and 6 <= len(first) <= 40
    by_rank = [[nth for rank, nth in first if rank == one] for one in (0, 1)]
    assert by_rank[0] != by_rank[1], "each rank has its own chance"
    path = next((job.shared / "runs" / "inject").glob(f"*{run.rpartition('-')[2]}"))
    for turn in range(many):
        assert fired("--replay", str(path), "--seed", str(100 + turn))[1] == first


@pytest.mark.nightly
def test_a_replay_fires_at_the_very_calls(job):
    replays(job, 2)


@pytest.mark.nightly
@pytest.mark.timeout(1500)
def test_20_of_20_replays_fire_at_the_very_calls(job):
    replays(job, 20)
