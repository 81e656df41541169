"""The consistency check: what differs between ranks is found to the bit and names who holds what; what is equal never alarms."""

from __future__ import annotations

import math
import threading

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dtprobe.errors import UsageError
from dtprobe.framework.agreement import Agreement
from dtprobe.framework.consistency import FIELDS, digest
from dtprobe.framework.consistency.compare import PAGE, Comparison, cuts
from dtprobe.framework.consistency.digest import BLOCK, WORDS, block_sums, weights
from dtprobe.framework.consistency.entries import entries
from dtprobe.framework.consistency.judges import CAMPS
from dtprobe.framework.consistency.meeting import Meeting
from dtprobe.framework.consistency.report import Report, place, spans, verdict_of

USED = """
from dtprobe.framework.consistency import *
plain(60)
torch.manual_seed(0)

def told(state, **options):
    '''What require_consistent did: the error's facts and the first differences as the report has them.'''
    try:
        report = require_consistent(state, timeout_s=options.pop("timeout_s", 30), **options)
    except Inconsistent as error:
        report = error.report
        return {"error": "Inconsistent", "ranks": list(error.ranks), "decided": error.decided, "text": str(error), "more": report.more,
                "found": [[one.name, one.field, one.index, one.at and list(one.at),
                           [[list(held.ranks), held.text, held.bits] for held in one.held]] for one in report.differences]}
    except Exception as error:
        return {"error": type(error).__name__, "ranks": list(getattr(error, "ranks", ())), "text": str(error)}
    return {"error": None, "text": str(report), "alone": list(report.alone)}
"""


