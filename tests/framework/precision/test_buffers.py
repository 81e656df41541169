"""Buffers that a collective would read or write wrongly are refused, or worked on in a copy; unguarded, gloo is silently wrong."""

from __future__ import annotations

import pytest
import torch

from dtprobe.framework.precision.buffers import overlaps, unsound

COLUMN = """
import warnings; warnings.simplefilter("ignore")
from dtprobe.framework.precision import guarded
plain(60)
EXACT = torch.stack([torch.arange(16.0).reshape(8, 2) + 100 * rank for rank in range(SIZE)])

def column():
    "A column of this rank's matrix, and what lies beside it."
    matrix = EXACT[RANK].clone()
    return matrix[:, 0], matrix[:, 1]

def reduced(group=None, asynchronous=False):
    view, beside = column()
    work = dist.all_reduce(view, group=group, async_op=asynchronous)
    work.wait() if asynchronous else None
    return view, beside, EXACT[:, :, 0].sum(0)

def broadcast():
    view, beside = column()
    dist.broadcast(view, 1)
    return view, beside, EXACT[1, :, 0]

def reduce():
    view, beside = column()
    dist.reduce(view, 0)
    return view, beside, EXACT[:, :, 0].sum(0) if RANK == 0 else view

def scatter():
    view, beside = column()
    out = torch.empty(8)
    dist.scatter(out, [EXACT[rank][:, 0] for rank in range(SIZE)] if RANK == 1 else None, 1)
    return out, beside, EXACT[RANK][:, 0]

def gathered():
    view, beside = column()
    whole = torch.zeros(SIZE, 8, 2)
    outs = [each[:, 0] for each in whole]
    dist.all_gather(outs, view)
    return torch.stack(outs), beside, EXACT[:, :, 0]

def scattered():
    "Both tensors are columns."
    out = torch.zeros(4, 2)
    dist.reduce_scatter_tensor(out[:, 0], EXACT[RANK][:, 0])
    return out[:, 0], column()[1], EXACT[:, :, 0].sum(0)[RANK * 4 : RANK * 4 + 4]

def mixed_layouts():
    matrix = EXACT[RANK].clone()
    matrix = matrix.t().contiguous().t() if RANK else matrix
    dist.all_reduce(matrix)
    return matrix, column()[1], EXACT.sum(0)

OPS = {call.__name__: call for call in (reduced, broadcast, reduce, scatter, gathered, scattered, mixed_layouts)}

def wrong(call):
    "How many elements are wrong, and how many beside the view have changed."
    found, beside, right = call()
    return [int((found != right).sum()), int((beside != EXACT[RANK][:, 1]).sum())]
"""


def test_gloo_is_silently_wrong_for_a_column_and_right_under_a_guard_that_copies(job):
    ranks = job(
        COLUMN
        + """
bare = {name: wrong(call) for name, call in OPS.items()}
with guarded(policy="copy") as guard:
    sound = {name: wrong(call) for name, call in OPS.items()}
    later = wrong(lambda: reduced(asynchronous=True))
    copies, size = dict(guard.copies), guard.copied_bytes
say(bare=bare, sound=sound, later=later, copies=copies, size=size, after=wrong(reduced))
dist.barrier()
"""
    )
    bare = ranks[0].only["bare"]
    assert [bare[name] for name in ("reduced", "broadcast", "reduce")] == [[4, 4]] * 3
    assert bare["gathered"] == bare["scattered"] == [0, 0]
    assert bare["scatter"][0] == 7 and bare["mixed_layouts"][0] > 0
    for rank in ranks:
        assert set(map(tuple, rank.only["sound"].values())) == {(0, 0)} and rank.only["later"] == [0, 0]
        assert rank.only["after"] == [4, 4]  # the group is what it was
        named = next(name for name in rank.only["copies"] if name.startswith("all_reduce at program.py:"))
        assert named.endswith("reduced: float32 [8] with strides (2,) is not contiguous") and rank.only["copies"][named] == 2
        assert rank.only["size"] >= 32 * len(rank.only["copies"])


