"""The scaler takes one decision for the whole job, whatever the layout; torch's own one, in the same training, does not."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

EXAMPLES = Path(__file__).parents[3] / "examples"

TRAINING = f"""
import warnings; warnings.simplefilter("ignore")
sys.path.insert(0, {str(EXAMPLES)!r})
import precision
from dtprobe.framework.precision import ConsistentScaler
plain(60)

def training(layout, steps, every, consistent, kinds=None):
    kinds = kinds or precision.every_overflow(SIZE)
    overflows = {{step: kinds[number % len(kinds)] for number, step in enumerate(range(3, steps, every))}}
    expected = precision.reference(overflows, steps)
    scaler = ConsistentScaler("cpu", **precision.SETTINGS, timeout_s=60) if consistent else precision.plain_scaler()
    spread = precision.LAYOUTS[layout](RANK, SIZE, scaler)
    found = precision.train(spread, scaler, overflows, steps, RANK)
    if consistent:
        scaler.close()
    return {{"skipped": found.skipped, "scale": found.scale, "kinds": len(overflows), "wanted": list(overflows),
            "scale_alone": expected.scale, "away": precision.distance(found, expected)}}
"""


def agree(ranks) -> bool:
    """Whether all ranks skipped the steps that overflowed, kept the scale of a single process, and its parameters."""
    said = [rank.only for rank in ranks]
    return all(one["skipped"] == one["wanted"] and one["scale"] == one["scale_alone"] and one["away"] < 1e-4 for one in said)


@pytest.mark.parametrize("layout", ["ddp", "tp", "pp"])
def test_all_ranks_skip_the_same_steps_wherever_a_gradient_overflows(job, layout):
    ranks = job(TRAINING + f"say(**training({layout!r}, 16, 2, True, precision.every_overflow(SIZE)[::3]))")
    assert agree(ranks), [rank.only for rank in ranks]


@pytest.mark.parametrize("layout", ["ddp", "pp"])
def test_in_the_same_training_the_stock_scaler_lets_ranks_diverge_in_silence(job, layout):
    ranks = job(TRAINING + f"say(**training({layout!r}, 16, 2, False, precision.every_overflow(SIZE)[::3]))")
    assert not agree(ranks)
    assert ranks[0].only["skipped"] != ranks[1].only["skipped"]


def test_the_stock_scaler_refuses_plain_parameters_beside_those_of_tensor_parallelism(job):
    ranks = job(TRAINING + "say(**caught(lambda: training('tp', 8, 1, False)))")
    assert all("mixed torch.Tensor and DTensor" in rank.only["text"] for rank in ranks)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("layout", "ranks"),
    [*((each, 2) for each in ("ddp", "fsdp2", "tp", "pp")), *((each, 4) for each in ("ddp", "fsdp2", "tp", "pp", "pp+dp"))],
)
def test_200_steps_on_every_layout_with_an_overflow_at_each_rank_stage_and_micro_batch(job, layout, ranks):
    assert agree(job(TRAINING + f"say(**training({layout!r}, 200, 4, True))", world_size=ranks, timeout_s=200))


@pytest.mark.nightly
@pytest.mark.parametrize(("layout", "ranks"), [("ddp", 2), ("pp", 2), ("ddp", 4), ("pp", 4), ("pp+dp", 4)])
def test_200_steps_of_the_same_with_the_stock_scaler_fail(job, layout, ranks):
    assert not agree(job(TRAINING + f"say(**training({layout!r}, 200, 4, False))", world_size=ranks, timeout_s=200))


SMALL = """
from dtprobe.framework.precision import ConsistentScaler
plain(60)
torch.manual_seed(0)
one, two = torch.nn.Linear(4, 2), torch.nn.Linear(2, 2)
first, second = torch.optim.SGD(one.parameters(), lr=1.0), torch.optim.SGD(two.parameters(), lr=1.0)

def scaler(**settings):
    return ConsistentScaler("cpu", **{"init_scale": 8.0, "timeout_s": 60, **settings})

def backward(scaler):
    first.zero_grad(), second.zero_grad()
    scaler.scale(two(one(torch.ones(3, 4))).sum()).backward()

def stepped(call):
    before = [p.detach().clone() for p in (*one.parameters(), *two.parameters())]
    call()
    return [not torch.equal(a, b) for a, b in zip(before, (*one.parameters(), *two.parameters()))]
"""


def test_with_two_optimizers_only_the_one_with_the_overflow_is_skipped_and_the_scale_halves_once(job):
    ranks = job(
        SMALL
        + """
with scaler() as each:
    backward(each)
    if RANK == 1:
        two.weight.grad[0, 0] = float("nan")
    moved = stepped(lambda: (each.step(first), each.step(second), each.update()))
    say(moved=moved, scale=each.get_scale(), decisions=each.decisions, skipped=each.skipped)
"""
    )
    for rank in ranks:
        assert rank.only == {"moved": [True, True, False, False], "scale": 4.0, "decisions": 2, "skipped": 1}


def test_gradients_unscaled_for_clipping_are_unscaled_once_and_decided_once(job):
    ranks = job(
        SMALL
        + """
with scaler() as each:
    backward(each)
    wanted = [p.grad / 8 for p in one.parameters()]
    each.unscale_(first)
    right = all(torch.equal(p.grad, w) for p, w in zip(one.parameters(), wanted))
    torch.nn.utils.clip_grad_norm_(one.parameters(), 0.5)
    each.step(first)
    each.update()
    again = caught(lambda: (backward(each), each.unscale_(first), each.unscale_(first)))
    say(right=right, decisions=each.decisions, again=again["error"])
