"""What is judged from facts and figures alone: who meets when, which link is slow and whose fault that is, clocks, floors, ssh."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtprobe.doctor.cluster import checks, clocks, heat, matrix, measured, ssh
from dtprobe.doctor.cluster.clocks import Offset
from dtprobe.doctor.cluster.facts import Facts, Gpu, Limit, Memory, Space
from dtprobe.doctor.cluster.matrix import Link
from dtprobe.doctor.cluster.network import Interface, Network, gloo_choice, interfaces, nccl_choice
from dtprobe.doctor.cluster.verdict import ClusterReport, Collective, ranks
from dtprobe.framework.bootstrap import Placement, resolve

GIB = 1 << 30
LO = Interface(name="lo", up=True, loopback=True, mtu=65536, speed_mbit=None, addresses=("127.0.0.1/8",))
ETH0 = Interface(name="eth0", up=True, loopback=False, mtu=1500, speed_mbit=25000, addresses=("10.0.0.1/24",))
ETH1 = Interface(name="eth1", up=True, loopback=False, mtu=9000, speed_mbit=100000, addresses=("10.1.0.1/24",))
DOWN = Interface(name="eth2", up=False, loopback=False, mtu=1500, speed_mbit=None, addresses=())
DOCKER = Interface(name="docker0", up=True, loopback=False, mtu=1500, speed_mbit=None, addresses=("172.17.0.1/16",))


def facts(rank: int = 0, host: str = "a", **changes: Any) -> Facts:
    versions = {"python": "3.11.7", "torch": "2.13.0+cpu", "cuda": None, "nccl": None, "mpi": None, "kernel": "Linux 6.1"}
    found = Facts(
        rank=rank,
        local_rank=0,
        host=host,
        pid=100 + rank,
        user="someone",
        cores=8,
        load=0.1,
        versions=versions | changes.pop("versions", {}),
        environment={},
        limits={
            "nofile": Limit(soft=4096, hard=4096),
            "nproc": Limit(soft=None, hard=None),
            "memlock": Limit(soft=8 << 20, hard=None),
        },
        shm=Space(total=8 * GIB, free=8 * GIB),
        memory=Memory(total=16 * GIB, available=8 * GIB, cgroup_limit=None, cgroup_used=None),
        network=Network(
            interfaces=(LO, ETH0),
            host_addresses=("10.0.0.1",),
            gloo_interface="eth0",
            gloo_because="",
            nccl_interface="eth0",
            nccl_because="",
            gloo_address="10.0.0.1",
        ),
        rdma=(),
        gpu=None,
        gpu_problem="",
    )
    return replace(found, **changes)


def placement(size: int, **environ: str) -> Placement:
    return resolve({"RANK": "0", "WORLD_SIZE": str(size), "MASTER_ADDR": "a", "MASTER_PORT": "1", **environ})


def found(each: list[Facts], *, several_hosts: bool = True) -> dict[str, tuple[str, tuple[int, ...]]]:
    """check -> (severity, ranks) of the problems that facts give."""
    told = checks.of_facts(each, placement(max(2, len(each))), several_hosts=several_hosts)
    assert all(one.remedy and one.found for one in told)
    return {one.check: (one.severity, one.ranks) for one in told}


@given(st.integers(1, 40))
def test_in_a_tournament_each_pair_meets_once_and_nobody_is_in_two_pairs_at_a_time(count: int) -> None:
    members = [3 * each for each in range(count)]
    plan = matrix.rounds(members)
    assert sorted(pair for one in plan for pair in one) == list(combinations(members, 2))
    for one in plan:
        assert len({rank for pair in one for rank in pair}) == 2 * len(one)
    assert len(plan) == count - 1 + count % 2 or count == 1


def test_beyond_so_many_ranks_one_a_host_measures_and_it_is_said() -> None:
    assert matrix.measuring(["a"] * 4, most=4) == ([0, 1, 2, 3], "")
    chosen, left_out = matrix.measuring(["a", "a", "b", "b", "b"], most=4)
    assert chosen == [0, 2] and "5 ranks are more than 4" in left_out


def links(
    size: int, value: Callable[[int, int], float], latency: Callable[[int, int], float] = lambda a, b: 1e-4
) -> list[Link]:
    return [
        Link(
            transport="gloo",
            a=a,
            b=b,
            kind="between hosts",
            latency_s=latency(a, b),
            out_bytes_s=value(a, b),
            back_bytes_s=value(b, a),
            size=1,
            repeats=3,
            offset_s=0.0,
            uncertainty_s=1e-5,
        )
        for a, b in combinations(range(size), 2)
    ]


@pytest.mark.parametrize("size", [3, 4, 8])
def test_a_slow_host_is_named_once_with_all_its_links(size: int) -> None:
    judged = matrix.judged(links(size, lambda a, b: 1e7 if 2 in (a, b) else 1e9))
    assert [(each.a, each.b) for each in judged if each.slow] == [
        (a, b) for a, b in combinations(range(size), 2) if 2 in (a, b)
    ]
    (only,) = measured.of_links(judged, [facts(rank, f"host{rank}") for rank in range(size)])
    assert only.ranks == (2,) and f"{size - 1} slow links have rank 2 in common" in only.found and "host2" in only.remedy


def test_one_slow_link_is_named_by_both_ends_with_direction_and_measure() -> None:
    judged = matrix.judged(links(5, lambda a, b: 1e8 if (a, b) == (3, 1) else 1e9))
    (only,) = measured.of_links(judged, [facts(rank) for rank in range(5)])
    assert only.ranks == (1, 3)
    assert "3 to 1: 95.4 MiB/s, 10.0 times below the median of 10 links between hosts" in only.found


def test_very_many_slow_links_are_summed_up() -> None:
    judged = matrix.judged(links(30, lambda a, b: 1e8 if b == a + 1 and a % 2 == 0 else 1e9))
    told = measured.of_links(judged, [facts(rank) for rank in range(30)])
    assert len(told) == 9 and told[-1].severity == "note" and "7 more slow links" in told[-1].found


def test_a_link_slow_one_way_is_found_even_when_it_is_the_only_one() -> None:
    (only,) = matrix.judged(links(2, lambda a, b: 1e8 if a else 1e9))
    assert len(only.slow) == 1 and only.slow[0].startswith("1 to 0:")


def test_high_latency_is_found_and_ordinary_spread_is_not() -> None:
    far = matrix.judged(links(4, lambda a, b: 1e9, lambda a, b: 5e-3 if (a, b) == (0, 1) else 1e-4))
    assert [each.slow[0][:7] for each in far if each.slow] == ["latency"]
    assert not any(
        each.slow for each in matrix.judged(links(4, lambda a, b: 1e9 + (a + b) * 1e8, lambda a, b: 1e-4 + a * 5e-5))
    )


@pytest.mark.parametrize(("kind", "slow"), [("between hosts", True), ("same host", False)])
def test_late_by_a_slice_of_the_scheduler_tells_of_a_network_and_not_of_ranks_on_one_host(kind: str, slow: bool) -> None:
    late = links(3, lambda a, b: 1e9, lambda a, b: 8.4e-4 if (a, b) == (0, 1) else 9.6e-5)
    assert any(each.slow for each in matrix.judged([replace(each, kind=kind) for each in late])) is slow


def test_on_a_busy_host_only_a_very_slow_link_is_a_problem() -> None:
    for factor, load, severity in ((5, 0.5, "warning"), (5, 9.0, "note"), (50, 9.0, "warning")):
        judged = matrix.judged(links(4, lambda a, b, factor=factor: 1e9 / factor if (a, b) == (0, 1) else 1e9))
        (only,) = measured.of_links(judged, [facts(rank, load=load) for rank in range(4)])
        assert only.severity == severity and (severity != "note" or "quiet hosts" in only.remedy)


def test_a_second_measurement_only_ever_improves_a_link() -> None:
    first = links(3, lambda a, b: 1e9)
    worse = [replace(first[0], latency_s=1.0, out_bytes_s=1.0, uncertainty_s=1.0, offset_s=5.0)]
    assert matrix.merged(first, worse) == first
    better = [replace(first[1], latency_s=1e-6, uncertainty_s=1e-6, offset_s=2e-6)]
    assert matrix.merged(first, better)[1] == better[0]


@given(
    st.integers(-(10**12), 10**12),
    st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 10**6), st.integers(0, 10**6)), min_size=1, max_size=20),
)
def test_the_true_offset_lies_within_the_uncertainty_whatever_the_ways_took(
    offset_ns: int, ways: list[tuple[int, int, int]]
) -> None:
    exchanges, now = [], 10**15
    for there, stay, back in ways:
        exchanges.append((now, now + there + offset_ns, now + there + stay + offset_ns, now + there + stay + back))
        now += 10**7
    found_s, doubt_s = clocks.between(exchanges)
    assert abs(found_s - offset_ns / 1e9) <= doubt_s + 1e-9


def test_offsets_reach_ranks_that_were_not_measured_directly() -> None:
    pairs = [
        Offset(rank=1, of=0, offset_s=5.0, uncertainty_s=0.001),
        Offset(rank=2, of=1, offset_s=-5.0, uncertainty_s=0.001),
        Offset(rank=2, of=0, offset_s=0.5, uncertainty_s=9.0),
        Offset(rank=4, of=3, offset_s=0.0, uncertainty_s=0.1),
    ]
    reached = clocks.from_first(pairs)
    assert [(each.rank, each.offset_s, each.uncertainty_s) for each in reached] == [(0, 0, 0), (1, 5, 0.001), (2, 0, 0.002)]
    (only,) = measured.of_clocks(reached, [facts(rank) for rank in range(3)])
    assert only.ranks == (1,) and "5 s ahead" in only.found and "chrony" in only.remedy


@pytest.mark.parametrize(
    ("op", "wrong", "blamed", "named"),
    [
        ("all_reduce sum", (0, 1, 2), (1,), (1,)),  # its contribution is wrong for all
        ("all_reduce sum", (2,), (0, 1), (2,)),  # the others received the same contributions rightly
        ("broadcast from 0", (1, 2), (0,), (0,)),
        ("broadcast from 0", (1,), (0,), (1,)),
        ("all_gather", (0, 2), (1,), (1,)),
    ],
)
def test_a_wrong_result_is_laid_to_the_rank_that_spoilt_it(op: str, wrong: Any, blamed: Any, named: Any) -> None:
    tried = [Collective(transport="gloo", op=op, dtype="float32", elements=9, wrong=wrong, blamed=blamed)]
    (only,) = measured.of_collectives(tried, [facts(rank) for rank in range(3)])
    assert (only.severity, only.ranks) == ("error", named)
    assert measured.of_collectives([replace(tried[0], wrong=(), blamed=())], [facts(0)]) == []


def test_alike_ranks_have_no_problem() -> None:
    assert found([facts(0), facts(1, "b")]) == {}


@pytest.mark.parametrize(
    ("change", "check", "severity"),
    [
        ({"versions": {"torch": "2.12.0+cpu"}}, "versions", "error"),
        ({"versions": {"python": "3.12.1"}}, "versions", "error"),
        ({"versions": {"python": "3.11.9"}}, "versions", "warning"),
        ({"versions": {"kernel": "Linux 5.4"}}, "versions", "warning"),
        ({"environment": {"OMP_NUM_THREADS": "4"}}, "environment", "warning"),
        ({"environment": {"NCCL_DEBUG": "INFO"}}, "environment", "note"),
        ({"limits": {**facts().limits, "nofile": Limit(soft=256, hard=4096)}}, "nofile", "warning"),
        ({"limits": {**facts().limits, "nproc": Limit(soft=100, hard=100)}}, "nproc", "warning"),
        ({"rdma": ("mlx5_0",)}, "memlock", "warning"),
        ({"shm": Space(total=64 << 20, free=64 << 20)}, "shm", "warning"),
        ({"shm": Space(total=8 * GIB, free=1 << 20)}, "shm", "warning"),
        ({"shm": None}, "shm", "warning"),
        ({"memory": Memory(total=GIB, available=GIB, cgroup_limit=1000, cgroup_used=990)}, "memory", "warning"),
        ({"gpu_problem": "local rank 2 has no GPU of its own: 2 visible"}, "gpu", "error"),
    ],
)
def test_one_rank_that_differs_is_named(change: dict[str, Any], check: str, severity: str) -> None:
    assert found([facts(0), facts(1, "b"), facts(2, "c", **change), facts(3, "d")]) == {check: (severity, (2,))}


def test_with_no_majority_all_are_listed() -> None:
    assert found([facts(0), facts(1, environment={"NCCL_ALGO": "Ring"})]) == {"environment": ("warning", (0, 1))}


@pytest.mark.parametrize(
    ("name", "version", "below"),
    [
        ("torch", "2.2.1+cu121", True),
        ("torch", "2.3.0", False),
        ("torch", "2.14.0.dev20260101+cu130", False),
        ("cuda", "11.8", True),
        ("cuda", "12.1", False),
        ("nccl", "2.18.6", True),
        ("nccl", "2.28.9", False),
        ("nccl", None, False),
        ("mpi", "(Open MPI) 4.1.4", True),
        ("mpi", "(Open MPI) 4.1.5rc2", True),
        ("mpi", "(Open MPI) 5.0.11", False),
        ("mpi", "Intel(R) MPI Library 2019.1", False),
        ("mpi", "HYDRA build details:", False),
        ("torch", "a5b3c2d", False),
    ],
)
def test_the_documented_floors(name: str, version: str | None, below: bool) -> None:
    each = [facts(rank, versions={name: version}) for rank in range(2)]
    assert found(each) == ({"floors": ("error", (0, 1))} if below else {})


def test_two_ranks_on_one_gpu_and_a_gpu_in_use_are_told() -> None:
    gpu = Gpu(index=0, visible=2, name="H", uuid="u", capability="9.0", total=100, free=99)
    assert found([facts(0, gpu=gpu), facts(1, gpu=gpu)]) == {"gpu": ("error", (0, 1))}
    other = replace(gpu, uuid="v", free=50)
    assert found([facts(0, gpu=gpu), facts(1, gpu=other)]) == {"gpu": ("warning", (1,))}
    assert found([facts(0, gpu=gpu), facts(1, "b", gpu=gpu)]) == {}  # the same number on another host is another GPU


def test_loopback_is_an_error_between_hosts_and_none_on_one() -> None:
    def loop(rank: int, host: str) -> Facts:
        net = replace(
            facts().network, gloo_interface="lo", gloo_because="the host's name resolves to 127.0.0.1", gloo_address=None
        )
        return facts(rank, host, network=net)

    assert found([loop(0, "a"), loop(1, "b")]) == {"interface": ("error", (0, 1))}
    (told,) = checks.of_facts([loop(0, "a"), loop(1, "b")], placement(2), several_hosts=True)
    assert "GLOO_SOCKET_IFNAME=eth0" in told.remedy and told.hosts == ("a", "b")
    assert found([loop(0, "a"), loop(1, "a")], several_hosts=False) == {}


def test_ranks_in_different_networks_and_with_different_mtu_are_told() -> None:
    net = replace(facts().network, interfaces=(LO, ETH0, ETH1), gloo_interface="eth1", gloo_address="10.1.0.1")
    each = [facts(0), facts(1, "b"), facts(2, "c", network=net)]
    told = [one for one in checks.of_facts(each, placement(3), several_hosts=True) if one.severity == "warning"]
    assert [one.ranks for one in told] == [(2,), (2,)]
    assert "10.1.0.0/24 on rank 2" in told[0].found and "MTU 9000 on rank 2" in told[1].found


@pytest.mark.parametrize(
    ("environ", "resolved", "chosen"),
    [
        ({}, ("10.0.0.1",), "eth0"),
        ({}, ("127.0.1.1",), "lo"),
        ({}, (), "lo"),
        ({}, ("8.8.8.8",), "lo"),
        ({"GLOO_SOCKET_IFNAME": "eth1"}, ("10.0.0.1",), "eth1"),
        ({"GLOO_SOCKET_IFNAME": "eth9"}, ("10.0.0.1",), None),
        ({"GLOO_SOCKET_IFNAME": "eth2"}, ("10.0.0.1",), None),
    ],
)
def test_what_gloo_would_choose(environ: dict[str, str], resolved: tuple[str, ...], chosen: str | None) -> None:
    assert gloo_choice(environ, (LO, ETH0, ETH1, DOWN, DOCKER), resolved)[0] == chosen


@pytest.mark.parametrize(
    ("wanted", "chosen"),
    [("", "eth0"), ("eth1", "eth1"), ("=eth", None), ("=eth1", "eth1"), ("^eth0,lo,docker", "eth1"), ("ib", None)],
)
def test_what_nccl_would_choose(wanted: str, chosen: str | None) -> None:
    assert nccl_choice({"NCCL_SOCKET_IFNAME": wanted} if wanted else {}, (LO, DOCKER, ETH0, ETH1))[0] == chosen


def test_the_interfaces_of_this_host_are_read() -> None:
    loop = next(each for each in interfaces() if each.loopback)
    assert loop.up and any(each.startswith("127.0.0.1/") for each in loop.addresses) and not loop.routable


def test_facts_survive_their_way_through_json() -> None:
    import json

    each = facts(gpu=Gpu(index=0, visible=1, name="H", uuid="u", capability="9.0", total=1, free=1))
    assert Facts.from_json(json.loads(json.dumps(each.as_json()))) == each


MPI = {
    f"OMPI_COMM_WORLD_{name}": value for name, value in (("RANK", "0"), ("SIZE", "2"), ("LOCAL_RANK", "0"), ("LOCAL_SIZE", "1"))
}


@pytest.mark.parametrize(
    ("environ", "hosts", "needed"),
    [
        (MPI, ["a", "b"], True),
        (MPI, ["a"], False),
        (MPI | {"SLURM_JOB_ID": "7"}, ["a", "b"], False),
        (MPI | {"OMPI_MCA_plm": "slurm"}, ["a", "b"], False),
        (MPI | {"OMPI_MCA_plm": "rsh"}, ["a", "b"], True),
        ({}, ["a", "b"], False),
        ({"CROSS_SIZE": "2"}, ["a", "b"], True),
    ],
)
def test_ssh_is_tried_only_where_the_launcher_needs_it(environ: dict[str, str], hosts: list[str], needed: bool) -> None:
    where = resolve(environ) if "OMPI_COMM_WORLD_RANK" in environ else placement(2)
    assert bool(ssh.needed(where, hosts, environ)) == needed


def test_a_host_that_ssh_does_not_reach_is_named_and_one_that_hangs_is_given_up(tmp_path: Path) -> None:
    """The ssh is a mock: a script that answers by host, and notes its arguments."""
    script = tmp_path / "ssh"
    script.write_text(
        f'#!/bin/sh\necho "$@" >> {tmp_path}/asked\ncase "$*" in *good*) exit 0;; *slow*) exec sleep 60;; esac\n'
        "echo 'Permission denied (publickey).' >&2\nexit 255\n"
    )
    script.chmod(0o755)
    environ = MPI | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    begun = time.monotonic()
    hosts = {"own": [0], "good": [1], "bad": [2, 3], "slow": [4]}
    told = ssh.check(hosts, resolve(environ), environ, limit_s=0.3)
    assert time.monotonic() - begun < 10
    assert [(each.ranks, each.hosts) for each in told] == [((2, 3), ("bad",)), ((4,), ("slow",))]
    assert "Permission denied (publickey)" in told[0].found and "ssh-copy-id bad" in told[0].remedy
    assert "no answer" in told[1].found
    asked = (tmp_path / "asked").read_text()
    assert "own" not in asked and "BatchMode=yes" in asked


def test_ranks_are_named_as_people_write_them() -> None:
    assert [ranks(each) for each in ([], [3], [1, 2], [0, 1, 2, 5])] == ["the job", "rank 3", "ranks 1, 2", "ranks 0-2, 5"]


def test_a_heat_map_shades_by_factors_of_two_and_marks_the_slow() -> None:
    judged = matrix.judged(links(4, lambda a, b: 1e8 if (a, b) == (0, 1) else 1e9))
    report = ClusterReport(launcher="mpirun", world_size=4, hosts={"a": [0, 1, 2, 3]}, ranks=[], links=judged)
    bandwidth, latency = heat.grids(report)
    first = bandwidth.rows[0].cells
    assert (first[0].value, first[0].shade) == (None, 0)
    assert (first[1].shade, first[2].shade) == (4, 1) and "0 to 1" in first[1].slow and not first[2].slow
    assert not bandwidth.rows[1].cells[0].slow  # the way back is well
    assert all(not cell.slow for row in latency.rows for cell in row.cells)
