"""Names that differ in one number, and what speaks against taking it for the rank."""

from __future__ import annotations

import pytest

from dtprobe.diagnose.siblings import numbered


@pytest.mark.parametrize(
    "layout",
    [
        "{}.log",
        "out.{}",
        "job.77.{}.txt",
        "w{}/err",
        "a/{}/stderr.log",
        "proc-{:03}.txt",
        "job-88_{}.out",
        "fit-0-{}-x7k2p.log",
    ],
)
def test_numbers_from_0_on_are_ranks(layout):
    names = [layout.format(rank) for rank in range(4)]
    assert numbered(names, None, {}) == {name: rank for rank, name in enumerate(names)}


@pytest.mark.parametrize("layout", ["std{1}/{0}.log", "{0}/std{1}.log", "w{0}.{1}"])
def test_both_streams_of_a_process_are_its_own(layout):
    names = {layout.format(rank, stream): rank for stream in ("out", "err") for rank in range(3)}
    assert numbered(names, None, {}) == names


@pytest.mark.parametrize("layout", ["node{}.log", "host-{}/err", "dmesg-{}.txt", "attempt_{}/all.log", "part{}", "run-{}.txt"])
def test_numbers_of_something_else_are_no_ranks(layout):
    assert numbered([layout.format(one) for one in range(4)], None, {}) == {}


def test_two_folders_of_the_same_numbers_are_two_hosts():
    again = [f"{host}/{local}.err" for host in ("c1", "c2") for local in range(4)]
    assert numbered(again, None, {}) == {}
    further = [f"c{rank // 4}/{rank}.err" for rank in range(8)]
    assert numbered(further, None, {}) == {name: rank for rank, name in enumerate(further)}


def test_a_known_world_size_tells_missing_files_from_nodes():
    three = ["w-0", "w-1", "w-3"]
    assert numbered(three, 4, {}) == {"w-0": 0, "w-1": 1, "w-3": 3}
    assert numbered(three, 8, {}) == {}
    assert numbered(three, 3, {}) == {}


def test_a_rank_that_a_file_shows_speaks_against_all_of_them():
    assert numbered(["a0", "a1"], None, {"a1": {1}}) == {"a0": 0, "a1": 1}
    assert numbered(["a0", "a1"], None, {"a1": {4, 5}}) == {}


def test_beside_a_master_worker_0_is_rank_1():
    names = ["bert-master-0", "bert-worker-0", "bert-worker-1"]
    assert numbered(names, 3, {}) == {"bert-master-0": 0, "bert-worker-0": 1, "bert-worker-1": 2}
