"""Encrypted groups: the same results as gloo's, for every operation, under code that knows nothing of it."""

from __future__ import annotations

import pytest

pytest.importorskip("cryptography")

SECURED = """
import warnings
warnings.simplefilter("ignore")
from dtprobe.framework.transport.secure import MasterSecret, Rotation, SecureGroup, secured
SECRET = MasterSecret(b"s" * 32)
plain()
"""


def test_every_operation_gives_what_gloo_gives(job):
    ranks = job(
        SECURED
        + """
OPS = {name: getattr(dist.ReduceOp, name) for name in ("SUM", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")}
DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.uint8, torch.int32, torch.int64)

def of(dtype, *shape):
    torch.manual_seed(RANK)
    return torch.randint(0, 4, shape).to(dtype)

def everything():
    found = {}
    for name, op in OPS.items():
        for dtype in DTYPES:
            if name.startswith("B") and dtype.is_floating_point:
                continue
            for shape in ((7,),) if name != "SUM" else ((), (0,), (3, 5), (20_011,)):
                x = of(dtype, *shape)
                dist.all_reduce(x, op)
                found[f"all_reduce {name} {dtype} {shape}"] = x
                if name == "SUM" and shape != (0,):
                    y = of(dtype, *shape)
                    dist.reduce(y, 1, op)
                    found[f"reduce {dtype} {shape}"] = y if RANK == 1 else None
    for dtype in (*DTYPES, torch.bool, torch.complex64):
        x = of(dtype, 5, 2)
        dist.broadcast(x, SIZE - 1)
        found[f"broadcast {dtype}"] = x
        parts = [of(dtype, 5, 2) for _ in range(SIZE)]
        dist.all_gather(parts, of(dtype, 5, 2))
        found[f"all_gather {dtype}"] = torch.stack(parts)
        if dtype not in (torch.float32, torch.int64, torch.uint8):  # gloo gathers and scatters no others
            continue
        into = [torch.empty(3, dtype=dtype) for _ in range(SIZE)]
        dist.gather(of(dtype, 3), into if RANK == 1 else None, 1)
        found[f"gather {dtype}"] = torch.stack(into) if RANK == 1 else None
        one = torch.empty(3, dtype=dtype)
        dist.scatter(one, [of(dtype, 3) for _ in range(SIZE)] if RANK == 1 else None, 1)
        found[f"scatter {dtype}"] = one
    x = of(torch.float32, 6, 4)
    whole = torch.empty(6 * SIZE, 4)
    dist.all_gather_into_tensor(whole, x)
    found["all_gather_into_tensor"] = whole
    piece = torch.empty(6, 4)
    dist.reduce_scatter_tensor(piece, whole * (RANK + 1))
    found["reduce_scatter_tensor"] = piece
    piece = torch.empty(4)
    dist.reduce_scatter(piece, [of(torch.float32, 4) + k for k in range(SIZE)])
    found["reduce_scatter"] = piece
    out = torch.empty(SIZE + RANK * SIZE, 2)
    dist.all_to_all_single(out, of(torch.float32, SIZE * (SIZE + 1) // 2, 2), [1 + RANK] * SIZE, [1 + k for k in range(SIZE)])
    found["all_to_all_single"] = out
    out = torch.empty(2 * SIZE)
    dist.all_to_all_single(out, of(torch.float32, 2 * SIZE))
    found["all_to_all_single, equal"] = out
    objects = [None] * SIZE
    dist.all_gather_object(objects, "x" * (RANK + 1) * 50)
    found["objects"] = objects
    big = of(torch.float32, 2_500_003)  # several segments of several records
    dist.all_reduce(big)
    found["big"] = big.sum().item()
    works = [dist.all_reduce(of(torch.float32, 9) + k, async_op=True) for k in range(3)]
    found["async"] = torch.stack([work.get_future().wait()[0] if k else (work.wait(), work.result()[0])[1] for k, work in enumerate(works)])
    mine = of(torch.float32, 4, 4).t()  # not contiguous
    requests = dist.batch_isend_irecv([dist.P2POp(dist.isend, mine.contiguous(), (RANK + 1) % SIZE), dist.P2POp(dist.irecv, whole[:4], (RANK - 1) % SIZE)])
    [request.wait() for request in requests]
    found["batch"] = whole.clone()
    if RANK == 0:
        sends = [dist.isend(torch.full((3,), float(tag)), 1, tag=tag) for tag in (5, 6)]
        [send.wait() for send in sends]
    if RANK == 1:
        a, b = torch.empty(3), torch.empty(3)
        dist.recv(b, 0, tag=6)  # in another order than they were sent
        found["any"] = dist.recv(a, tag=5)
        found["tags"] = torch.stack([a, b])
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 3))
    model(of(torch.float32, 2, 4)).sum().backward()
    found["ddp"] = model.module.weight.grad
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, Replicate, distribute_tensor
    mesh = init_device_mesh("cpu", (SIZE,))
    found["dtensor"] = distribute_tensor(torch.arange(24.0).view(6, 4), mesh, [Shard(1)]).redistribute(mesh, [Replicate()]).to_local()
    pair = dist.new_group([0, 1])
    if RANK < 2:
        x = torch.ones(3) * (RANK + 1)
        dist.all_reduce(x, group=pair)
        found["pair"] = x
        kind = type(pair).__name__
        dist.destroy_process_group(pair)
    else:
        kind = None
    dist.barrier()
    return found, kind

def same(a, b):
    # DDP's average of three rounds in another order than gloo's; all else is exact in these small integers
    return torch.allclose(a, b) if isinstance(a, torch.Tensor) else a == b

torch.manual_seed(0)
expected, _ = everything()
with secured(SECRET, rotation=Rotation(records=16)):
    world = type(dist.group.WORLD).__name__
    torch.manual_seed(0)
    found, kind = everything()
dist.all_reduce(torch.ones(1))
kind_after = type(dist.group.WORLD).__name__
wrong = [name for name in expected if not same(found[name], expected[name])]
say(wrong=wrong, compared=len(expected), world=world, pair=kind, after=kind_after)
""",
        world_size=3,
    )
    for rank in ranks:
        assert rank.only["wrong"] == [] and rank.only["compared"] > 100, rank.output
        assert rank.only["world"] == "SecureGroup"
    assert [rank.only["pair"] for rank in ranks] == ["SecureGroup", "SecureGroup", None]
    assert [rank.only["after"] for rank in ranks] == ["ProcessGroup"] * 3


