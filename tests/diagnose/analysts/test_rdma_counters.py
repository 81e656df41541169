"""Counters of RDMA ports, read before and after."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from dtprobe.diagnose.analysts import rdma_counters
from dtprobe.diagnose.case import Case

PORT = "/sys/class/infiniband/mlx5_3/ports/1/hw_counters/"


def reading(sent: int, dropped: int, exceeded: int) -> list[str]:
    return [f"{PORT}sent_pkts:{sent}", f"{PORT}out_of_seq_request:{dropped}", f"{PORT}retry_exceeded_err:{exceeded}"]


@pytest.mark.parametrize(
    ("dropped", "exceeded", "flow", "mode"),
    [
        (40, 0, True, "rdma-contention"),
        (40, 0, False, "packet-loss"),
        (2, 0, True, None),
        (0, 3, False, "rank-lost"),
        (0, 0, True, None),
    ],
)
def test_what_rose_between_two_readings(
    case: Callable[..., Case], dropped: int, exceeded: int, flow: bool, mode: str | None
) -> None:
    """What stood in the counters before does not count."""
    files = {"one.txt": reading(900, 700 + dropped, 5 + exceeded), "two.txt": reading(100, 700, 5)}
    if flow:
        files["flow.json"] = ["{", '  "sum_sent": {"bytes": 1}', "}"]
    found = list(rdma_counters.analyse(case(**files)))
    assert [one.mode for one in found] == ([mode] if mode else [])
    assert all(one.evidence[0].file == "one.txt" for one in found)


def test_one_reading_tells_no_change(case: Callable[..., Case]) -> None:
    assert not list(rdma_counters.analyse(case(**{"one.txt": reading(900, 700, 5)})))
