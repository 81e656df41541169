"""The comparison itself, by threads over one store: any tensor, any bit, any number of kinds, messages of bounded size."""

from __future__ import annotations

import math
import threading

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses import FakeTensorMode

from dtprobe.errors import UsageError
from dtprobe.framework.agreement import Agreement
from dtprobe.framework.consistency import FIELDS
from dtprobe.framework.consistency.compare import PAGE, Comparison, cuts
from dtprobe.framework.consistency.digest import BLOCK
from dtprobe.framework.consistency.entries import entries
from dtprobe.framework.consistency.judges import CAMPS, judge_spans
from dtprobe.framework.consistency.meeting import Meeting
from dtprobe.framework.consistency.report import Report, place, spans, verdict_of


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


def fake() -> torch.Tensor:
    with FakeTensorMode():
        return torch.empty(2)


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


def test_bits_that_change_while_they_are_compared_end_the_search_and_are_said():
    target = {"name": "w", "ranks": [0, 1], "dtype": "float32", "shape": [4]}
    verdict = judge_spans({rank: [{"0": {"digests": ["a", "b"]}}] for rank in (0, 1)}, [target], [[0, 2], [1]])
    assert verdict["wrong"] and not verdict["spans"]
    assert "changed while they were compared" in verdict["findings"]["0"]["held"][0]["text"]


def test_ranks_that_are_wrong_in_different_tensors_are_told_apart():
    def state(**changed: float) -> dict[str, torch.Tensor]:
        return {name: torch.tensor([0.0, changed.get(name, 0.0)]) for name in ("a", "b", "c")}

    for report in compared([state(), state(a=1), state(b=2)]):
        assert [(one.name, one.ranks, one.decided) for one in report.differences] == [("a", (1,), True), ("b", (2,), True)]
        assert report.ranks == (1, 2)


def test_an_optimizers_state_and_options_are_named_by_the_parameters_place():
    def stepped(**options: float) -> torch.optim.Optimizer:
        torch.manual_seed(0)
        model = torch.nn.Linear(3, 2)
        optimizer = torch.optim.AdamW(model.parameters(), **options)
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        return optimizer

    drifted = stepped()
    drifted.state[drifted.param_groups[0]["params"][1]]["exp_avg"][1] += 1
    assert all(report.consistent for report in compared([stepped(), stepped(), stepped()]))
    for report in compared([stepped(), drifted, stepped()]):
        assert [(one.name, one.at, one.ranks) for one in report.differences] == [("group0.param1.exp_avg", (1,), (1,))]
    for report in compared([stepped(), stepped(), stepped(lr=0.3)]):
        assert [(one.name, one.ranks) for one in report.differences] == [("group0.lr", (2,))]


REFUSED = {
    "the meta device": lambda: torch.empty(2, device="meta"),
    "layout is torch.sparse_coo": lambda: torch.eye(2).to_sparse(),
    "layout is torch.jagged": lambda: torch.nested.nested_tensor([torch.ones(2)], layout=torch.jagged),
    "FakeTensor": fake,
    "quantized": lambda: torch.quantize_per_tensor(torch.ones(2), 1.0, 0, torch.quint8),
    "'w' is a set": lambda: {1, 2},
    "two entries are named 'w.a.b'": lambda: {"a": {"b": 1}, "a.b": 2},
    "(name, tensor) pairs": lambda: iter([1]),
}


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
@pytest.mark.parametrize("why", REFUSED)
def test_what_has_no_bits_to_read_is_refused_and_says_why(why):
    with pytest.raises(UsageError) as refused:
        entries({"w": REFUSED[why]()}, (0, 1))
    assert why in str(refused.value)


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
        return {f"w{number}": 0 for number in range(PAGE + 100)} | changed

    [found] = compared([state(), state(), state(**{f"w{PAGE + 50}": 1})])[1].differences
    assert (found.name, found.field, found.ranks) == (f"w{PAGE + 50}", "values", (2,))
    shifted = state()
    del shifted[f"w{PAGE - 20}"]
    for report in compared([state(), state(), shifted]):
        [found] = report.differences
        assert (found.name, found.field, found.ranks, report.more) == (f"w{PAGE - 20}", "names", (2,), 0)


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