def test_a_script_that_makes_its_own_group_is_encrypted_from_the_start_and_rotates_under_way(job):
    ranks = job(
        SECURED.replace("plain()", "")
        + """
with secured(SECRET):
    plain()
    world = dist.group.WORLD
    x = torch.ones(5)
    epochs = []
    for step in range(3):
        dist.all_reduce(x)
        epochs.append([sealer.epoch for sealer, _ in world._wire._sealers.values()])
        world.rotate()
say(world=type(world).__name__, value=x.tolist(), epochs=epochs)
dist.barrier()
dist.destroy_process_group()
""",
    )
    for rank in ranks:
        assert rank.only == {"world": "SecureGroup", "value": [8.0] * 5, "epochs": [[0], [1], [2]]}


def test_another_secret_is_found_before_anything_is_sent_and_the_rank_is_named_on_all(job):
    ranks = job(
        SECURED.replace("plain()", "")
        + """
def work():
    with secured(MasterSecret((b"t" if RANK == 1 else b"s") * 32), timeout_s=20):
        plain()
        dist.all_reduce(torch.ones(4))
say(**caught(work), initialized=dist.is_initialized())
""",
        world_size=3,
    )
    for rank in ranks:
        assert (rank.only["error"], rank.only["ranks"], rank.only["initialized"]) == ("WrongSecret", [1], False), rank.output
        assert "ranks 0, 2 against rank 1" in rank.only["text"]


def test_a_rank_without_encryption_is_named_at_the_deadline(job):
    ranks = job(
        SECURED
        + """
import contextlib
def work():
    with secured(SECRET, timeout_s=1) if RANK else contextlib.nullcontext():
        if RANK:
            dist.all_reduce(torch.ones(4))
say(**caught(work), front=type(dist.group.WORLD).__name__)
dist.barrier()
""",
        world_size=3,
    )
    assert ranks[0].only["error"] is None
    for rank in ranks[1:]:
        assert (rank.only["error"], rank.only["ranks"], rank.only["front"]) == ("MissingRanks", [0], "ProcessGroup"), (
            rank.output
        )


