"""Where a job meets: its own store, whoever else listens there."""

from __future__ import annotations

import os
import socket
import threading
import time
from itertools import islice

import pytest

from dtprobe.framework.bootstrap.placement import Placement, PlacementError
from dtprobe.framework.errors import MissingRanks
from dtprobe.framework.filestore import StaleStore
from dtprobe.framework.stores import PortTaken, meet, ports


def placement(rank: int = 0, *, run: str = "", port: int | None = None, addr: str = "127.0.0.1", size: int = 2) -> Placement:
    unknown = dict.fromkeys(("local_rank", "local_world_size", "node_rank", "nodes"))
    return Placement(rank=rank, world_size=size, master_addr=addr, master_port=port, source="explicit", run=run, **unknown)


@pytest.fixture
def run(request: pytest.FixtureRequest) -> str:
    return f"{os.getpid()}-{request.node.name}-{time.monotonic_ns()}"


def test_candidates_are_the_same_on_every_rank_and_differ_by_run_and_attempt():
    assert list(ports("a")) == list(ports("a"))
    assert len({tuple(ports("a")), tuple(ports("b")), tuple(ports("a", 1))}) == 3
    assert all(20_000 <= port < 32_000 for port in ports("a"))


def test_a_job_whose_first_ports_are_taken_meets_at_the_next(run):
    first, second, third = islice(ports(run), 3)
    with socket.create_server(("127.0.0.1", first)):  # listens and never answers
        other = meet(placement(run="another", port=second), timeout_s=10)  # answers, for another run
        served = meet(placement(run=run), timeout_s=10)
        joined = meet(placement(1, run=run), timeout_s=20)
        served.set("k", "v")
        assert joined.get("k") == b"v" and served.port == joined.port == third != other.port


def test_the_others_wait_for_rank_0(run):
    served = []
    late = threading.Timer(0.5, lambda: served.append(meet(placement(run=run), timeout_s=10)))
    late.start()
    joined = meet(placement(1, run=run), timeout_s=20)
    late.join()
    served[0].set("k", "v")
    assert joined.get("k") == b"v"


def test_a_given_port_that_a_program_holds_is_refused_with_its_process(port):
    with socket.create_server(("", port)), pytest.raises(PortTaken, match=rf"port {port} is in use by pid {os.getpid()}"):
        meet(placement(port=port), timeout_s=5)


def test_a_given_port_that_another_run_holds_is_refused_on_both_sides(port):
    other = meet(placement(run="theirs", port=port), timeout_s=5)
    with pytest.raises(PortTaken, match="in use by rank 0 of 2, pid"):
        meet(placement(run="ours", port=port), timeout_s=5)
    with pytest.raises(PortTaken, match="not to run 'ours'"):
        meet(placement(1, run="ours", port=port), timeout_s=5)
    assert other.port == port


def test_a_job_that_comes_again_does_not_join_its_last_store(port):
    first = meet(placement(run="r", port=port), timeout_s=5)
    with pytest.raises(MissingRanks) as caught:
        meet(placement(1, run="r", port=port), timeout_s=1, again=1)
    assert caught.value.ranks == (0,) and first.port == port


def test_a_second_process_that_claims_rank_0_of_the_run_is_refused(job, port):
    ranks = job(
        f"""
import dataclasses
from dtprobe.framework.bootstrap import resolve
from dtprobe.framework.stores import meet
where = dataclasses.replace(resolve(os.environ), rank=0, local_rank=0, run="r", master_port={port})
if RANK == 0:
    store = meet(where, timeout_s=10)
    open("ready", "w").close()
    while not os.path.exists("done"):
        time.sleep(0.01)
else:
    while not os.path.exists("ready"):
        time.sleep(0.01)
    say(**caught(lambda: meet(where, timeout_s=10)))
    open("done", "w").close()
""",
    )
    assert (ranks[1].only["error"], ranks[1].only["ranks"]) == (StaleStore.__name__, [0])


@pytest.mark.parametrize(
    ("where", "told"),
    [
        (placement(addr="no-such-host.invalid", port=2345, rank=1), "MASTER_ADDR=no-such-host.invalid"),
        (placement(addr="", port=2345), "mpirun -x MASTER_ADDR"),
        (placement(), "set MASTER_PORT"),
    ],
)
def test_no_place_to_meet_is_said_at_once(where, told):
    with pytest.raises(PlacementError, match=told):
        meet(where, timeout_s=5)
