"""Ranks, hosts, processes and GPUs are tied together from what the lines say."""

from __future__ import annotations

from pathlib import Path

import pytest

from dtprobe.diagnose.case import Artifact, Line
from dtprobe.diagnose.lines import read_lines
from dtprobe.diagnose.who import Seat, Who, bus_key, identify, ranges, same_host, seated


def _read(tmp_path: Path, *texts: str, names: tuple[str, ...] = ()) -> tuple[Who, list[Line]]:
    artifacts, lines = [], []
    for at, text in enumerate(texts):
        path = tmp_path / f"{at}.log"
        path.write_text(text)
        artifact = Artifact(name=names[at] if names else path.name, path=path, kind="text", size=len(text))
        artifacts.append(artifact)
        lines.extend(read_lines(artifact))
    who = identify(artifacts, lines)
    return who, seated(who, lines)


def _init(host: str, pid: int, device: int, rank: int, size: int, comm: str = "0xaa") -> str:
    return f"{host}:{pid}:{pid + 900} [{device}] NCCL INFO comm 0x1 rank {rank} nranks {size} cudaDev {device} nvmlDev {device} busId {device}b000 commId {comm} - Init START\n"


def test_nccl_init_lines_tie_ranks_to_processes_hosts_and_gpus(tmp_path: Path) -> None:
    text = "".join(_init(f"n{node}", 100 + device, device, 2 * node + device, 4) for node in (0, 1) for device in (0, 1))
    who, lines = _read(tmp_path, text + "n1:101:101 [1] NCCL WARN Call to recv failed\n")
    assert who.world_size == 4 and "NCCL" in who.world_size_from
    assert who.at_pid(101, "n1") == Seat(rank=3, host="n1", pid=101, gpu_bus="1b000")
    assert who.at_pid(101) is None
    assert who.at_gpu("0000:1b:00.0", "n0").rank == 1  # type: ignore[union-attr]
    assert who.on("n1") == (2, 3)
    assert lines[-1].rank == 3


def test_ranks_within_a_part_of_the_job_are_not_taken_for_ranks_of_the_job(tmp_path: Path) -> None:
    text = _init("n0", 100, 0, 0, 2) + _init("n0", 103, 3, 1, 2) + _init("n0", 101, 1, 0, 2) + _init("n0", 102, 2, 1, 2)
    who, lines = _read(tmp_path, text)
    assert who.world_size is None and {one.rank for one in lines} == {None}


def test_a_job_that_was_started_again_has_a_seat_for_each_process(tmp_path: Path) -> None:
    text = "".join(
        _init("n0", first + device, device, device, 2, comm)
        for first, comm in ((100, "0xaa"), (200, "0xbb"))
        for device in (0, 1)
    )
    who, _ = _read(tmp_path, text)
    assert [who.at_pid(pid).rank for pid in (100, 101, 200, 201)] == [0, 1, 0, 1]  # type: ignore[union-attr]


def test_elastics_table_ties_a_rank_to_its_process_and_host(tmp_path: Path) -> None:
    table = "Root Cause (first observed failure):\n[0]:\n  time      : 2024-11-12_03:41:22\n  host      : n7.cluster\n  rank      : 13 (local_rank: 5)\n  exitcode  : -6 (pid: 1846)\n  error_file: <N/A>\n"
    who, _ = _read(tmp_path, table)
    assert who.seats == (Seat(rank=13, host="n7.cluster", local_rank=5, pid=1846),)


def test_elastics_rendezvous_ties_local_ranks_to_ranks(tmp_path: Path) -> None:
    text = "  local_ranks=[0, 1]\n  role_ranks=[2, 3]\n  global_ranks=[2, 3]\n  role_world_sizes=[4, 4]\n  global_world_sizes=[4, 4]\n[default1]:boom\n"
    who, lines = _read(tmp_path, text)
    assert who.world_size == 4 and lines[-1].rank == 3


def test_a_local_rank_is_the_rank_where_nothing_speaks_for_a_second_host(tmp_path: Path) -> None:
    who, lines = _read(tmp_path, "[default0]:a\n[default1]:b\n")
    assert who.one_host and [one.rank for one in lines] == [0, 1]
    who, lines = _read(tmp_path, "[default0]:a\n[default1]:[rank9]: b\n")
    assert not who.one_host and [one.rank for one in lines] == [None, 9]


def test_a_file_of_one_process_belongs_to_the_rank_that_its_lines_name(tmp_path: Path) -> None:
    names = ("n0/attempt_0/1/stderr.log", "n1/attempt_0/1/stderr.log", "n1/attempt_0/0/stderr.log")
    lines = []
    artifacts = []
    for at, (name, text) in enumerate(zip(names, ("plain\n[rank1]: boom\n", "plain\n[rank9]: boom\n", "plain\n"), strict=True)):
        path = tmp_path / str(at)
        path.write_text(text)
        artifacts.append(Artifact(name=name, path=path, kind="text", size=len(text), local_rank=int(name[13])))
        lines.extend(read_lines(artifacts[-1]))
    who = identify(artifacts, lines)
    assert [one.rank for one in seated(who, lines)] == [1, 1, 9, 9, None] and not who.one_host


def test_a_file_named_after_a_host_of_the_job_is_of_that_host(tmp_path: Path) -> None:
    texts = (_init("n17", 100, 0, 0, 2) + _init("n18.cluster", 101, 0, 1, 2), "NVRM: x\n", "NVRM: y\n", "NVRM: z\n")
    _, lines = _read(tmp_path, *texts, names=("train.log", "dmesg-n17.txt", "n18/kern.log", "dmesg-n170.txt"))
    assert [one.host for one in lines[2:]] == ["n17", "n18.cluster", None]


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("x world_size=16 rank=3 local_rank=3\n", 16),
        ("store based barrier (world_size=8, worker_count=16, timeout=0:30:00)\n", 8),
        ("WORLD_SIZE=32 RANK=0\n", 32),
        ("SLURM_NTASKS=64\n", 64),
        ("All distributed processes registered. Starting with 4 processes\n", 4),
        ("world_size=banana\n", None),
        ("world_size=99999999999\n", None),
    ],
)
def test_the_world_size_is_read_where_something_tells_it(tmp_path: Path, text: str, size: int | None) -> None:
    assert _read(tmp_path, text)[0].world_size == size


def test_ranks_that_left_nothing_are_said_in_one_line(tmp_path: Path) -> None:
    who, _ = _read(
        tmp_path, "world_size=4096\n" + "".join(f"[rank{rank}]: x\n" for rank in range(4096) if rank not in (7, 100, 101))
    )
    assert who.missing() == ("no line or file of ranks 7, 100-101 of 4096 (world_size in the log)",)
    who, _ = _read(tmp_path, "[rank0]: x\n[rank2]: x\n")
    assert who.missing() == ("no line or file of rank 1 between those seen (0-2)",)
    assert _read(tmp_path, "hello\n")[0].missing() == ()


def test_names_of_a_host_and_addresses_of_a_gpu_are_compared_in_their_forms() -> None:
    assert same_host("n7", "N7.cluster.local") and not same_host("n7", "n70") and not same_host("10", "10.0.0.1")
    assert bus_key("0000:c1:00.0") == bus_key("c1:00") == bus_key("c1000") == bus_key("00000000:C1:00.0")
    assert ranges([5, 3, 4, 9]) == "3-5, 9"