def test_what_a_rank_changes_repeats_or_withholds_on_the_way_is_refused_by_its_receiver(job):
    """A man in the middle who reaches into rank 0's gloo group: each of its messages is what he wants it to be."""
    ranks = job(
        SECURED
        + """
kept = []

def reach_in(world, change):
    inner = world.inner
    class Between:
        def __getattr__(self, name):
            return getattr(inner, name)
        def send(self, tensors, to, tag):
            tensors[0].copy_(change(tensors[0].clone()))
            return inner.send(tensors, to, tag)
    world._inner = Between()

def flipped(message):
    message[-20] ^= 1
    return message

def repeated(message):
    kept.append(message.clone())
    return kept[0]

found = {}
for name, change in {"flip": flipped, "replay": repeated, "mismatch": None}.items():
    with secured(SECRET):
        world = dist.group.WORLD
        if RANK == 0:
            if change:
                reach_in(world, change)
            dist.send(torch.arange(8.0), 1)
            dist.send(torch.arange(8.0), 1)
        else:
            x = torch.ones(8, dtype=torch.float32 if change else torch.int32)
            found[name] = [caught(lambda: dist.recv(x, 0)) | {"x": x.tolist()} for _ in range(2)]
    kept.clear()
    dist.barrier()
say(found=found)
""",
    )
    found = ranks[1].only["found"]
    assert [each["error"] for each in found["flip"]] == ["Tampered", "OutOfOrder"]
    assert [each["error"] for each in found["replay"]] == [None, "Replayed"]
    assert [each["error"] for each in found["mismatch"]] == ["Mismatched", "OutOfOrder"]
    assert found["flip"][0]["ranks"] == [0] and found["flip"][0]["x"] == [0.0] * 8
    assert found["replay"][0]["x"] == [float(number) for number in range(8)]


def test_what_cannot_be_encrypted_is_refused_instead_of_sent(job):
    ranks = job(
        SECURED
        + """
with secured(SECRET):
    world = dist.group.WORLD
    x = torch.ones(4)
    found = [
        caught(lambda: dist.all_reduce(x.to_sparse())),
        caught(lambda: dist.all_reduce(torch.ones(4, device="meta"))),
        caught(lambda: dist.all_reduce(x, dist._make_nccl_premul_sum(2.0))),
        caught(lambda: world.split_group([0])),
        caught(lambda: dist.send(x, 1 - RANK, tag=2**30)),
    ]
    dist.all_reduce(x)
say(found=[each["error"] for each in found], value=x.tolist())
""",
    )
    for rank in ranks:
        assert rank.only == {"found": ["NotCovered"] * 5, "value": [2.0] * 4}, rank.output


def test_a_killed_peer_is_an_error_that_names_it_and_the_next_call_fails_at_once(job):
    ranks = job(
        SECURED
        + """
with secured(SECRET):
    dist.all_reduce(torch.ones(4))
    if RANK == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    first = caught(lambda: dist.all_reduce(torch.ones(100_000)))
    second = caught(lambda: dist.all_reduce(torch.ones(4)))
say(first=first, second=second)
os._exit(0)
""",
    )
    first, second = ranks[0].said[0]["first"], ranks[0].said[0]["second"]
    assert (first["error"], first["ranks"]) == ("PeerSilent", [1]) and first["took_s"] < 10
    assert second["error"] == "FrameworkError" and "broken" in second["text"] and second["took_s"] < 1


def test_a_secured_block_leaves_no_thread_or_descriptor_behind(job):
    ranks = job(
        SECURED
        + """
def block():
    with secured(SECRET):
        group = dist.new_group()
        dist.all_reduce(torch.ones(3), group=group)
        dist.all_reduce(torch.ones(3))
        dist.destroy_process_group(group)
        with Groups(timeout_s=20) as groups:
            scoped = groups.create("scoped")
            dist.all_reduce(torch.ones(3), group=scoped, async_op=True).wait()
    left.append(scoped.leftover())
from dtprobe.framework.groups import Groups
left = []
block()
dist.barrier()
before = held()
for _ in range(5):
    block()
dist.barrier()
say(grown=[a - b for a, b in zip(held(), before)], left=left)
""",
    )
    for rank in ranks:
        assert rank.only["grown"][0] <= 0 and rank.only["grown"][1] <= 0 and not any(rank.only["left"]), rank.output
