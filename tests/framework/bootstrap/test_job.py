"""The ordered start: what it gives, and how it fails, on real processes."""

from __future__ import annotations

import pytest

START = "from dtprobe.framework.bootstrap import start\n"


def test_a_job_starts_in_order_and_ends_with_nothing_left(job):
    ranks = job(
        START
        + """
with start(deadline_s=20) as it:
    pass
before = held()
with start(deadline_s=20) as it:
    x = torch.ones(2)
    dist.all_reduce(x)
    with it.groups.scope("pair") as pair:
        dist.all_reduce(x, group=pair)
    found = [x[0].item(), [p.rank for p in it.peers], it.placement.source, it.placement.node_rank, it.placement.nodes]
del pair
say(found=found, initialized=dist.is_initialized(), grown=[a - b for a, b in zip(held(), before)])
""",
        world_size=3,
    )
    for rank in ranks:
        assert rank.only["found"] == [9.0, [0, 1, 2], "explicit", 0, 1]
        assert not rank.only["initialized"]
        assert rank.only["grown"][0] == 0 and rank.only["grown"][1] <= 0, rank.output


def test_a_rank_that_never_comes_is_named_on_every_rank_before_the_deadline(job):
    ranks = job(START + "say(**caught(lambda: start(deadline_s=3)))", world_size=3, processes=2)
    for rank in ranks:
        assert (rank.only["error"], rank.only["ranks"]) == ("MissingRanks", [2])
        assert rank.only["took_s"] < 5


def test_when_rank_0_never_comes_the_others_name_it(job):
    ranks = job(
        START + "say(**(caught(lambda: start(deadline_s=2)) if RANK else {}))",
        world_size=3,
    )
    for rank in ranks[1:]:
        assert (rank.only["error"], rank.only["ranks"]) == ("MissingRanks", [0])


def test_ranks_that_disagree_on_the_world_size_all_learn_it_at_once(job):
    ranks = job(
        START + "say(**caught(lambda: start(deadline_s=30)))",
        world_size=2,
        environ=lambda rank: {"WORLD_SIZE": "3"} if rank == 1 else {},
    )
    for rank in ranks:
        assert rank.only["error"] == "IdentityError"
        assert "rank 0" in rank.only["text"] and "says 2" in rank.only["text"] and "says 3" in rank.only["text"]
        assert rank.only["took_s"] < 5


def test_a_process_that_lies_about_its_rank_is_named_with_the_one_it_doubles(job):
    ranks = job(
        START + "say(pid=os.getpid(), **caught(lambda: start(deadline_s=30)))",
        world_size=3,
        environ=lambda rank: {"RANK": "1", "LOCAL_RANK": "1"} if rank == 2 else {},
    )
    for rank in ranks:
        assert (rank.only["error"], rank.only["ranks"]) == ("IdentityError", [1])
    assert str(ranks[1].only["pid"]) in ranks[0].only["text"] and str(ranks[2].only["pid"]) in ranks[0].only["text"]


def test_a_second_rank_0_is_refused(job):
    ranks = job(
        START
        + """
if os.environ.get("LIAR"):
    while not os.path.exists("ready"):
        time.sleep(0.01)
    say(**caught(lambda: start(deadline_s=20)))
    open("done", "w").close()
else:
    from dtprobe.framework.bootstrap import resolve
    from dtprobe.framework.stores import meet
    store = meet(resolve(os.environ), timeout_s=10)
    open("ready", "w").close()
    while not os.path.exists("done"):
        time.sleep(0.01)
""",
        environ=lambda rank: {"RANK": "0", "LOCAL_RANK": "0", "LIAR": "1"} if rank == 1 else {},
    )
    assert (ranks[1].only["error"], ranks[1].only["ranks"]) == ("StaleStore", [0])


def test_a_store_that_dies_in_the_middle_of_the_start_is_an_error_on_the_others(job):
    ranks = job(
        START
        + """
if RANK == 0:
    from dtprobe.framework.bootstrap import resolve
    from dtprobe.framework.stores import meet
    store = meet(resolve(os.environ), timeout_s=10)
    key = "dtprobe/127.0.0.1:" + os.environ["MASTER_PORT"] + "/0/0/dtprobe.identity/0/said"
    store.wait([key], seconds(20))
    os.kill(os.getpid(), signal.SIGKILL)
say(**caught(lambda: start(deadline_s=30)))
""",
        world_size=2,
    )
    assert ranks[0].code == -9
    assert ranks[1].only["error"] == "StoreLost"
    assert ranks[1].only["took_s"] < 25


def test_a_rank_that_dies_while_the_default_group_is_made_is_named(job):
    ranks = job(
        START
        + """
if RANK == 1:
    dist.init_process_group = lambda *args, **kwargs: os.kill(os.getpid(), signal.SIGKILL)
say(**caught(lambda: start(deadline_s=6)))
""",
        world_size=3,
    )
    for rank in (ranks[0], ranks[2]):
        assert (rank.only["error"], rank.only["ranks"]) == ("MissingRanks", [1]), rank.output
        assert rank.only["took_s"] < 7


STUCK = """
import ctypes
def backend(store, rank, size, timeout):  # as NCCL's: one rank fails, the others never come back
    if rank == 1:
        odd()
    ctypes.CDLL(None).sleep(300)
dist.Backend.register_backend("stuck", backend, devices=["cpu"])
"""


