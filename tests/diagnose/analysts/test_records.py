"""What workers record of themselves, and what samples of their processes show."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from dtprobe.diagnose.analysts import attempts, checks, restarts, states
from dtprobe.diagnose.case import Case

BASE_NS = 1_790_000_000_000_000_000
CLOSED = "[gloo/transport/tcp/pair.cc:553] Connection closed by peer [198.51.100.2]:4711"
LATE = "[gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 2000ms for recv operation to complete"
SENT = "[gloo/transport/tcp/unbound_buffer.cc:129] Timed out waiting 2000ms for send operation to complete"


def record(at_s: float, kind: str, rank: int, *, pid: int | None = None, **fields: object) -> str:
    return json.dumps(
        {"t_ns": BASE_NS + int(at_s * 1e9), "kind": kind, "rank": rank, "pid": pid or 800 + rank, "tid": 1, **fields}
    )


def tried(
    rank: int, begun_s: float, took_s: float | None, text: str = "", error: str = "RuntimeError", **fields: object
) -> list[str]:
    """A try; it never ends where `took_s` is None."""
    number, pid = int(begun_s * 100), fields.pop("pid", None)
    lines = [record(begun_s, "begun", rank, pid=pid, what="step", **{"try": number})]
    if took_s is not None:
        outcome = {"error": error if text else "", "text": text}
        lines.append(
            record(
                begun_s + took_s, "attempt", rank, pid=pid, what="step", took_s=took_s, **outcome, **fields, **{"try": number}
            )
        )
    return lines


def samples(rank: int, *, rss_mb: list[int] | None = None, states: str = "S", threads: list[int] | None = None) -> list[str]:
    count = max(len(rss_mb or []), len(states), len(threads or []))
    return [
        json.dumps(
            {
                "t_ns": BASE_NS + at * 500_000_000,
                "pid": 800 + rank,
                "rank": rank,
                "threads": (threads or [9] * count)[at],
                "rss_bytes": (rss_mb or [200] * count)[at] << 20,
                "state": (states * count)[at] if len(states) == 1 else states[at],
                "wchan": "0",
                "fds": 10 + (threads or [0] * count)[at],
            }
        )
        for at in range(count)
    ]


def test_the_exception_that_came_before_closed_connections(case: Callable[..., Case]) -> None:
    files = {
        "rank0.jsonl": tried(0, 1, 0.5, CLOSED),
        "rank1.jsonl": tried(1, 1, 0.1, "bad label 7", error="ValueError"),
        "rank2.jsonl": tried(2, 1, 0.4, CLOSED),
    }
    (found,) = attempts.analyse(case(**files))
    assert (found.mode, found.first) == ("python-exception-one-rank", 1)
    files["rank1.jsonl"] = tried(1, 1, 0.1, CLOSED)
    assert list(attempts.analyse(case(**files))) == []


def test_a_rank_that_left_while_its_peers_connections_closed(case: Callable[..., Case]) -> None:
    files = {"rank0.jsonl": tried(0, 1, 0.5, CLOSED), "rank1.jsonl": tried(1, 1, None), "rank2.jsonl": tried(2, 1, 0.5, CLOSED)}
    files["launch.log"] = [f"failed (exitcode: 1) local_rank: {rank} (pid: {800 + rank}) of binary: python" for rank in (0, 2)]
    (found,) = attempts.analyse(case(**files))
    assert (found.mode, found.first) == ("peer-exited-early", 1)


def test_a_rank_with_fewer_batches(case: Callable[..., Case]) -> None:
    files = {"rank0.jsonl": tried(0, 1, 2.5, LATE, batches=6), "rank1.jsonl": tried(1, 1, 0.1, batches=4)}
    (found,) = attempts.analyse(case(**files))
    assert (found.mode, found.first) == ("uneven-dataloader-desync", 1)
    files["rank1.jsonl"] = tried(1, 1, 0.1, batches=6)
    assert list(attempts.analyse(case(**files))) == []


def test_ranks_that_all_send_first(case: Callable[..., Case]) -> None:
    (found,) = attempts.analyse(case(**{f"rank{rank}.jsonl": tried(rank, 1, 2, SENT) for rank in (0, 1)}))
    assert (found.mode, found.suspects) == ("send-send-deadlock", (0, 1))
    assert list(attempts.analyse(case(**{"rank0.jsonl": tried(0, 1, 2, SENT), "rank1.jsonl": tried(1, 1, 2, LATE)}))) == []


def test_a_group_that_only_one_rank_makes(case: Callable[..., Case]) -> None:
    waits = "wait timeout after 2000ms, keys: /0//3//cpu//0/1"
    (found,) = attempts.analyse(case(**{"rank0.jsonl": tried(0, 1, 2, waits, error="DistStoreError")}))
    assert (found.mode, found.first) == ("new-group-misuse", 1)


def test_a_child_that_never_comes_back(case: Callable[..., Case]) -> None:
    own = [record(9, "work", 0, pid=800)]
    (found,) = attempts.analyse(case(**{"rank0.jsonl": [*tried(0, 1, None, pid=950), *own]}))
    assert (found.mode, found.first) == ("fork-after-init", 0)
    assert (
        list(attempts.analyse(case(**{"rank0.jsonl": [*tried(0, 1, None, pid=700), *own]}))) == []
    )  # a restart: the newer one goes on


@pytest.mark.parametrize(
    ("field", "values", "mode", "first"),
    [
        ("digest", ("a1", "b2", "a1"), "silent-corruption", 1),
        ("loss_scale", (16.0, 8.0, 16.0), "scaler-divergence", None),
    ],
)
def test_replicas_that_differ(
    case: Callable[..., Case], field: str, values: tuple[object, ...], mode: str, first: int | None
) -> None:
    lines = {
        f"rank{rank}.jsonl": [
            record(1, "step", rank, step=3, **{field: "same"}),
            record(2, "step", rank, step=4, **{field: value}),
        ]
        for rank, value in enumerate(values)
    }
    (found,) = checks.analyse(case(**lines))
    assert (found.mode, found.first) == (mode, first)
    assert "step 4" in found.because


def test_wrong_values_are_a_lead_and_decide_nothing(case: Callable[..., Case]) -> None:
    (found,) = checks.analyse(case(**{"rank0.jsonl": [record(1, "sum", 0, value=4.0, right=6.0)]}))
    assert found.likelihood < 0.5
    assert list(checks.analyse(case(**{"rank0.jsonl": [record(1, "sum", 0, value=6.0, right=6.0)]}))) == []


def test_threads_that_come_and_never_end(case: Callable[..., Case]) -> None:
    (found,) = checks.analyse(case(**{"rank0.jsonl": samples(0, threads=[12, 20, 28, 36, 44, 52, 60, 60])}))
    assert found.mode == "gloo-thread-leak"
    assert list(checks.analyse(case(**{"rank0.jsonl": samples(0, threads=[12, 28, 12, 44, 12, 60, 12, 60])}))) == []


def test_a_rank_that_stood_still(case: Callable[..., Case]) -> None:
    (found,) = states.analyse(case(**{"rank0.jsonl": samples(0, states="SSSSSS"), "rank1.jsonl": samples(1, states="SSTTTS")}))
    assert (found.mode, found.first) == ("rank-stopped", 1)
    assert '"state": "T"' in found.evidence[0].text
    assert (
        list(states.analyse(case(**{"rank0.jsonl": samples(0, states="SSSS"), "rank1.jsonl": samples(1, states="SSTS")}))) == []
    )


def test_killed_after_its_memory_grew(case: Callable[..., Case]) -> None:
    files = {
        "rank0.jsonl": samples(0, rss_mb=[200] * 8),
        "rank1.jsonl": samples(1, rss_mb=[200, 200, 200, 200, 210, 300, 500, 900]),
    }
    end = ["failed (exitcode: -9) local_rank: 1 (pid: 801) of binary: python"]
    (found,) = states.analyse(case(**files, **{"launch.log": end}))
    assert (found.mode, found.first) == ("host-oom-kill", 1)
    files["rank1.jsonl"] = samples(1, rss_mb=[200] * 8)
    assert list(states.analyse(case(**files, **{"launch.log": end}))) == []


def test_a_restart_that_connects_to_nobody(case: Callable[..., Case]) -> None:
    refused = "Gloo connectFullMesh failed with [gloo/transport/tcp/pair.cc:152] timed out connecting: SO_ERROR: Connection refused, remote=[198.51.100.2]:4711"
    lines = [record(1, "sum", 1, pid=810), record(9, "failed", 1, pid=830, text=refused)]
    (found,) = restarts.analyse(case(**{"rank1.jsonl": lines}))
    assert (found.mode, found.suspects) == ("restart-stale-store", (1,))
    assert list(restarts.analyse(case(**{"rank1.jsonl": lines[1:]}))) == []


def test_every_process_is_rank_0(case: Callable[..., Case]) -> None:
    files = {f"rank{folder}.jsonl": tried(0, 1, 0.1, pid=900 + folder) for folder in (0, 1, 2)}
    (found,) = restarts.analyse(case(**files))
    assert (found.mode, found.first) == ("nested-launcher", "all")
    files["rank1.jsonl"] = tried(1, 1, 0.1, pid=901)
    assert list(restarts.analyse(case(**files))) == []


def test_children_of_one_rank_that_speak_in_its_name_are_no_jobs(case: Callable[..., Case]) -> None:
    lines = [line for child in (0, 1, 2) for line in tried(0, 1 + child / 100, 0.1, pid=900 + child)]
    assert list(restarts.analyse(case(**{"rank0.jsonl": lines}))) == []