def test_one_flipped_bit_among_ten_million_is_found_exactly_where_norm_and_loss_see_nothing(job):
    ranks = job(
        USED
        + """
x = torch.randn(1000, 10_000)
flat = x.view(-1).view(torch.int32)
norm, loss = torch.linalg.vector_norm(x), x.square().mean()
said = [told(x)]
for bad in range(SIZE):
    for index in (0, 9_999_999, 1_234_567 * (bad + 1)):
        if RANK == bad:
            flat[index] ^= 1
        said.append([bad, index, flat[index].item(), told({"w": x}), norm.equal(torch.linalg.vector_norm(x)), loss.equal(x.square().mean())])
        if RANK == bad:
            flat[index] ^= 1
say(said=said)
dist.barrier()
""",
        world_size=3,
    )
    healthy, *faults = zip(*[rank.only["said"] for rank in ranks], strict=True)
    assert [one["error"] for one in healthy] == [None] * 3
    assert len(faults) == 9
    for fault in faults:
        bad, index = fault[0][:2]
        bits = {rank: f"{each[2] & 0xFFFFFFFF:08x}" for rank, each in enumerate(fault)}
        for _, _, _, told, norm_is_blind, loss_is_blind in fault:
            assert norm_is_blind and loss_is_blind
            assert (told["error"], told["ranks"], told["decided"]) == ("Inconsistent", [bad], True)
            [(name, field, found, at, held)] = told["found"]
            assert (name, field, found, at) == ("w", "values", index, [index // 10_000, index % 10_000])
            good = [rank for rank in range(3) if rank != bad]
            assert [(ranks, bits) for ranks, _, bits in held] == [(good, bits[good[0]]), ([bad], bits[bad])]
            assert [float(text) for _, text, _ in held] == [
                np.array([int(held[k][2], 16)], np.uint32).view(np.float32)[0].item() for k in (0, 1)
            ]
            assert "1 of 611 blocks" in told["text"]


CASES = {
    # name: (state of a rank, options, what is found first: (name, field), who deviates or None where nothing decides)
    "dtype": ("torch.ones(3, dtype=torch.int32 if odd else torch.float32)", "", ("value", "dtypes"), [1]),
    "shape": ("torch.ones(3 + odd)", "", ("value", "shapes"), [1]),
    "shape, all three": ("torch.ones(3 + RANK)", "", ("value", "shapes"), None),
    "a name": ("{'x': 1, 'z' if odd else 'y': 2}", "", ("y", "names"), [1]),
    "an entry too many": ("{'x': 1} | ({'y': 2} if odd else {})", "", ("y", "names"), [1]),
    "order": ("{'x': 1, 'y': 2} if odd else {'y': 2, 'x': 1}", "", ("y", "order"), [1]),
    "strides": ("torch.ones(4, 5) if odd else torch.ones(5, 4).t()", "", ("value", "strides"), [1]),
    "requires_grad": ("torch.ones(2, requires_grad=odd)", "", ("value", "requires_grad"), [1]),
    "the sign of zero": ("torch.tensor([0.0, -0.0 if odd else 0.0])", "", ("value", "values"), [1]),
    "a NaN's payload": (
        "torch.tensor([0x7FC00000 + odd], dtype=torch.int32).view(torch.float32)",
        "",
        ("value", "values"),
        [1],
    ),
    "no gradient here": ("{'grad': None if odd else torch.ones(2)}", "", ("grad", "dtypes"), [1]),
    "a number": ("{'lr': 0.2 if odd else 0.1}", "", ("lr", "values"), [1]),
    "a number's type": ("{'lr': 1 if odd else 1.0}", "", ("lr", "dtypes"), [1]),
    "random numbers to come": ("(torch.rand(1 + odd), rng_state())[1]", "", ("cpu", "values"), [1]),
    "only shapes asked": ("torch.ones(3 + odd)", "what=('shapes',)", ("value", "shapes"), [1]),
    "a buffer": ("bent(torch.nn.BatchNorm1d(4), 'running_var')", "", ("running_var", "values"), [1]),
    "optimizer state": ("stepped()", "", ("group0.param1.exp_avg", "values"), [1]),
    "an option of the optimizer": ("stepped(lr=0.3 if odd else 0.1)", "what=('order', 'values')", ("group0.lr", "values"), [1]),
}

AGREE = {
    "the same": "torch.arange(5)",
    "nothing": "{}",
    "no elements": "torch.empty(3, 0)",
    "strides of dims of one element": "torch.ones(4, 1) if odd else torch.ones(1, 4).t()",
    "values not asked": "(torch.rand(3) * RANK, 'shapes')",
    "order not asked": "({'x': 1, 'y': 2} if odd else {'y': 2, 'x': 1}, 'values')",
    "a view of another layout": "(torch.ones(4, 5) if odd else torch.ones(5, 4).t(), 'values')",
    "a conjugate view": "(torch.tensor([1 + 2j]) if odd else torch.tensor([1 - 2j]).conj(), 'values')",
    "an aligned and an unaligned part": "torch.arange(odd, 9 + odd, dtype=torch.uint8)[1 - odd:9 - odd][:8] if odd else torch.arange(9, dtype=torch.uint8)[1:]",
}


def test_each_kind_of_difference_is_found_and_names_the_rank(job):
    cases = {name: (f"lambda: {state}", options) for name, (state, options, _, _) in CASES.items()}
    ranks = job(
        USED
        + """
odd = RANK == 1
def bent(module, name):
    if odd:
        getattr(module, name)[3] += 1
    return module
def stepped(**options):
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), **options)
    for parameter in model.parameters():  # as a step leaves it, without the seconds that the first one takes to import
        optimizer.state[parameter] = {"step": torch.tensor(1.0), "exp_avg": torch.zeros_like(parameter)}
    if odd and not options:
        optimizer.state[model.bias]["exp_avg"][1] += 1
    return optimizer
"""
        + "cases = {"
        + ", ".join(f"{name!r}: ({state}, dict({options}))" for name, (state, options) in cases.items())
        + "}\n"
        + "say(**{name: told(state(), **options) for name, (state, options) in cases.items()})\ndist.barrier()\n",
        world_size=3,
    )
    assert ranks[0].only == ranks[1].only == ranks[2].only
    for name, (_, _, first, who) in CASES.items():
        told = ranks[0].only[name]
        assert told["error"] == "Inconsistent", (name, told)
        assert tuple(told["found"][0][:2]) == first, (name, told)
        assert (told["ranks"], told["decided"]) == ((who, True) if who else ([0, 1, 2], False)), (name, told)
        assert who is None or "rank 1" in told["text"]


def test_what_is_equal_in_all_that_was_asked_never_alarms(job):
    lines = [
        f"{name!r}: told(({state})[0], what=[({state})[1]])"
        if state.endswith(("'values')", "'shapes')"))
        else f"{name!r}: told({state})"
        for name, state in AGREE.items()
    ]
    ranks = job(USED + "odd = int(RANK == 1)\nsay(**{" + ", ".join(lines) + "})\ndist.barrier()\n", world_size=3)
    for rank in ranks:
        assert {name: told["error"] for name, told in rank.only.items()} == dict.fromkeys(AGREE), rank.output


def test_of_two_ranks_both_are_listed_and_nothing_is_decided(job):
    for rank in job(USED + "say(**told(torch.tensor([1.0, 2.0 + RANK])))\ndist.barrier()\n"):
        assert (rank.only["ranks"], rank.only["decided"]) == ([0, 1], False)
        assert rank.only["found"][0][4] == [[[0], "2.0", "40000000"], [[1], "3.0", "40400000"]]
        assert "undecided" in rank.only["text"]


def test_what_cannot_be_compared_is_refused_on_every_rank_naming_the_one_that_has_it(job):
    states = {
        "meta": "torch.empty(2, device='meta')",
        "sparse": "torch.eye(2).to_sparse()",
        "quantized": "torch.quantize_per_tensor(torch.ones(2), 1.0, 0, torch.quint8)",
        "jagged": "torch.nested.nested_tensor([torch.ones(2)], layout=torch.jagged)",
        "a function": "print",
        "a set": "{1, 2}",
        "two of one name": "iter([('w', torch.ones(1)), ('w', torch.ones(1))])",
        "no pairs": "iter([1])",
    }
    lines = ", ".join(f"{name!r}: told({state} if RANK == 1 else torch.ones(2))" for name, state in states.items())
    other = "other=told(1, step=RANK // 2), kind=caught(lambda: require_distinct(1) if RANK == 1 else check(1))"
    broken = """
class Broken(dict):
    def items(self):
        raise OSError("the disk is gone")
say(broken=told(Broken() if RANK == 1 else {}), after=told(torch.ones(2)))
dist.barrier()
"""
    ranks = job(USED + f"say(**{{{lines}}}, {other})\n" + broken, world_size=3)
    for rank in ranks:
        refused, broken = rank.said
        for name in states:
            assert (refused[name]["error"], refused[name]["ranks"]) == ("Incomparable", [1]), (name, refused[name])
        assert (refused["other"]["error"], refused["other"]["ranks"]) == ("Incomparable", [2])
        assert "ranks 0-1: step 0; rank 2: step 1" in refused["other"]["text"]
        assert (refused["kind"]["error"], refused["kind"]["ranks"]) == ("Incomparable", [1])
        assert broken["broken"]["error"] == ("OSError" if rank.rank == 1 else "Incomparable")
        assert "the disk is gone" in broken["broken"]["text"]
        assert broken["after"]["error"] is None


def test_a_rank_that_never_comes_is_named_on_the_others_and_on_itself_and_the_next_check_works(job):
    ranks = job(
        USED
        + """
told(1)
if RANK == 1:
    time.sleep(2)
say(**told(torch.ones(3), timeout_s=0.7))
say(**told(torch.ones(3)))
if RANK == 2:
    os._exit(0)
say(**told(torch.ones(3), timeout_s=0.7))
""",
        world_size=3,
    )
    for rank in ranks:
        assert (rank.said[0]["error"], rank.said[0]["ranks"]) == ("MissingRanks", [1])
        assert rank.said[1]["error"] is None
    for rank in ranks[:2]:
        assert (rank.said[2]["error"], rank.said[2]["ranks"]) == ("MissingRanks", [2])


def test_a_check_of_some_ranks_leaves_the_others_alone_and_names_global_ranks(job):
    ranks = job(
        USED
        + """
group = dist.new_group([0, 2, 3])
if RANK == 1:
    say(error=caught(lambda: check(1, group=group)))
else:
    before = None
    for _ in range(40):
        check(torch.ones(2), group=group)
        before = before or held()
    say(grown=[a - b for a, b in zip(held(), before)], **told(torch.ones(2) * (RANK == 2), group=group))
dist.barrier()
""",
        world_size=4,
    )
    assert ranks[1].only["error"]["error"] == "UsageError"
    for rank in (ranks[0], ranks[2], ranks[3]):
        assert (rank.only["error"], rank.only["ranks"], rank.only["grown"]) == ("Inconsistent", [2], [0, 0])


def test_a_dtensors_part_is_compared_among_the_ranks_that_hold_it_and_its_place_is_global(job):
    ranks = job(
        USED
        + """
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
parts = [Replicate(), Shard(0)]
one = distribute_tensor(torch.arange(21.0).view(7, 3), mesh, parts)
healthy = told({"one": one})
if RANK == 3:
    one.to_local()[2, 1] += 1
bad = told({"plain": torch.ones(2), "one": one})
alone = told(distribute_tensor(torch.rand(4, 4), mesh, [Shard(0), Shard(1)]))
partial = told(DTensor.from_local(torch.ones(2), mesh, [Replicate(), Partial()]))
placed = told(distribute_tensor(torch.ones(4, 4), mesh, [Replicate(), Shard(RANK % 2)], src_data_rank=None))
say(healthy=healthy, bad=bad, alone=alone, partial=partial, placed=placed)
dist.barrier()
""",
        world_size=4,
    )
    for rank in ranks:
        said = rank.only
        assert said["healthy"] == {"error": None, "text": said["healthy"]["text"], "alone": []}
        assert (said["bad"]["ranks"], said["bad"]["decided"]) == ([1, 3], False)
        # rank 3 holds rows 4 to 6 of 7
        assert said["bad"]["found"] == [
            ["one", "values", 7, [6, 1], [[[1], "19.0", "41980000"], [[3], "20.0", "41a00000"]]],
        ]
        assert said["alone"]["error"] is None and said["alone"]["alone"] == ["value"]
        assert (said["partial"]["error"], said["partial"]["ranks"]) == ("Incomparable", [0, 1, 2, 3])
        assert said["placed"]["found"][0][:2] == ["value", "placements"]


def test_batches_that_two_ranks_share_are_found_and_different_ones_pass(job):
    ranks = job(
        USED
        + """
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler
data = TensorDataset(torch.rand(24, 3), torch.arange(24))
def first(rank, **options):
    return next(iter(DataLoader(data, batch_size=4, sampler=DistributedSampler(data, SIZE, rank, **options))))
def of(batch, **options):
    return caught(lambda: require_distinct(batch, timeout_s=30, **options))
say(
    good=of(first(RANK)),
    wrong_rank=of(first(min(RANK, 1))),
    empty=of(torch.empty(0, 3)),
    overlap=of(torch.arange(4) + 2 * RANK, by_sample=True),
    unseen=of(torch.arange(4) + 2 * RANK),
    apart=of((torch.arange(4) + 4 * RANK, torch.zeros(4)), by_sample=True),
    lengths=of((torch.arange(4), torch.zeros(3)), by_sample=True),
)
dist.barrier()
""",
        world_size=3,
    )
    for rank in ranks:
        said = rank.only
        assert [said[name]["error"] for name in ("good", "empty", "unseen", "apart")] == [None] * 4
        assert (said["wrong_rank"]["error"], said["wrong_rank"]["ranks"]) == ("NotDistinct", [1, 2])
        assert (said["overlap"]["error"], said["overlap"]["ranks"]) == ("NotDistinct", [0, 1, 2])
        assert "ranks 0-1 share 2 samples: 2 of rank 0, 0 of rank 1 first" in said["overlap"]["text"]
        assert said["lengths"]["error"] == "Incomparable"


TRAINED = (
    USED
    + """
from torch.nn.parallel import DistributedDataParallel
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.LayerNorm(16), torch.nn.Dropout(0.1), torch.nn.ReLU(), torch.nn.Linear(16, 2))
ddp = DistributedDataParallel(model)
torch.manual_seed(RANK)
def train(steps, after, every, optimizer=None):
    guard = Every(every, timeout_s=60)
    checked = 0
    for step in range(steps):
        ddp(torch.randn(4, 8)).square().mean().backward()
        after(step)
        if optimizer:
            optimizer.step()
        else:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter -= 0.1 * parameter.grad
        ddp.zero_grad()
        checked += guard(step, {"model": model} | ({"optimizer": optimizer} if optimizer else {})) is not None
    return checked
"""
)


def test_a_training_that_drifts_is_stopped_at_the_next_check(job):
    drift = """
def lose(step):
    if RANK == 1 and step == 4:
        model[4].bias.grad = torch.autograd.grad(model(torch.ones(1, 8)).sum(), model[4].bias)[0]  # not reduced
unseen = train(4, lambda step: None, 3)
say(unseen=unseen, **caught(lambda: train(9, lose, 3)))
dist.barrier()
"""
    for rank in job(TRAINED + drift, world_size=3):
        assert rank.only["unseen"] == 2
        assert (rank.only["error"], rank.only["ranks"]) == ("Inconsistent", [1])
        assert "at step 6" in rank.only["text"] and "'model.4.bias'" in rank.only["text"]


@pytest.mark.nightly
def test_a_thousand_healthy_steps_of_ddp_raise_no_alarm(job):
    for rank in job(
        TRAINED + "say(checked=train(1000, lambda step: None, 1, torch.optim.AdamW(ddp.parameters())))\ndist.barrier()\n",
        timeout_s=240,
    ):
        assert rank.only == {"checked": 1000}


def compared(states: list[object], what: tuple[str, ...] = FIELDS, limit: int = 8) -> list[Report]:
    """What each of as many ranks reports, as threads of this process over one store."""
    store = dist.HashStore()
    members = tuple(range(len(states)))
    reports: dict[int, Report] = {}

    def rank(number: int) -> None:
        agreement = Agreement(store, rank=number, members=members, prefix="test")
        meeting = Meeting(agreement, rank=number, members=members, label="threads")
        own = Comparison(entries(states[number], members), what)
        said = {"call": "check", "what": list(what), "step": None}
        reports[number] = own.across(meeting, said, timeout_s=30, limit=limit)

    threads = [threading.Thread(target=rank, args=(number,)) for number in members]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [reports[number] for number in members]


DTYPES = [
    *("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "complex64", "complex128", "complex32"),
    *("int64", "int32", "int16", "int8", "uint8", "uint16", "uint32", "uint64", "bool"),
]


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    """A tensor of any dtype, shape (0-dim and zero-size too), strides and offset, with any bits."""
    dtype = getattr(torch, draw(st.sampled_from(DTYPES)))
    shape = draw(st.lists(st.integers(0, 5), max_size=3)) + draw(st.sampled_from([[], [1], [7], [9001]]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    room = (math.prod(shape) + 3) * dtype.itemsize
    bits = torch.randint(0, 2 if dtype is torch.bool else 256, (room,), dtype=torch.uint8, generator=generator)
    offset = draw(st.integers(0, 3))
    flat = bits.view(dtype)[offset : offset + math.prod(shape)]
    order = draw(st.permutations(range(len(shape))))
    return flat.view([shape[dim] for dim in order]).permute([order.index(dim) for dim in range(len(shape))])


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@settings(max_examples=60)
@given(tensors(), st.integers(0, 2), st.data())
def test_any_bit_of_any_tensor_of_any_layout_is_found_on_its_rank(tensor, bad, data):
    states = [tensor.clone(), tensor.clone(), tensor.clone()]
    assert all(report.consistent for report in compared(states))
    if not tensor.numel():
        return
    index = data.draw(st.integers(0, tensor.numel() - 1))
    at = place(index, tuple(tensor.shape))
    byte = data.draw(st.integers(0, tensor.itemsize - 1))
    mask = 1 if tensor.dtype is torch.bool else 1 << data.draw(st.integers(0, 7))
    element = states[bad][at].reshape(1).view(torch.uint8)
    if tensor.dtype is torch.bool:
        element, byte = element[:1], 0
    element[byte] ^= mask
    for report in compared(states):
        [found] = report.differences
        assert (found.field, found.ranks, found.decided, found.index, found.at) == ("values", (bad,), True, index, at)
        assert int(found.held[0].bits, 16) ^ int(found.held[1].bits, 16) == mask << 8 * byte
        assert found.held[1].ranks == (bad,)


def test_where_many_elements_differ_the_first_is_told_and_how_many_blocks():
    one = torch.zeros(40 * BLOCK, dtype=torch.uint8)
    other = one.clone()
    other[3 * BLOCK + 17 :: 2 * BLOCK] = 9
    for report in compared([one, one, other]):
        [found] = report.differences
        assert (found.index, found.blocks, found.held[1].text) == (3 * BLOCK + 17, (19, 40), "9")


def test_ranks_that_are_wrong_in_different_tensors_are_told_apart():
    def state(**changed: float) -> dict[str, torch.Tensor]:
        return {name: torch.tensor([0.0, changed.get(name, 0.0)]) for name in ("a", "b", "c")}

    for report in compared([state(), state(a=1), state(b=2)]):
        assert [(one.name, one.ranks, one.decided) for one in report.differences] == [("a", (1,), True), ("b", (2,), True)]
        assert report.ranks == (1, 2)


def test_no_message_grows_with_the_number_of_entries_that_differ():
    states = [{f"w{number}": torch.full((4,), float(rank == 1)) for number in range(300)} for rank in range(3)]
    report = compared(states)[0]
    assert (len(report.differences), report.more) == (8, 292)
    assert "at least 292 more" in str(report) and len(str(report)) < 2000
    long = compared([{"n" * 5000: 1}, {"n" * 5000: 2}])[0]
    assert len(str(long)) < 500


def test_of_more_kinds_than_are_asked_the_rest_is_listed():
    report = compared([torch.tensor([number]) for number in range(CAMPS + 4)])[0]
    assert report.unlisted == tuple(range(CAMPS, CAMPS + 4))
    assert report.ranks == tuple(range(CAMPS + 4)) and not report.decided


def test_entries_beyond_the_first_page_are_found_by_name():
    def state(**changed: int) -> dict[str, int]:
        return {f"w{number}": 0 for number in range(2 * PAGE)} | changed

    [found] = compared([state(), state(), state(w4000=1)])[1].differences
    assert (found.name, found.field, found.ranks) == ("w4000", "values", (2,))
    shifted = state()
    del shifted["w3000"]
    for report in compared([state(), state(), shifted]):
        [found] = report.differences
        assert (found.name, found.field, found.ranks, report.more) == ("w3000", "names", (2,), 0)


@given(st.binary(max_size=3 * BLOCK), st.integers(0, 7))
@example(bytes(BLOCK), 0)
@example(b"", 1)
@settings(max_examples=50)
def test_the_block_sums_are_those_of_the_formula_on_every_device_and_at_every_alignment(data, offset):
    moved = torch.frombuffer(bytearray(offset) + bytearray(data) + bytearray(1), dtype=torch.uint8)[offset:-1]
    padded = np.frombuffer(data + bytes(-len(data) % BLOCK), "<i4").reshape(-1, WORDS)
    expected = [sum(int(w) * int(x) for w, x in zip(weights(), row, strict=True) if x) & (2**64 - 1) for row in padded]
    assert [int(one) & (2**64 - 1) for one in block_sums([moved])[0]] == expected
    # what runs on an accelerator, run here on the CPU
    assert digest._on_accelerator(moved).tolist() == block_sums([moved])[0].tolist()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("count", [1, 2, 64, 8192, 100_000])
def test_signs_that_change_in_many_elements_do_not_cancel(dtype, count):
    x = torch.zeros(100_000, dtype=dtype)
    y = x.clone()
    y[:count] = -0.0
    assert x.equal(y)
    assert [a.tolist() for a in block_sums([x])] != [b.tolist() for b in block_sums([y])]


@given(st.integers(1, 10**12))
def test_a_tensor_of_any_size_is_followed_to_its_elements_in_few_looks_of_bounded_size(size):
    low, high, looks = 0, size, 0
    while spans_ := cuts(low, high):
        assert spans_[0][0] == low and spans_[-1][1] == high and len(spans_) <= 1024
        low, high = spans_[-1]
        looks += 1
    assert looks <= 4 and high - low <= 128


def test_the_majority_blames_the_rest_and_a_tie_blames_all():
    assert verdict_of({"a": (0, 2), "b": (1,)}) == ((1,), True)
    assert verdict_of({"a": (0, 2), "b": (1, 3)}) == ((0, 1, 2, 3), False)
    assert verdict_of({"a": (4, 5), "b": (1,), "c": (0,)}) == ((0, 1), True)


def test_long_lists_of_ranks_read_as_runs():
    assert spans([3]) == "rank 3"
    assert spans([0, 1, 2, 8]) == "ranks 0-2, 8"
    assert spans(range(0, 2000, 2)) == "ranks 0, 2, 4, 6, 8, 10, 12, 14 and 992 more"


def test_a_choice_that_does_not_exist_is_refused():
    from dtprobe.framework.consistency import Every, check

    with pytest.raises(UsageError, match="colours"):
        check(1, what=("colours",))
    with pytest.raises(UsageError, match="no default process group"):
        check(1)
    with pytest.raises(UsageError, match="every 0 steps"):
        Every(0)