def test_ranks_stuck_in_a_back_end_that_failed_on_another_say_so_and_end(job):
    ranks = job(
        START
        + STUCK
        + """
def odd():
    raise dist.DistBackendError("NCCL error: unhandled cuda error")
say(**caught(lambda: start(backend="stuck", deadline_s=24)))
""",
        world_size=3,
    )
    assert (ranks[1].only["error"], ranks[1].only["ranks"]) == ("StartFailed", [1]), ranks[1].output
    assert "unhandled cuda error" in ranks[1].only["text"] and ranks[1].only["took_s"] < 15
    for rank in (ranks[0], ranks[2]):
        assert rank.code == 1 and not rank.said
        assert (
            "StartFailed: the default group (stuck) could not be made: rank 1: NCCL error: unhandled cuda error" in rank.output
        )


@pytest.mark.parametrize(
    ("odd", "error", "why"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", "MissingRanks", "rank 1 of 3 did not come"),
        ("pass", "StartFailed", "rank 1: it was still being made after"),
    ],
    ids=["a-rank-that-died", "nobody-to-blame"],
)
def test_ranks_stuck_in_a_back_end_end_at_the_deadline_with_the_reason(job, odd, error, why):
    ranks = job(
        START + STUCK + f"def odd():\n    {odd}\n" + 'say(**caught(lambda: start(backend="stuck", deadline_s=8)))', world_size=3
    )
    for rank in (ranks[0], ranks[2]):
        assert rank.code == 1 and f"{error}: " in rank.output and why in rank.output, rank.output


def test_a_failed_start_leaves_no_thread_and_no_descriptor_even_while_its_error_is_kept(job):
    ranks = job(
        START
        + """
kept = []
def fail():
    try:
        start(deadline_s=0.5)
    except Exception as error:
        kept.append(error)
fail()  # libuv opens a pipe for the life of the process
before = held()
fail(), fail()
say(grown=[a - b for a, b in zip(held(), before)], kinds=[type(e).__name__ for e in kept])
""",
        processes=1,
    )
    assert ranks[0].only == {"grown": [0, 0], "kinds": ["MissingRanks"] * 3}


def test_a_rank_that_leaves_by_an_error_is_named_to_those_at_the_end(job):
    ranks = job(
        START
        + """
def work():
    with start(deadline_s=20) as it:
        if RANK == 1:
            raise ValueError("bad batch")
say(**caught(work))
""",
    )
    assert ranks[1].only["error"] == "ValueError"
    assert (ranks[0].only["error"], ranks[0].only["ranks"]) == ("MissingRanks", [1])
    assert "bad batch" in ranks[0].only["text"]


def test_collectives_are_checked_for_as_long_as_asked(job):
    ranks = job(
        START
        + """
def work(correct):
    with start(deadline_s=20, checked_for=5):
        for _ in range(correct):
            dist.all_reduce(torch.ones(2))
        op = dist.ReduceOp.PRODUCT if dist.get_rank() else dist.ReduceOp.SUM
        dist.all_reduce(torch.ones(2), op)
say(early=caught(lambda: work(2))["error"], late=caught(lambda: work(5))["error"])
""",
        environ=lambda rank: {
            "MASTER_PORT": None,
            "MASTER_ADDR": None,
            "RANK": None,
            "WORLD_SIZE": None,
            "OMPI_COMM_WORLD_RANK": str(rank),
            "OMPI_COMM_WORLD_SIZE": "2",
            "OMPI_COMM_WORLD_LOCAL_RANK": str(rank),
            "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
            "PMIX_NAMESPACE": f"checked-{__import__('os').getpid()}",
        },
    )
    for rank in ranks:
        assert rank.only == {"early": "CollectiveMismatch", "late": None}, rank.output


def test_a_folder_serves_instead_of_a_port(job, tmp_path):
    shared = tmp_path / "shared"
    ranks = job(
        START
        + f"""
from pathlib import Path
with start(deadline_s=20, folder=Path({str(shared)!r})) as it:
    x = torch.ones(1)
    dist.all_reduce(x)
say(sum=x.item())
""",
    )
    assert [rank.only["sum"] for rank in ranks] == [2.0, 2.0]
    assert list(shared.iterdir()) == []


def test_the_same_processes_can_have_one_job_after_another(job):
    ranks = job(
        START
        + """
sums = []
for number in range(6):
    with start(deadline_s=30):
        x = torch.ones(1) * number
        dist.all_reduce(x)
        sums.append(x.item())
    if RANK == 0:
        time.sleep(0.05)  # the others knock while the last store has just gone
say(sums=sums)
""",
        world_size=3,
    )
    assert [rank.only["sums"] for rank in ranks] == [[0.0, 3.0, 6.0, 9.0, 12.0, 15.0]] * 3


@pytest.mark.alone
@pytest.mark.parametrize("jobs", [10, pytest.param(50, marks=pytest.mark.nightly)])
def test_many_jobs_on_one_host_start_at_once_without_meeting_each_other(job, tmp_path, jobs):
    """No ports are given: each job derives its own from its run's name, and finds its own store whatever the others took."""
    ranks = job(
        START
        + """
with start(deadline_s=100) as it:
    x = torch.tensor([float(os.environ["NUMBER"])])
    dist.all_reduce(x)
    say(sum=x.item(), number=int(os.environ["NUMBER"]))
""",
        processes=2 * jobs,
        environ=lambda process: {
            **dict.fromkeys(("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")),
            "OMPI_COMM_WORLD_RANK": str(process % 2),
            "OMPI_COMM_WORLD_SIZE": "2",
            "OMPI_COMM_WORLD_LOCAL_RANK": str(process % 2),
            "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
            "PMIX_NAMESPACE": f"{tmp_path.name}-{process // 2}",
            "NUMBER": str(process // 2),
        },
        timeout_s=200,
    )
    for rank in ranks:
        assert rank.only["sum"] == 2 * rank.only["number"]
