"""Labels before lines, learned from how their numbers go along them."""

from __future__ import annotations

import pytest

from dtprobe.diagnose.lines.columns import column


def _run(label: str, ranks: int = 3, rounds: int = 3) -> list[str]:
    return [label.replace("@", str(rank)) + f"loss {one}.5" for one in range(rounds) for rank in range(ranks)]


@pytest.mark.parametrize(
    ("label", "means"),
    [
        ("<@> ", "rank"),
        ("#@: ", "rank"),
        ("rank=@ ", "rank"),
        ("rk @ | ", "rank"),
        ("dist_worker @: ", "rank"),
        ("11:22:33 rank=@ ", "rank"),
        ("11:22:33.123 INFO [proc @] ", "rank"),
        ("cuda:@ ", "local"),
        ("[GPU@] ", "local"),
        ("[LR @] ", "local"),
        ("{node@} ", "host"),
        ("[node @] ", "node"),
        ("P@> ", "rank"),
    ],
)
def test_a_column_of_few_numbers_that_come_back_is_a_label(label, means):
    pattern, told = column(_run(label))
    assert told == means
    match = pattern.match(label.replace("@", "12") + "Traceback")
    assert match["label"] == "12"
    assert match.string[match.end() :] == "Traceback"


def test_a_number_beside_a_host_is_the_rank_where_no_two_hosts_share_it():
    apart = [f"[c{rank // 2}:{rank}] loss {one}" for one in range(3) for rank in range(4)]
    shared = [f"[c{rank // 2}:{rank % 2}] loss {one}" for one in range(3) for rank in range(4)]
    assert column(apart)[1] == "rank"
    assert column(shared)[1] == "local"
    assert column(shared)[0].match("[c1:0] loss 9")["host"] == "c1"


@pytest.mark.parametrize(
    "lines",
    [
        [f"step {one}: loss 1" for one in range(9)],
        [f"epoch {one // 3} loss 1" for one in range(9)],
        [f"layer {one % 3}: norm 1" for one in range(9)],
        [f"({one}) an entry of a list" for one in range(9)],
        ["3 files read", "3 files read", "3 files read", "2 files read"],
        ["rank 3 is late", "all well", "nothing to see", "done", "really", "and so on", "till the end", "bye", "x", "y"],
        [f"trainer-{one % 3} | loss" for one in range(9)],
        [f"c{one % 3}: loss" for one in range(9)],
        [f"GPU {one}: NVIDIA H100 80GB HBM3" for one in range(8)],
        [],
    ],
)
def test_counts_and_lists_are_no_labels(lines):
    assert column(lines) is None


def test_names_that_do_not_count_from_0_are_hosts():
    pattern, means = column([f"[c{11 + one % 2}] loss 1" for one in range(8)])
    assert means == "host"
    assert pattern.match("[c12] loss 1")["own"] == "c12"
