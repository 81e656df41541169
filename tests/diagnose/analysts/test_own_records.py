"""Workers' own records beside their flight recorders: order in time, units of work, limits, exchanged groups."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

import pytest

from dtprobe.diagnose.analysts import blocked, conclude, exchanges, limits, moments, own_checks, own_pace, units
from dtprobe.diagnose.case import Case, Finding
from dtprobe.diagnose.decide import decide

BASE_NS = 1_790_000_000_000_000_000
RECEIVED = "[gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 2000ms for recv operation to complete"
SENT = "[gloo/transport/tcp/unbound_buffer.cc:129] Timed out waiting 2000ms for send operation to complete"
CLOSED = "[gloo/transport/tcp/pair.cc:553] Connection closed by peer [198.51.100.7]:9311"
MakeCase = Callable[..., Case]


def ns(at_s: float) -> int:
    return BASE_NS + round(at_s * 1e9)


def record(at_s: float, kind: str, rank: int, **fields: object) -> str:
    return json.dumps({"t_ns": ns(at_s), "kind": kind, "rank": rank, "pid": 500 + rank, "tid": 1, **fields})


def tried(rank: int, begun_s: float, took_s: float, text: str = "", what: str = "step", **fields: object) -> list[str]:
    number = round(begun_s * 1000)
    error = {"error": "RuntimeError" if text else "", "text": text}
    return [
        record(begun_s, "begun", rank, what=what, **{"try": number}),
        record(begun_s + took_s, "attempt", rank, what=what, took_s=took_s, **error, **fields, **{"try": number}),
    ]


def call(
    at_s: float,
    seq: int,
    op: str = "all_reduce",
    group: tuple[str, str] = ("0", "default_pg"),
    *,
    done: bool = True,
    timeout_ms: int = 2000,
    line: int | None = None,
    size: int = 8,
) -> dict[str, object]:
    """An entry as gloo's recorder writes it: always scheduled, only `retired` tells that it is over."""
    frames = [] if line is None else [{"name": "train", "filename": "/job/train.py", "line": line}]
    return {
        "collective_seq_id": seq,
        "op_id": seq,
        "p2p_seq_id": 0,
        "is_p2p": False,
        "input_sizes": [[size]],
        "output_sizes": [[size]],
        "input_dtypes": ["Float"],
        "output_dtypes": ["Float"],
        "pg_id": 0,
        "process_group": list(group),
        "profiling_name": f"gloo:{op}",
        "record_id": seq,
        "retired": done,
        "state": "scheduled",
        "time_created_ns": ns(at_s),
        "time_discovered_started_ns": 0,
        "time_discovered_completed_ns": 0,
        "timeout_ms": timeout_ms,
        "frames": frames,
    }


def dump(*entries: dict[str, object]) -> list[str]:
    return [json.dumps({"version": "2.10", "entries": list(entries), "pg_config": {}, "pg_status": {}})]


def only(found: Sequence[Finding], mode: str) -> Finding:
    (one,) = [each for each in found if each.mode == mode]
    return one


def answer(one: Case) -> str:
    found, failed = conclude(one)
    assert not failed
    return decide(one, found).failure_mode


SMALL, LARGE = "small", "large"


@pytest.mark.parametrize("names", [((SMALL, LARGE), (LARGE, SMALL)), ((SMALL, LARGE), (SMALL, LARGE))])
def test_groups_that_ranks_name_the_other_way_round(case: MakeCase, names: tuple[tuple[str, str], tuple[str, str]]) -> None:
    files = {
        f"dump_{rank}.json": dump(
            call(0.1, 1, "barrier"), call(1, 1, group=("1", own[0])), call(1.1, 1, group=("2", own[1])), call(2, 2, "barrier")
        )
        for rank, own in enumerate(names)
    }
    made = case(**files)
    if names[0] == names[1]:
        assert not list(exchanges.analyse(made))
        return
    swap = only(list(exchanges.analyse(made)), "group-order-swap")
    assert (swap.first, swap.suspects) == (None, (0, 1))
    assert answer(made) == "group-order-swap"


def test_of_three_ranks_the_one_that_holds_the_groups_otherwise(case: MakeCase) -> None:
    lines = {0: (30, 40), 1: (30, 40), 2: (40, 30)}
    files = {
        f"dump_{rank}.json": dump(
            call(0.1, 1, "barrier"),
            *(call(1 + at, 1 + at, group=("1", "undefined"), line=own[0]) for at in range(3)),
            *(call(1.5 + at, 1 + at, group=("2", "undefined"), line=own[1]) for at in range(3)),
        )
        for rank, own in lines.items()
    }
    swap = only(list(exchanges.analyse(case(**files))), "group-order-swap")
    assert (swap.first, swap.suspects) == (2, (2,))


