"""The injector's own side: what it checks, writes, hands to ranks and reports; whole runs through `dtprobe inject`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from dtprobe import catalog
from dtprobe.clock import SystemClock
from dtprobe.confine import Confinement
from dtprobe.errors import Unavailable, UsageError
from dtprobe.inject import Site
from dtprobe.inject.job import plan
from dtprobe.inject.spec import parse

pytestmark = pytest.mark.needs("cc")

HERE = Path(__file__).resolve().parent
LIMIT_S = 120
KNOWN = catalog.injectors()[0]


def environ_for(tmp_path, libraries, **more):
    kept = {name: value for name, value in os.environ.items() if name not in ("RANK", "LD_PRELOAD", "SLURM_PROCID")}
    return kept | {
        "XDG_STATE_HOME": str(tmp_path / "state"),
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
        "LD_LIBRARY_PATH": str(libraries.fake.parent),
        "LIBNCCL": str(libraries.fake),
        "SHARED": str(tmp_path),
        **more,
    }


@pytest.fixture
def site(tmp_path, libraries, request):
    box = Confinement.open(
        f"nccl-{os.getpid()}-{abs(hash(request.node.name)) % 10**6}", environ=environ_for(tmp_path, libraries)
    )

    def site(index=0):
        folder = tmp_path / "arm"
        folder.mkdir(exist_ok=True)
        return Site(
            folder=folder,
            scratch=box.scratch,
            box=box,
            world_size=2,
            seed=5,
            index=index,
            clock=SystemClock(),
            processes=lambda: (),
        )

    with box:
        yield site


def test_the_grammar_of_the_design_is_understood():
    text = "nccl:fail,rank=1,call=ncclAllReduce,nth=3,result=ncclRemoteError"
    fault = parse(text, KNOWN, world_size=2)
    assert parse(str(fault), KNOWN) == fault
    assert fault.config.result == "ncclRemoteError" and fault.target.nth == (3,)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("nccl:fail,call=ncclAlReduce", "call=ncclAlReduce is none of"),
        ("nccl:fail,call=ncclAllReduce,result=ncclWrong", "did you mean"),
        ("nccl:drop,call=ncclCommInitRank", "cannot take this fault"),
        ("nccl:root,call=ncclAllReduce", "cannot take this fault"),
        ("nccl:root,call=ncclScatter", "cannot take this fault"),
        ("nccl:op,call=ncclBroadcast", "cannot take this fault"),
        ("nccl:count,call=ncclAllReduce,count=-1", "negative"),
        ("nccl:delay,call=ncclAllReduce,seconds=0", "between 0 and 3600"),
        ("nccl:delay,call=ncclAllReduce", "needs seconds"),
        ("nccl:block,where=sideways", "is unknown"),
        ("nccl:fail,call=ncclAllReduce,comm=default", "neither an index"),
        ("nccl:fail,call=ncclAllReduce,group=dp", "cannot aim by group"),
        ("nccl:fail,call=ncclAllReduce,rank=2", "outside world size 2"),
    ],
)
def test_what_cannot_be_is_one_clear_line(text, words):
    with pytest.raises(UsageError) as told:
        parse(text, KNOWN, world_size=2)
    assert words in str(told.value) and "\n" not in str(told.value)


def test_faults_at_different_calls_do_not_contradict_and_at_the_same_call_do():
    apart = ["nccl:delay,call=ncclAllReduce,seconds=1", "nccl:delay,call=ncclBroadcast,seconds=1"]
    assert len(plan(apart, [sys.executable])) == 2
    with pytest.raises(UsageError, match="contradict"):
        plan([apart[0], "nccl:delay,call=ncclAllReduce,seconds=2"], [sys.executable])


def test_a_replayed_fault_waits_for_its_call_and_no_longer_for_a_time():
    fault = parse("nccl:delay,seconds=1,after_s=2,probability=0.5", KNOWN).at((3, 7), 1)
    assert (fault.target.nth, fault.target.rank, fault.target.after_s) == ((3, 7), (1,), None)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("nccl:fail,rank=0+1,call=init,nth=1", "fault action=fail result=2 call=init rank=0+1 nth=1"),
        (
            "nccl:block,for_s=2,every=3,times=4",
            "fault action=block hold_ns=2000000000 stream=0 call=collective every=3 times=4",
        ),
        ("nccl:root,root=0,comm=1", "fault action=root value=0 call=ncclBroadcast comm_index=1"),
        ("nccl:op,redop=avg,comm=00000000000000ff", "fault action=op value=4 call=ncclAllReduce comm=00000000000000ff"),
    ],
)
def test_a_fault_becomes_a_line_of_the_plan(module, text, line):
    fault = parse(text, KNOWN)
    assert module.plan_line(fault, 1, 0) == f"{line} label={fault}"


def test_the_table_of_calls_is_read_as_the_compiler_reads_it(module):
    calls = module.calls()
    assert calls["ncclBcast"].family == "ncclBroadcast" and calls["ncclBcast"].may == {"drop", "count", "root"}
    assert calls["ncclCommInitRank"].may == frozenset() and calls["ncclSend"].kind == "p2p"
    assert len(calls) == (HERE.parents[2] / "injectors/nccl/calls.h").read_text().count("\nCALL(")


def test_without_a_compiler_it_is_unavailable_with_the_remedy(module, tmp_path):
    told = module.build.shim({"PATH": str(tmp_path)}, folder=tmp_path)
    assert isinstance(told, Unavailable) and told.remedy.startswith("apt-get install")


def test_a_source_that_does_not_compile_is_unavailable_with_the_compiler_s_words(module, tmp_path):
    source = tmp_path / "broken.c"
    source.write_text("int main(void) { return nothing; }\n")
    told = module.build.library("broken.so", (source,), folder=tmp_path)
    assert isinstance(told, Unavailable) and "nothing" in told.reason


def test_a_compiled_library_is_kept_until_its_source_changes(module, tmp_path):
    source = tmp_path / "one.c"
    source.write_text("int one(void) { return 1; }\n")
    first = module.build.library("one.so", (source,), folder=tmp_path)
    stamp = first.stat().st_mtime_ns
    assert module.build.library("one.so", (source,), folder=tmp_path) == first and first.stat().st_mtime_ns == stamp
    source.write_text("int one(void) { return 2; }\n")
    assert module.build.library("one.so", (source,), folder=tmp_path) != first


def test_a_folder_that_preloading_cannot_name_is_refused(module, tmp_path):
    assert "LD_PRELOAD cannot name" in module.build.shim(folder=tmp_path / "a b").reason


def test_where_there_is_no_nccl_the_fault_cannot_reach_its_layer(module, site, monkeypatch):
    monkeypatch.setattr(module, "libraries", lambda environ: [])
    told = module.NcclInjection(parse("nccl:drop", KNOWN), site()).check()
    assert isinstance(told, Unavailable) and "LD_LIBRARY_PATH" in told.remedy


def test_faults_of_one_run_share_one_plan_and_report_apart(module, site, start):
    texts = ("nccl:delay,rank=0,call=ncclAllReduce,nth=1,seconds=0.001", "nccl:op,rank=1,call=ncclAllReduce,redop=prod")
    made = [module.NcclInjection(parse(text, KNOWN), site(index)) for index, text in enumerate(texts)]
    for one in made:
        assert one.check() is None
        one.prepare()
    assert made[0].environ(0) == made[1].environ(1)
    job = start([["init"], ["all_reduce"], ["all_reduce"]], environ=dict(made[0].environ(0)))
    told = job.finish()
    assert [one["values"] for one in told[1][1:]] == [[2.0] * 4] * 2
    fired = [one.stop() for one in made]
    assert [(one.rank, one.call, one.nth) for one in fired[0]] == [(0, "ncclAllReduce", 1)]
    assert fired[0][0].ended_ns - fired[0][0].t_ns >= 1_000_000
    assert [(one.rank, one.nth, one.detail) for one in fired[1]] == [(1, 1, "op 0 -> 1"), (1, 2, "op 0 -> 1")]
    assert not made[0].plan.exists()
    assert all(one.problems() == () for one in made)


def test_what_the_user_preloads_is_kept(module, tmp_path):
    made = module.recording(Path("/shim.so"), tmp_path, {"LD_PRELOAD": "/lib/a.so /lib/b.so:/lib/c.so"})
    assert made["LD_PRELOAD"] == "/shim.so:/lib/a.so:/lib/b.so:/lib/c.so"


def test_a_fault_that_never_took_effect_says_why(module, site, start):
    made = module.NcclInjection(parse("nccl:count,count=100,call=ncclAllReduce", KNOWN), site())
    made.prepare()
    start([["init"], ["all_reduce"]], environ=dict(made.environ(0))).finish()
    assert made.stop() == ()
    assert "rank 1: not applied to ncclAllReduce 1: the count would not become smaller" in made.problems()


def test_a_job_that_never_calls_nccl_is_told_from_one_that_passes_by(module, site, start):
    made = module.NcclInjection(parse("nccl:drop", KNOWN), site())
    made.prepare()
    job = start(
        [["init"], ["all_reduce"], ["touch", "done"], ["wait", "go"]], environ=dict(made.environ(0)) | {"LOAD": "bypass"}
    )
    job.eventually((job.shared / "done").exists, "the calls are made")
    made._pids = [process.pid for process in job.processes]
    assert [text for text in made.problems() if text.endswith("was never called through the shim")]
    (job.shared / "go").touch()
    job.finish()
    assert "no NCCL call came through the shim" in made.problems()


def test_too_many_faults_for_one_plan_are_refused(module, site):
    for index in range(module.MOST_FAULTS):
        module.NcclInjection(parse("nccl:drop", KNOWN), site(index)).prepare()
    with pytest.raises(UsageError, match="more than the shim takes"):
        module.NcclInjection(parse("nccl:drop", KNOWN), site(64)).prepare()


LAUNCH = """if True:
    import json, os, subprocess, sys
    steps = json.loads(sys.argv[2])
    ranks = [
        subprocess.Popen([sys.executable, sys.argv[1], json.dumps(steps)], env=os.environ | {"RANK": str(k), "TEST_RANK": str(k), "WORLD_SIZE": "2"})
        for k in (0, 1)
    ]
    sys.exit(max(rank.wait() for rank in ranks))