def test_a_future_of_a_collective_on_copies_has_the_tensors_that_the_caller_passed(job):
    ranks = job(
        COLUMN
        + """
def into():
    out = torch.zeros(SIZE * 8, 2)[:, 0]
    return [out], dist.all_gather_into_tensor(out, EXACT[RANK][:, 0].contiguous(), async_op=True)

def one():
    view, _ = column()
    return [view], dist.all_reduce(view, async_op=True)

def several():
    outs = [each[:, 0] for each in torch.zeros(SIZE, 8, 2)]
    return [outs], dist.all_gather(outs, EXACT[RANK][:, 0].contiguous(), async_op=True)

def same(given, value):
    return given is value if isinstance(given, torch.Tensor) else all(map(same, given, value)) and len(given) == len(value)

found = {}
with guarded(policy="copy"):
    for call in (into, one, several):
        given, work = call()
        value = work.get_future().wait()
        found[call.__name__] = [type(value).__name__, len(value), same(given, value)]
        work.wait()
say(found=found)
dist.barrier()
"""
    )
    for rank in ranks:
        assert rank.only["found"] == {name: ["list", 1, True] for name in ("into", "one", "several")}


def test_a_guard_refuses_before_anything_is_sent_and_lets_sound_buffers_pass(job):
    ranks = job(
        COLUMN
        + """
def misaligned():
    raw = torch.zeros(64, dtype=torch.bfloat16)
    return raw[1:9]

with guarded() as guard:
    said = {name: caught(call) for name, call in {
        "column": reduced,
        "misaligned": lambda: dist.all_reduce(misaligned()),
        "expanded": lambda: dist.broadcast(torch.ones(1).expand(4), 0),
        "sent": lambda: dist.send(column()[0], 1 - RANK),
    }.items()}
    sound = torch.ones(8)
    dist.all_reduce(sound)
    empty = torch.zeros(0, 3).t()
    dist.all_reduce(empty)
with guarded(alignment=1):
    shifted = misaligned() + 0
    moved = misaligned()
    moved.fill_(1)
    dist.all_reduce(moved)
with guarded(policy="copy"):
    wide = misaligned()
    wide.fill_(1)
    dist.all_reduce(wide)
    expanded = caught(lambda: dist.broadcast(torch.ones(1).expand(4), 0))
say(said=said, sound=sound.tolist(), moved=moved.tolist(), wide=wide.tolist(), expanded=expanded,
    policy=caught(lambda: guarded(policy="both").__enter__()), bytes=caught(lambda: guarded(alignment=3).__enter__()))
dist.barrier()
"""
    )
    for rank in ranks:
        said = rank.only["said"]
        assert {each["error"] for each in said.values()} == {"UnsoundBuffer"}
        assert "is not contiguous" in said["column"]["text"] and "program.py" in said["column"]["text"]
        assert "lies 2 bytes off a multiple of 16" in said["misaligned"]["text"]
        assert "overlaps itself" in said["expanded"]["text"] and rank.only["expanded"]["error"] == "UnsoundBuffer"
        assert rank.only["sound"] == rank.only["moved"] == rank.only["wide"] == [2.0] * 8
        assert rank.only["policy"]["error"] == rank.only["bytes"]["error"] == "UsageError"


def test_ddp_reduces_through_a_guard_that_was_there_first(job):
    ranks = job(
        COLUMN
        + """
from torch.nn.parallel import DistributedDataParallel
with guarded(policy="copy", alignment=1 << 20) as guard:
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(4, 3), process_group=guard)
    model(torch.ones(2, 4) * (RANK + 1)).sum().backward()
    grad = model.module.weight.grad.clone()
    copied = any(name.startswith("all_reduce") for name in guard.copies)
    del model
say(grad=grad.unique().tolist(), copied=copied)
dist.barrier()
"""
    )
    # an alignment of a MiB is more than the bucket has, but for one chance in ten thousand: it is copied, reduced in the copy, and comes back
    assert [rank.only for rank in ranks] == [{"grad": [3.0], "copied": True}] * 2


@pytest.mark.parametrize(
    ("tensor", "why"),
    [
        (torch.zeros(4, 4), ""),
        (torch.zeros(0), ""),
        (torch.zeros(4, 4)[:, 0], "is not contiguous"),
        (torch.zeros(4, 4).t(), "is not contiguous"),
        (torch.zeros(1).expand(3), "overlaps itself"),
        (torch.zeros(8, dtype=torch.float64)[1:], "lies 8 bytes off a multiple of 16"),
    ],
)
def test_what_is_wrong_with_a_buffer_is_said(tensor, why):
    assert unsound(tensor) == why
    assert overlaps(tensor) == (why == "overlaps itself")