@pytest.mark.parametrize("extra", [True, False])
def test_a_rank_whose_lines_are_shifted_by_a_call_of_its_own(case: MakeCase, extra: bool) -> None:
    usual = [10, 11, 12] * 5
    odd = [*usual[:6], 77, *usual[6:-1]] if extra else usual
    files = {
        f"dump_{rank}.json": dump(*(call(at, at + 1, line=line) for at, line in enumerate(odd if rank == 1 else usual)))
        for rank in range(3)
    }
    found = list(exchanges.analyse(case(**files)))
    assert [one.mode for one in found] == (["data-dependent-branch-desync"] if extra else [])
    assert all(one.first == 1 for one in found)


def test_root_and_others_may_call_from_lines_of_their_own(case: MakeCase) -> None:
    """`if rank == 0: ... else: ...` around one collective is no desync."""
    files = {
        f"dump_{rank}.json": dump(*(call(at, at + 1, line=(20 + (rank == 0)) if at % 3 == 2 else 10) for at in range(18)))
        for rank in range(3)
    }
    assert not list(exchanges.analyse(case(**files)))


def _steps(rank: int, more_at: int | None, count: int = 6) -> tuple[list[str], list[str]]:
    events: list[str] = []
    calls: list[dict[str, object]] = []
    for step in range(count):
        events += tried(rank, step + 0.1, 0.5)
        for number in range(2 if step == more_at else 1):
            calls.append(call(step + 0.2 + number / 10, len(calls) + 1))
    return events, dump(*calls)


@pytest.mark.parametrize("more_at", [4, None])
def test_a_rank_that_calls_once_more_in_one_step(case: MakeCase, more_at: int | None) -> None:
    zero, one = _steps(0, None), _steps(1, more_at)
    made = case(**{"rank0.jsonl": zero[0], "rank1.jsonl": one[0], "dump_0.json": zero[1], "dump_1.json": one[1]})
    found = list(units.analyse(made))
    assert [each.mode for each in found] == (["data-dependent-branch-desync"] if more_at else [])
    assert all(each.first == 1 for each in found)


@pytest.mark.parametrize(("op", "mode"), [("broadcast", "broadcast-root-mismatch"), (None, "send-send-deadlock")])
def test_two_that_time_out_sending(case: MakeCase, op: str | None, mode: str) -> None:
    """In a broadcast that all have called each took itself for the root; outside of collectives each sent first."""
    files = {}
    for rank in range(3):
        files[f"rank{rank}.jsonl"] = tried(rank, 1.0, 2.1, SENT) if rank < 2 else tried(rank, 1.0, 0.01)
        files[f"dump_{rank}.json"] = dump(call(0.1, 1, "barrier"), *([call(1.005, 2, op)] if op else []))
    made = case(**files)
    assert answer(made) == mode


def test_only_the_first_failure_counts_for_roots(case: MakeCase) -> None:
    files = {}
    for rank in range(3):
        files[f"rank{rank}.jsonl"] = tried(rank, 1.0, 2.0, RECEIVED) + tried(rank, 5.0, 2.1, SENT if rank < 2 else "")
        files[f"dump_{rank}.json"] = dump(call(1.1, 1, "all_reduce"), call(5.005, 2, "broadcast"))
    assert not [one for one in units.analyse(case(**files)) if one.mode == "broadcast-root-mismatch"]


def test_the_earliest_dumps_show_the_deadlock_that_later_ones_hide(case: MakeCase) -> None:
    """CPU backends count a failed call as done."""
    crossed = {0: ("1", "data"), 1: ("2", "tensor")}
    files = {}
    for rank, group in crossed.items():
        before = [call(0.1, 1, "barrier"), call(0.2, 1, group=("1", "data")), call(0.3, 1, group=("2", "tensor"))]
        files[f"early_{rank}.json"] = dump(*before, call(1.0, 2, group=group, done=False))
        files[f"late_{rank}.json"] = dump(*before, call(1.0, 2, group=group), call(9.0, 2, "barrier"))
    found = list(moments.analyse(case(**files)))
    assert [one.mode for one in found] == ["cross-communicator-deadlock"]
    late_only = {name: lines for name, lines in files.items() if name.startswith("late")}
    assert not list(moments.analyse(case(**late_only)))


