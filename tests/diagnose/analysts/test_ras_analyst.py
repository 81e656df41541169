"""What RAS's answers say of the ranks."""

from __future__ import annotations

import json
from collections.abc import Callable

from dtprobe.diagnose.analysts import ras
from dtprobe.diagnose.case import Case


def answer(*comms: dict[int, dict[str, int] | None], errors: dict[int, int] | None = None) -> list[str]:
    """The counts of each rank of each communicator; None for a rank that does not answer."""
    made = []
    for number, counts in enumerate(comms):
        ranks = [
            {
                "rank": rank,
                "host": "198.51.100.1",
                "pid": 500 + rank,
                "status": {"init_state": 0, "async_error": (errors or {}).get(rank, 0)},
                "collective_counts": own,
            }
            for rank, own in counts.items()
            if own is not None
        ]
        missing = [
            {"rank": rank, "pid": 500 + rank, "status": {"unresponsive": True, "considered_dead": False}}
            for rank, own in counts.items()
            if own is None
        ]
        made.append({"hash": f"0x{number + 10:x}", "size": len(counts), "ranks": ranks, "missing_ranks": missing})
    text = json.dumps({"nccl_version": "2.27.3", "communicators_count": len(made), "communicators": made}, indent=1)
    return ["SERVER PROTOCOL 2", "OK", *text.splitlines()]


def test_a_rank_behind(case: Callable[..., Case]) -> None:
    (found,) = ras.analyse(case(**{"ras.txt": answer({0: {"AllReduce": 9}, 1: {"AllReduce": 9}, 2: {"AllReduce": 7}})}))
    assert (found.mode, found.first, found.suspects) == ("collective-skipped", 2, (2,))


def test_a_rank_that_moves_between_two_answers_is_late_and_not_lost(case: Callable[..., Case]) -> None:
    files = {
        "ras1.txt": answer({0: {"AllReduce": 9}, 1: {"AllReduce": 6}}),
        "ras2.txt": answer({0: {"AllReduce": 9}, 1: {"AllReduce": 8}}),
    }
    assert list(ras.analyse(case(**files))) == []


def test_a_rank_behind_in_one_kind_and_ahead_in_another_called_something_else(case: Callable[..., Case]) -> None:
    (found,) = ras.analyse(
        case(**{"ras.txt": answer({0: {"AllReduce": 9, "AllGather": 0}, 1: {"AllReduce": 8, "AllGather": 1}})})
    )
    assert (found.mode, found.first) == ("collective-type-mismatch", 1)


def test_two_communicators_crossed(case: Callable[..., Case]) -> None:
    crossed = answer({0: {"AllReduce": 2}, 1: {"AllReduce": 1}}, {0: {"AllReduce": 1}, 1: {"AllReduce": 2}})
    (found,) = ras.analyse(case(**{"ras.txt": crossed}))
    assert (found.mode, found.first, found.suspects) == ("cross-communicator-deadlock", None, (0, 1))


def test_a_rank_that_does_not_answer(case: Callable[..., Case]) -> None:
    (found,) = ras.analyse(case(**{"ras.txt": answer({0: {"AllReduce": 9}, 1: None, 2: {"AllReduce": 9}})}))
    assert (found.mode, found.first) == ("rank-lost", 1)


def test_a_communicator_s_error(case: Callable[..., Case]) -> None:
    (found,) = ras.analyse(case(**{"ras.txt": answer({0: {"AllReduce": 9}, 1: {"AllReduce": 9}}, errors={1: 6})}))
    assert (found.mode, found.first) == ("nccl-remote-error", 1)


def test_ranks_that_agree_say_nothing(case: Callable[..., Case]) -> None:
    assert list(ras.analyse(case(**{"ras.txt": answer({0: {"AllReduce": 9}, 1: {"AllReduce": 9}})}))) == []