"""
    )
    assert [rank.only for rank in ranks] == [{"right": True, "decisions": 2, "again": "RuntimeError"}] * 2


def test_a_fused_optimizer_skips_on_both_ranks_too(job):
    ranks = job(
        SMALL
        + """
with scaler() as each:
    fused = torch.optim.SGD(one.parameters(), lr=1.0, fused=True)
    found = []
    for wrong in (True, False):
        backward(each)
        if wrong and RANK == 0:
            one.bias.grad[0] = float("inf")
        found.append(stepped(lambda: (each.step(fused), each.update()))[:2])
    say(found=found, scale=each.get_scale())
"""
    )
    assert [rank.only for rank in ranks] == [{"found": [[False, False], [True, True]], "scale": 4.0}] * 2


def test_a_rank_without_any_gradient_takes_part_in_the_decision(job):
    ranks = job(
        SMALL
        + """
with scaler() as each:
    backward(each)
    if RANK == 1:
        first.zero_grad()
    else:
        one.bias.grad[0] = float("inf")
    each.step(first)
    each.update()
    say(scale=each.get_scale(), skipped=each.skipped)
"""
    )
    assert [rank.only for rank in ranks] == [{"scale": 4.0, "skipped": 1}] * 2


def test_state_goes_from_the_stock_scaler_to_this_one_and_back(job):
    ranks = job(
        SMALL
        + """
import pickle
stock = torch.amp.GradScaler("cpu", init_scale=32.0, growth_interval=2)
backward(stock); stock.step(first); stock.update()
with scaler() as each:
    each.load_state_dict(stock.state_dict())
    backward(each); each.step(first); each.update()
    back = torch.amp.GradScaler("cpu")
    back.load_state_dict(each.state_dict())
    say(grown=each.get_scale(), same=back.state_dict() == each.state_dict(), keys=list(each.state_dict()) == list(stock.state_dict()),
        pickled=caught(lambda: pickle.dumps(each))["text"])
"""
    )
    for rank in ranks:
        assert (rank.only["grown"], rank.only["same"], rank.only["keys"]) == (64.0, True, True)
        assert "state_dict" in rank.only["pickled"]


def test_a_disabled_scaler_asks_nobody(job):
    ranks = job(
        SMALL
        + """
each = scaler(enabled=False)
if RANK == 0:
    backward(each); each.step(first); each.update()
say(decisions=each.decisions, scale=each.get_scale())
"""
    )
    assert [rank.only for rank in ranks] == [{"decisions": 0, "scale": 1.0}] * 2


DIVERGED = {
    "optimizer": "backward(each); each.step(second if odd else first); each.step(second)",
    "scale": "each.update(2.0) if odd else None; backward(each); each.step(first)",
    "growth interval": "each.set_growth_interval(5 + RANK); backward(each); each.step(first)",
}


@pytest.mark.parametrize("field", DIVERGED)
def test_a_rank_that_comes_with_something_else_is_named_on_every_rank(job, field):
    ranks = job(
        SMALL
        + f"""
odd = RANK == 1
each = scaler()
backward(each); each.step(first); each.step(second); each.update()
def work():
    {DIVERGED[field]}
say(**caught(work))
""",
        world_size=3,
    )
    for rank in ranks:
        assert rank.only["error"] == "ScalerDiverged" and field in rank.only["fields"], rank.output
        assert rank.only["ranks"] == ([1] if field != "growth interval" else [0, 1, 2])
        assert f"{field}: rank 0 " in rank.only["text"]


def test_ranks_that_cannot_unscale_are_named_and_the_others_do_not_wait(job):
    ranks = job(
        SMALL
        + """
each = scaler()
backward(each)
if RANK == 1:
    one.half()
    for p in one.parameters():
        p.grad = torch.ones_like(p)
say(**caught(lambda: each.step(first)))
"""
    )
    assert "FP16" in ranks[1].only["text"]
    assert (ranks[0].only["error"], ranks[0].only["ranks"]) == ("ScalerDiverged", [1])


def test_a_rank_that_skips_the_step_by_itself_is_named_before_the_deadline(job):
    ranks = job(
        SMALL
        + """
each = scaler(timeout_s=1)
store = dist.distributed_c10d._get_default_store()
backward(each)
if RANK != 1:
    say(**caught(lambda: each.step(first)))
    store.set(f"said by {RANK}", "")
else:
    store.wait(["said by 0", "said by 2"], seconds(60))
""",
        world_size=3,
    )
    for rank in (ranks[0], ranks[2]):
        assert (rank.only["error"], rank.only["ranks"]) == ("MissingRanks", [1]), rank.output
        assert "decision 0 of the scaler" in rank.only["text"] and rank.only["took_s"] < 30


def test_it_says_when_no_rank_has_scaled(job):
    ranks = job(SMALL + "each = scaler()\nsay(**caught(lambda: each.step(first)))")
    assert all("no rank has called scale()" in rank.only["text"] for rank in ranks)


def test_without_a_job_it_says_what_to_do():
    from dtprobe.errors import UsageError
    from dtprobe.framework.precision import ConsistentScaler

    assert not torch.distributed.is_initialized()
    with pytest.raises(UsageError, match="init_process_group first"):
        ConsistentScaler("cpu")