def test_one_that_left_the_loop_for_a_barrier_crosses_no_groups(case: MakeCase) -> None:
    files = {}
    for rank in range(2):
        before = [call(0.1, 1, "barrier"), call(0.2, 1, group=("1", "data"))]
        stuck = call(1.0, 2, "barrier", done=False) if rank else call(1.0, 2, group=("1", "data"), done=False)
        files[f"early_{rank}.json"] = dump(*before, stuck)
        files[f"late_{rank}.json"] = dump(*before, stuck | {"retired": True})
    assert not [one for one in moments.analyse(case(**files)) if one.mode == "cross-communicator-deadlock"]


def test_an_exception_that_ran_into_the_barrier_of_the_cleanup(case: MakeCase) -> None:
    files = {
        "rank0.jsonl": [*tried(0, 0.1, 5.1, RECEIVED, what="job"), record(5.1, "raised", 0, type="RuntimeError")],
        "rank1.jsonl": [*tried(1, 0.1, 5.0, RECEIVED, what="job"), record(0.5, "raised", 1, type="ValueError")],
        "dump_0.json": dump(call(0.2, 1), call(0.5, 2, done=False)),
        "dump_1.json": dump(call(0.2, 1), call(0.501, 2, "barrier", done=False)),
    }
    made = case(**files)
    assert only(list(blocked.analyse(made)), "cleanup-deadlock-after-exception").first == 1
    assert answer(made) == "cleanup-deadlock-after-exception"
    files["dump_1.json"] = dump(call(0.2, 1))
    assert not list(blocked.analyse(case(**files)))


@pytest.mark.parametrize(("served_s", "modes"), [(7.0, ["uninterruptible-wait"]), (2.1, [])])
def test_a_signal_that_is_served_when_the_time_out_runs_out(case: MakeCase, served_s: float, modes: list[str]) -> None:
    files = {
        "rank0.jsonl": [record(2.0, "pressed", 0), record(served_s, "served", 0)],
        "rank1.jsonl": tried(1, 9.0, 0.1, CLOSED),
        "dump_0.json": dump(call(0.2, 1, timeout_ms=6000), call(1.0, 2, done=False, timeout_ms=6000)),
        "dump_1.json": dump(call(0.2, 1)),
    }
    assert [one.mode for one in blocked.analyse(case(**files))] == modes


@pytest.mark.parametrize(("took_s", "modes"), [(5.0, ["uninterruptible-wait"]), (3.0, [])])
def test_a_wait_without_an_error_that_lasts_until_an_earlier_call_gives_up(
    case: MakeCase, took_s: float, modes: list[str]
) -> None:
    files = {
        "rank0.jsonl": tried(0, 2.0, took_s, what="destroy"),
        "dump_0.json": dump(call(0.2, 1, timeout_ms=6000), call(1.0, 2, done=False, timeout_ms=6000)),
        "dump_1.json": dump(call(0.2, 1)),
    }
    assert [one.mode for one in blocked.analyse(case(**files))] == modes


@pytest.mark.parametrize(
    ("took_s", "group_ms", "found"), [(9.0, 1_800_000, True), (3.0, 1_800_000, False), (9.0, 60_000, False)]
)
def test_a_wait_beyond_the_job_s_limit_in_a_group_with_the_default(
    case: MakeCase, took_s: float, group_ms: int, found: bool
) -> None:
    entries = (call(0.1, 1, "barrier", timeout_ms=5000), call(1.0, 1, group=("1", "undefined"), timeout_ms=group_ms))
    files = {f"dump_{rank}.json": dump(*entries) for rank in range(2)}
    files |= {f"rank{rank}.jsonl": tried(rank, 0.9, took_s) for rank in range(2)}
    modes = [one.mode for one in limits.analyse(case(**files))]
    assert modes == (["timeout-not-inherited"] if found else [])


@pytest.mark.parametrize("steady", [True, False])
def test_one_whose_own_work_takes_longer_step_after_step(case: MakeCase, steady: bool) -> None:
    """Batches of varying length make now one rank, now another one the slowest."""
    files = {}
    for rank in range(2):
        slow = [
            0.1 if (rank == 1 and (steady or at % 2)) or (not steady and rank == 0 and at % 2 == 0) else 0.03
            for at in range(12)
        ]
        files[f"rank{rank}.jsonl"] = [
            line for at, work in enumerate(slow) for line in tried(rank, at + 0.1, 0.2, work_s=work, wait_s=0.01)
        ]
    found = list(own_pace.analyse(case(**files)))
    assert [(one.mode, one.first) for one in found] == ([("straggler", 1)] if steady else [])