"""


def inject(tmp_path, libraries, steps, *words):
    argv = [sys.executable, "-m", "dtprobe", "inject", *words, "--out", str(tmp_path / "runs"), "--json", "--"]
    argv += [sys.executable, "-c", LAUNCH, str(HERE / "rank.py"), json.dumps(steps)]
    return subprocess.Popen(
        argv,
        env=environ_for(tmp_path, libraries, PYTHONPATH=str(HERE.parents[2])),
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def fired_of(process):
    out, err = process.communicate(timeout=LIMIT_S)
    assert out, err
    return [[(one["rank"], one["call"], one["nth"]) for one in fault["fired"]] for fault in json.loads(out)["faults"]]


def test_an_unmodified_command_under_a_fault_and_its_replay(tmp_path, libraries):
    steps = [["init"], *[["all_reduce", 1]] * 20]
    fault = "nccl:delay,call=ncclAllReduce,seconds=0.001,probability=0.3"
    (fired,) = fired_of(inject(tmp_path, libraries, steps, fault))
    assert {rank for rank, _, _ in fired} == {0, 1} and 2 <= len(fired) <= 20
    for file in tmp_path.glob("id-*"):
        file.unlink()
    (run,) = (tmp_path / "runs" / "inject").iterdir()
    again = fired_of(inject(tmp_path, libraries, steps, "--replay", str(run)))
    assert sorted(one for fault in again for one in fault) == sorted(fired)


def test_a_killed_harness_takes_its_blocked_ranks_with_it(tmp_path, libraries):
    steps = [["init"], ["all_reduce"]]
    process = inject(tmp_path, libraries, steps, "nccl:block,rank=1,call=ncclAllReduce")
    ours = str(HERE / "rank.py")

    def ranks():
        found = []
        for one in psutil.process_iter(["cmdline", "environ"]):
            line, environ = one.info["cmdline"] or [], one.info["environ"] or {}
            if ours in line and environ.get("SHARED") == str(tmp_path):
                found.append(one)
        return found

    def until(true):
        deadline = time.monotonic() + LIMIT_S
        while not true():
            assert time.monotonic() < deadline
            time.sleep(0.05)

    until(lambda: any('"fired"' in path.read_text() for path in tmp_path.rglob("nccl-*.jsonl")))
    assert ranks()
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=LIMIT_S)
    until(lambda: not ranks())
