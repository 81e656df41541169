"""Groups: agreed creation, real end, abort, on real gloo."""

from __future__ import annotations

GROUPS = """
from dtprobe.framework.groups import Groups, scoped_world
plain()
"""


def test_a_hundred_cycles_grow_nothing_while_every_kind_of_reference_is_kept(job):
    ranks = job(
        GROUPS
        + """
kept = []
def fail(group):
    work = dist.all_reduce(torch.ones(1), group=group, async_op=True)
    work.wait()
    raise RuntimeError("its frames hold the group and a work")
def cycle(groups):
    with groups.scope("step") as group:
        x = torch.ones(4)
        dist.all_reduce(x, group=group)
        assert x[0] == SIZE
        work = dist.all_reduce(x, group=group, async_op=True)
        kept.extend([group, work, work.get_future()])
        work.wait()
        try:
            fail(group)
        except RuntimeError as error:
            kept.append(error)
        kept.append(torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2), process_group=group))
with Groups(timeout_s=20) as groups:
    cycle(groups)
    before = held()
    for _ in range(100):
        cycle(groups)
    dist.barrier()
    say(grown=[a - b for a, b in zip(held(), before)], kinds=sorted({type(each).__name__ for each in kept}),
        leftover=sum(each.leftover() for each in kept if hasattr(each, "leftover")))
""",
    )
    for rank in ranks:
        assert rank.only["grown"][0] == 0 and rank.only["grown"][1] <= 0
        assert {"ScopedGroup", "ForwardedWork", "Future", "DistributedDataParallel", "RuntimeError"} <= set(rank.only["kinds"])
        assert rank.only["leftover"] == 0


def test_torchs_own_groups_do_grow_so_the_measure_sees_it(job):
    ranks = job(
        GROUPS
        + """
kept = []
before = held()
for _ in range(5):
    group = dist.new_group()
    dist.all_reduce(torch.ones(1), group=group)
    kept.append(group)
    dist.destroy_process_group(group)
say(grown=[a - b for a, b in zip(held(), before)])
""",
    )
    for rank in ranks:
        assert rank.only["grown"][0] >= 10 and rank.only["grown"][1] >= 15


def test_a_handle_of_an_ended_group_says_so(job):
    ranks = job(
        GROUPS
        + """
with Groups(timeout_s=20) as groups:
    group = groups.create("g")
    work = group.allreduce([torch.ones(1)])
    groups.end("g")
    say(use=caught(lambda: group.allreduce([torch.ones(1)])), again=groups.create("g") is not None)
""",
    )
    for rank in ranks:
        assert rank.only["use"]["error"] == "GroupEnded" and "'g'" in rank.only["use"]["text"]
        assert rank.only["again"]


def test_groups_made_in_another_order_are_refused_where_torch_swaps_them_silently(job):
    ranks = job(
        GROUPS
        + """
def swapped(make):
    names = ["a", "b"] if RANK == 0 else ["b", "a"]
    groups = {name: make(name) for name in names}
    values = {"a": torch.tensor([RANK + 1.0]), "b": torch.tensor([100 * (RANK + 1.0)])}
    works = [dist.all_reduce(values[name], group=groups[name], async_op=True) for name in values]
    for work in works:
        work.wait()
    return [value.item() for value in values.values()]
silent = swapped(lambda name: dist.new_group([0, 1]))
with Groups(timeout_s=20) as groups:
    say(silent=silent, refused=caught(lambda: swapped(lambda name: groups.create(name, [0, 1]))), made=list(groups))
""",
    )
    assert sorted(ranks[0].only["silent"] + ranks[1].only["silent"]) == [102.0, 102.0, 201.0, 201.0]
    for rank in ranks:
        assert rank.only["refused"]["error"] == "GroupMismatch"
        assert "rank 0 a, rank 1 b" in rank.only["refused"]["text"]
        assert rank.only["made"] == []


def test_several_groups_made_at_once_come_in_one_order_whatever_the_mapping(job):
    ranks = job(
        GROUPS
        + """
wanted = {"a": [0, 1], "b": [0, 1]}
with Groups(timeout_s=20) as groups:
    groups.create_all(wanted if RANK == 0 else dict(reversed(wanted.items())))
    x = torch.ones(1) * (RANK + 1)
    dist.all_reduce(x, group=groups["a"])
    say(sum=x.item())
""",
    )
    assert [rank.only["sum"] for rank in ranks] == [3.0, 3.0]


def test_what_differs_is_named_with_the_rank_that_is_alone_in_it(job):
    ranks = job(
        GROUPS
        + """
with Groups(timeout_s=20) as groups:
    odd = RANK == 2
    say(ranks=caught(lambda: groups.create("g", [0, 1] if odd else [0, 1, 2])),
        timeout=caught(lambda: groups.create("g", timeout_s=7 if odd else 9)),
        backend=caught(lambda: groups.create("g", backend="fake" if odd else "gloo")))
    if odd:
        dist.distributed_c10d._world.group_count += 1
    say(count=caught(lambda: groups.create("g")))
""",
        world_size=3,
    )
    for rank in ranks:
        assert rank.code == 0, rank.output
        for field, facts in {**rank.said[0], **rank.said[1]}.items():
            assert (facts["error"], facts["ranks"]) == ("GroupMismatch", [2]), (field, facts)


def test_a_rank_that_does_not_create_the_group_is_named(job):
    ranks = job(
        GROUPS
        + """
groups = Groups(timeout_s=20)
if RANK == 1:
    time.sleep(2)
say(**caught(lambda: groups.create("late", timeout_s=1)))
dist.barrier()  # rank 0's process serves the store
""",
        world_size=3,
    )
    for rank in ranks:
        assert (rank.only["error"], rank.only["ranks"]) == ("MissingRanks", [1])