def test_one_that_came_after_its_peers_had_given_up(case: MakeCase) -> None:
    files = {
        "rank0.jsonl": tried(0, 1.0, 4.0, CLOSED),
        "rank1.jsonl": tried(1, 1.0, 2.0, RECEIVED),
        "rank2.jsonl": tried(2, 1.0, 2.0, RECEIVED),
    }
    assert [(one.mode, one.first) for one in own_pace.analyse(case(**files))] == [("straggler", 0)]
    files["rank0.jsonl"] = tried(0, 1.0, 2.1, CLOSED)
    assert not list(own_pace.analyse(case(**files)))


LOST = {"wrong": True, "apart": 0.4, "lost": "head.weight,head.bias"}
UNSEEN = {"blind_s": 3.1}


@pytest.mark.parametrize(
    ("fields", "mode"),
    [
        ({"wrong": 8, "own": True}, "read-before-wait"),
        ({"wrong": 0, "own": True}, None),
        ({"wrong": 8, "own": False}, None),
        (LOST, "gradient-not-reduced"),
        (LOST | {"apart": 0.0}, None),
        ({"winners": 3}, "file-claim-race"),
        ({"winners": 1}, None),
        (UNSEEN, "filestore-stale-read"),
        ({"blind_s": 0.05}, None),
    ],
)
def test_what_the_job_s_own_check_says(case: MakeCase, fields: dict[str, object], mode: str | None) -> None:
    files = {f"rank{rank}.jsonl": tried(rank, 1.0, 0.1, **fields) for rank in range(2)}
    assert [one.mode for one in own_checks.analyse(case(**files))] == ([mode] if mode else [])


def test_tasks_that_are_jobs_of_one_rank_each(case: MakeCase) -> None:
    def seen(*, world: int) -> list[str]:
        return [record(task, "seen", 0, task=task, env_rank=0 if world == 1 else task, env_world=world) for task in range(3)]

    assert [one.mode for one in own_checks.analyse(case(**{"all.jsonl": seen(world=1)}))] == ["nested-launcher"]
    assert not list(own_checks.analyse(case(**{"all.jsonl": seen(world=3)})))


def test_a_receive_without_its_send(case: MakeCase) -> None:
    files = {"rank0.jsonl": tried(0, 1.0, 0.001), "rank1.jsonl": tried(1, 1.0, 2.0, RECEIVED)}
    (found,) = own_checks.analyse(case(**files))
    assert (found.mode, found.first) == ("p2p-unpaired", 0)
    assert "dropped" in found.not_proven
    files["dump_0.json"] = files["dump_1.json"] = dump(call(1.0005, 1))
    assert not list(own_checks.analyse(case(**files)))


def test_a_lock_that_one_process_keeps(case: MakeCase) -> None:
    looks = [
        line
        for at in range(6)
        for line in (
            record(at / 2, "lock", 0, mode="write", holder=501, waiting=False),
            record(at / 2, "lock", 0, mode="read", holder=500, waiting=True),
        )
    ]
    files = {"rank0.jsonl": looks, "rank1.jsonl": [record(0.1, "begun", 1, what="store call", **{"try": 0})]}
    (found,) = own_checks.analyse(case(**files))
    assert (found.mode, found.suspects) == ("filestore-torn-record", (1,))
    files["rank0.jsonl"] = looks[:4]
    assert not list(own_checks.analyse(case(**files)))


def test_starts_of_which_some_meet_addresses_of_others(case: MakeCase) -> None:
    refused = "RuntimeError: Gloo connectFullMesh failed with [gloo/transport/tcp/pair.h:311] Connect timeout [none]"
    good = [record(at, "start", 0, trial=at, error=None, sum=3) for at in range(2)]
    bad = [record(5 + at, "start", 0, trial=at, error=refused, sum=None) for at in range(2)]
    assert [one.mode for one in own_checks.analyse(case(**{"rank0.jsonl": good + bad}))] == ["filestore-stale-file"]
    assert not list(own_checks.analyse(case(**{"rank0.jsonl": bad})))


@pytest.mark.parametrize(("text", "wanted"), [("", "healthy"), (RECEIVED, "collective-skipped")])
def test_a_wait_in_a_dump_of_a_job_at_work_is_over_where_the_rank_says_that_its_work_went_well(
    case: MakeCase, text: str, wanted: str
) -> None:
    files = {
        "dump_0.json": dump(call(1, 1), call(2, 2)),
        "dump_1.json": dump(call(1, 1), call(2, 2), call(3, 3, done=False)),
        "rank0.jsonl": [*tried(0, 0.9, 0.2), *tried(0, 1.9, 0.2)],
        "rank1.jsonl": [*tried(1, 0.9, 0.2), *tried(1, 1.9, 0.2), *tried(1, 2.9, 2.1, text)],
    }
    assert answer(case(**files)) == wanted
