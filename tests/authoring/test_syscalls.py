"""System calls joined with tries, with collectives and with the children that a rank forked, from strace's own text."""

from __future__ import annotations

import json

import pandas as pd
import pytest

from dtprobe.authoring import syscalls
from dtprobe.evidence import Evidence
from dtprobe.readers.events import read_events
from dtprobe.readers.flight_recorder import SCHEMA as COLLECTIVES
from dtprobe.readers.strace import read_strace

S = 1_000_000_000
THEN = 1_700_000_000 * S
TRACE = """\
100 1700000010.000000 openat(AT_FDCWD, "/early", O_RDONLY) = 3 <0.000010>
100 1700000011.000000 openat(AT_FDCWD, "/in", O_RDONLY) = -1 EMFILE (Too many open files) <0.000010>
100 1700000011.100000 clone(child_stack=NULL, flags=CLONE_CHILD_CLEARTID|SIGCHLD) = 200 <0.000100>
100 1700000011.200000 clone3({flags=CLONE_VM|CLONE_THREAD, stack=0x7f}, 88) = 101 <0.000100>
200 1700000011.300000 clone3({flags=CLONE_VM|CLONE_THREAD, stack=0x7f}, 88) = 201 <0.000100>
200 1700000011.400000 futex(0x1, FUTEX_WAKE, 1) = 0 <0.000010>
201 1700000011.450000 futex(0x3, FUTEX_WAIT, 0, NULL) = 0 <0.000010>
200 1700000011.500000 futex(0x2, FUTEX_WAIT, 0, NULL <unfinished ...>
100 1700000014.000000 openat(AT_FDCWD, "/late", O_RDONLY) = 4 <0.000010>
200 1700000015.000000 +++ killed by SIGKILL +++
"""


@pytest.fixture
def evidence(tmp_path):
    folder = tmp_path / "rank1"
    folder.mkdir()
    (folder / "strace.txt").write_text(TRACE)
    base = {"rank": 1, "pid": 100, "tid": 100, "what": "try", "try": 0}
    lines = [
        {"t_ns": THEN + 10 * S + S // 2, "kind": "begun", **base},
        {"t_ns": THEN + 13 * S, "kind": "attempt", **base, "error": ""},
    ]
    lines += [{"t_ns": THEN + 10 * S + S // 2, "kind": "begun", **base, "what": "hung", "try": 1}]
    (folder / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    made = COLLECTIVES.frame(
        {"t_ns": [THEN + 10 * S, THEN + 12 * S], "rank": 1, "op": ["barrier", "all_reduce"], "seq": [1, 2]}
    )
    frames = {
        "syscalls": read_strace(folder / "strace.txt", 1),
        "events": read_events(folder / "events.jsonl"),
        "collectives": made,
    }
    return Evidence(
        folder=tmp_path,
        seed=0,
        world_size=2,
        outcomes=pd.DataFrame(),
        frames={
            name: frame.assign(arm="fault", repeat=0).astype({"arm": "string", "repeat": "Int64"})
            for name, frame in frames.items()
        },
        unavailable={},
        suspicions=pd.DataFrame(),
    )


def test_a_call_belongs_to_the_try_in_which_it_began_and_one_without_an_end_goes_on_to_the_last(evidence):
    assert list(syscalls.during(evidence, "try", "openat")["path"]) == ["/in"]
    assert list(syscalls.during(evidence, "hung", "openat")["path"]) == ["/in", "/late"]
    refused = syscalls.during(evidence, "try", "openat").iloc[0]
    assert (refused["errno"], refused["trier"]) == ("EMFILE", 100)


def test_a_call_comes_after_the_collective_that_its_rank_had_called_last(evidence):
    calls = syscalls.after_collectives(evidence, evidence.frame("syscalls").query("name == 'openat'"))
    assert list(calls["op"]) == ["barrier", "barrier", "all_reduce"]
    assert calls["since_s"].tolist() == [0.0, 1.0, 2.0]


def test_a_rank_without_collectives_has_none_before_its_calls(evidence):
    bare = Evidence(**{**evidence.__dict__, "frames": {"syscalls": evidence.frame("syscalls")}})
    calls = syscalls.after_collectives(bare, bare.frame("syscalls").query("name == 'openat'"))
    assert len(calls) == 3 and calls["op"].isna().all()


def test_a_child_is_known_by_its_threads_and_by_the_futex_that_it_never_left(evidence):
    (child,) = syscalls.forks(evidence).itertuples()
    assert (child.parent, child.child, child.threads, child.waits) == (100, 200, 1, True)


def test_a_run_without_strace_has_no_traced_rank_no_call_and_no_child(evidence):
    bare = Evidence(**{**evidence.__dict__, "frames": {"events": evidence.frame("events")}})
    assert syscalls.traced(bare).empty and syscalls.during(bare, "try", "openat").empty and syscalls.forks(bare).empty
    assert len(syscalls.windows(bare)) == 2
