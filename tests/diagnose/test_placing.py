"""Places that launch commands, environments, schedulers and Kubernetes tell, tied to files, hosts, pods and processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from dtprobe.diagnose.case import Artifact, Line
from dtprobe.diagnose.lines import read_lines
from dtprobe.diagnose.who import Who, identify, seated


def _read(tmp_path: Path, files: dict[str, str]) -> tuple[Who, list[Line]]:
    artifacts, lines = [], []
    for at, (name, text) in enumerate(files.items()):
        path = tmp_path / f"{at}"
        path.write_text(text)
        artifact = Artifact(name=name, path=path, kind="text", size=len(text))
        artifacts.append(artifact)
        lines.extend(read_lines(artifact))
    who = identify(artifacts, lines)
    return who, seated(who, lines)


def _ranks(lines: list[Line], name: str) -> set[int | None]:
    return {line.rank for line in lines if line.artifact.name == name}


@pytest.mark.parametrize(
    "shown",
    [
        "RANK={}",
        'declare -x RANK="{}"',
        '  "RANK": "{}",',
        "SLURM_PROCID={}",
        "OMPI_COMM_WORLD_RANK={}",
        "Process index: {}",
        "Hello from rank {} of 3",
        "GLOBAL_RANK: {}, MEMBER: 1/3",
    ],
)
def test_what_each_file_shows_of_its_process_is_its_rank(tmp_path, shown):
    _, lines = _read(tmp_path, {name: f"{shown.format(rank)}\nwords\n" for rank, name in enumerate(("x", "y", "z"))})
    assert [_ranks(lines, name) for name in ("x", "y", "z")] == [{0}, {1}, {2}]


@pytest.mark.parametrize("shown", ["LOCAL_RANK={}", "NODE_RANK={}", "GROUP_RANK={}", "ROLE_RANK={}", "RERANK={}"])
def test_ranks_within_something_are_no_ranks(tmp_path, shown):
    _, lines = _read(tmp_path, {name: f"{shown.format(rank)}\nwords\n" for rank, name in enumerate(("x", "y", "z"))})
    assert {line.rank for line in lines} == {None}


def test_one_environment_binds_no_log_of_several_processes(tmp_path):
    _, lines = _read(tmp_path, {"all.log": "RANK=0\nwords\n", "notes": "words\n"})
    assert {line.rank for line in lines} == {None}


def test_an_environment_beside_a_log_that_shows_ranks_is_of_its_process(tmp_path):
    _, lines = _read(tmp_path, {"all.log": "[rank0]: a\n[rank1]: b\n", "of-8123.txt": "State:\tD\nRANK=1\n"})
    assert _ranks(lines, "of-8123.txt") == {1}


def test_a_local_rank_is_counted_from_its_nodes_first_rank(tmp_path):
    who, _ = _read(tmp_path, {"n": "torchrun --nnodes 3 --nproc-per-node 4 --node-rank 2 a.py\n"})
    assert who.local_in("n", 1) == 9
    assert who.several
    who, _ = _read(tmp_path, {"n": "[rank6]: a\n[rank7]: b\n"})
    assert who.local_in("n", 1) == 7
    who, _ = _read(tmp_path, {"n": "[rank5]: a\n[rank7]: b\n"})
    assert who.local_in("n", 1) is None


def test_tasks_of_a_host_and_the_pid_that_a_rank_says_are_seats(tmp_path):
    who, _ = _read(
        tmp_path, {"a": "srun: error: c7: tasks 2,4-5: Killed\n[rank9]: getpid=4711\n[rank9]: killed child pid=99\n"}
    )
    assert who.on("c7") == (2, 4, 5)
    assert who.at_pid(4711).rank == 9
    assert who.at_pid(99) is None


def test_a_description_of_pods_gives_each_its_rank_and_names(tmp_path):
    pod = "Name:         ft-{0}\nNode:         pool-{0}/10.0.0.{0}\nIP:           10.1.0.{0}\nReason: x\n  RANK:  {0}\n"
    who, lines = _read(tmp_path, {"d.txt": pod.format(1) + pod.format(2)})
    assert who.on("ft-2") == who.on("pool-2") == who.on("10.1.0.2") == (2,)
    assert [line.rank for line in lines] == [1] * 5 + [2] * 5


def test_a_table_of_pods_ties_nodes_and_addresses_to_pods(tmp_path):
    table = "NAME READY STATUS RESTARTS AGE IP NODE\ntrainer-0   0/1   Error   0   3h   10.4.0.2   pool-a\ntrainer-1   0/1   Unknown   0   3h   10.4.0.3   pool-b\n"
    who, _ = _read(tmp_path, {"pods.txt": table})
    assert who.on("pool-b") == who.on("10.4.0.3") == (1,)