def test_a_timeout_is_passed_on_to_the_groups_collectives(job):
    ranks = job(
        GROUPS
        + """
with Groups(timeout_s=1) as groups:
    group = groups.create("short")
    if RANK == 0:
        say(**caught(lambda: dist.all_reduce(torch.ones(1), group=group)))
    dist.barrier()
""",
    )
    assert ranks[0].only["error"] == "RuntimeError" and ranks[0].only["took_s"] < 10
    assert ranks[1].code == 0


def test_ranks_outside_a_group_take_part_in_its_creation_and_get_nothing(job):
    ranks = job(
        GROUPS
        + """
with Groups(timeout_s=20) as groups:
    group = groups.create("pair", [2, 0])
    x = torch.ones(1)
    if group is not None:
        dist.all_reduce(x, group=group)
    say(sum=x.item(), member=group is not None, lookup=caught(lambda: groups["pair"])["error"])
""",
        world_size=3,
    )
    assert [(rank.only["sum"], rank.only["member"], rank.only["lookup"]) for rank in ranks] == [
        (2.0, True, None),
        (1.0, False, "UsageError"),
        (2.0, True, None),
    ]


def test_the_end_does_not_wait_for_a_collective_whose_peer_never_comes(job):
    ranks = job(
        GROUPS
        + """
with Groups(timeout_s=60) as groups:
    dist.barrier()  # the registries' connections to the store, which rank 0 serves, are there
    before = held()
    group = groups.create("g")
    if RANK == 0:
        work = dist.all_reduce(torch.ones(1), group=group, async_op=True)
        begun = time.monotonic()
        groups.end("g")
        say(ended_s=time.monotonic() - begun, wait=caught(work.wait), grown=[a - b for a, b in zip(held(), before)])
    dist.barrier()
""",
    )
    assert ranks[0].only["ended_s"] < 10  # of 60
    assert ranks[0].only["wait"]["error"] == "GroupEnded"
    assert ranks[0].only["grown"][0] == 0 and ranks[0].only["grown"][1] <= 0


def test_an_abort_from_another_thread_ends_a_blocked_collective_and_leaves_foreign_connections_alone(job):
    ranks = job(
        GROUPS
        + """
import socket, threading
server = socket.create_server(("127.0.0.1", 0))
with Groups(timeout_s=60) as groups:
    mine = socket.create_connection(server.getsockname())
    group, other = groups.create("g"), groups.create("other")
    if RANK == 0:
        threading.Timer(0.3, group.abort).start()
        say(**caught(lambda: dist.all_reduce(torch.ones(1), group=group)))
    x = torch.ones(1)
    dist.all_reduce(x, group=other)
    theirs, _ = server.accept()
    mine.sendall(b"x")
    say(other=x.item(), foreign=theirs.recv(1).decode())
""",
    )
    assert ranks[0].said[0]["error"] == "RuntimeError" and ranks[0].said[0]["took_s"] < 20
    assert ranks[0].said[1] == {"other": 2.0, "foreign": "x"}


def test_a_signal_interrupts_a_blocked_collective(job):
    ranks = job(
        GROUPS
        + """
import threading
from dtprobe.framework.interrupt import interruptible
signal.signal(signal.SIGINT, signal.default_int_handler)
with Groups(timeout_s=60) as groups:
    group = groups.create("g")
    if RANK == 0:
        threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
        begun, found = time.monotonic(), None
        try:
            with interruptible(group):
                dist.all_reduce(torch.ones(1), group=group)
        except KeyboardInterrupt:
            found = "KeyboardInterrupt"
        say(found=found, took_s=time.monotonic() - begun, threads=[t.name for t in threading.enumerate() if "dtprobe" in t.name])
    dist.barrier()
""",
    )
    assert ranks[0].only["found"] == "KeyboardInterrupt" and ranks[0].only["took_s"] < 20 and ranks[0].only["threads"] == []


def test_the_default_group_really_ends_too(job):
    ranks = job(
        """
from dtprobe.framework.groups import scoped_world
before = held()
plain()
world = scoped_world()
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
model(torch.ones(1, 2)).sum().backward()
dist.barrier()
world.end()
say(initialized=dist.is_initialized(), grown=[a - b for a, b in zip(held(), before)], use=caught(lambda: world.allreduce([torch.ones(1)]))["error"])
""",
    )
    for rank in ranks:
        assert not rank.only["initialized"] and rank.only["use"] == "GroupEnded"
        assert rank.only["grown"][0] == 0 and rank.only["grown"][1] <= 2, rank.output  # libuv keeps a pipe


def test_a_device_mesh_and_functional_collectives_accept_a_scoped_group(job):
    ranks = job(
        GROUPS
        + """
import torch.distributed._functional_collectives as funcol
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, Replicate, distribute_tensor
world = scoped_world()
with Groups(timeout_s=20) as groups:
    group = groups.create("axis")
    mesh = DeviceMesh.from_group(group, "cpu", mesh=list(range(SIZE)))
    full = torch.arange(14.0).reshape(7, 2)
    same = torch.equal(distribute_tensor(full, mesh, [Shard(0)]).redistribute(mesh, [Replicate()]).to_local(), full)
    total = funcol.all_reduce(torch.ones(1), "sum", group).item()
    gathered = funcol.all_gather_tensor(torch.ones(1) * RANK, 0, group).tolist()
    say(same=same, total=total, gathered=gathered)
""",
    )
    for rank in ranks:
        assert rank.only == {"same": True, "total": 2.0, "gathered": [0.0, 1.0]}
