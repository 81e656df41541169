"""What the audit concludes from projections: losses of every size and kind, on any number of ranks, and no false alarm."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dtprobe.framework.precision.projection import CHUNK, Projector
from dtprobe.framework.precision.verdicts import Kind, Measured, judged

PROJECTOR = Projector()


def gradients(ranks: int, seed: int, size: int = 300) -> torch.Tensor:
    return torch.randn(ranks, size, generator=torch.Generator().manual_seed(seed))


def numbers(tensor: torch.Tensor) -> list[float]:
    return PROJECTOR.of(tensor).tolist()


def verdict(computed: torch.Tensor, left: list[torch.Tensor | None], tolerance: float = 1e-4):
    heard = {
        rank: Measured(numbers(own), None if after is None else numbers(after), rank)
        for rank, (own, after) in enumerate(zip(computed, left, strict=True))
    }
    return judged("weight", heard, range(len(computed)), tolerance)


SEEDS, RANKS = st.integers(0, 2**31), st.integers(2, 9)


@settings(max_examples=8)
@given(RANKS, SEEDS)
def test_the_mean_is_no_loss(ranks, seed):
    each = gradients(ranks, seed)
    assert verdict(each, [each.mean(0)] * ranks) is None


@settings(max_examples=8)
@given(RANKS, SEEDS)
def test_what_was_not_reduced_is_called_so(ranks, seed):
    each = gradients(ranks, seed)
    found = verdict(each, list(each))
    assert found.kind is Kind.UNREDUCED and found.ranks == tuple(range(ranks)) and found.off > 0.1


@settings(max_examples=8)
@given(RANKS, SEEDS, st.sampled_from([0.125, 0.5, 2.0, 16.0]))
def test_a_multiple_of_the_mean_is_called_so_with_its_factor(ranks, seed, factor):
    each = gradients(ranks, seed)
    found = verdict(each, [each.mean(0) * factor] * ranks)
    assert found.kind is Kind.SCALED and abs(found.factor - factor) < 1e-3 * factor


@settings(max_examples=8)
@given(RANKS, SEEDS, st.integers(0, 299))
def test_one_wrong_element_on_one_rank_is_found(ranks, seed, at):
    each = gradients(ranks, seed)
    left = [each.mean(0).clone() for _ in range(ranks)]
    left[-1][at] += 1.0
    found = verdict(each, left)
    assert found.kind is Kind.ALTERED and found.ranks == (ranks - 1,)


def test_what_is_missing_is_called_so_unless_it_was_zero():
    each = gradients(2, 1)
    assert verdict(each, [None, None]).kind is Kind.MISSING
    assert verdict(torch.zeros(2, 10), [None, None]) is None
    assert judged("weight", {0: Measured(None, None, 0), 1: Measured(None, None, 1)}, (0, 1), 1e-4) is None


def test_a_rank_without_the_parameter_counts_as_zero():
    own = gradients(1, 2)[0]
    heard = {0: Measured(numbers(own), numbers(own), 0)}
    assert judged("weight", heard, (0, 1), 1e-4).kind is Kind.UNREDUCED
    assert judged("weight", heard | {0: Measured(numbers(own), numbers(own / 2), 0)}, (0, 1), 1e-4) is None


def test_where_a_gradient_is_not_finite_a_finite_result_is_a_loss():
    each = gradients(2, 3)
    each[1, 0] = float("inf")
    assert verdict(each, [each.mean(0)] * 2) is None
    assert verdict(each, [each[0], each.mean(0)]).ranks == (0,)


@settings(max_examples=8)
@given(SEEDS, st.integers(1, 5), st.integers(2, CHUNK + 100))
def test_projections_of_shards_add_up_to_those_of_the_whole(seed, shards, size):
    whole = torch.randn(size, generator=torch.Generator().manual_seed(seed))
    parts, at = torch.zeros(5, dtype=torch.float64), 0
    for part in whole.chunk(shards):
        parts += PROJECTOR.of(part, at)
        at += part.numel()
    torch.testing.assert_close(parts, PROJECTOR.of(whole))
    torch.testing.assert_close(parts[4], whole.double().square().sum())


def test_equal_chunks_do_not_cancel_and_chunks_that_change_places_are_noticed():
    chunk = gradients(1, 4, CHUNK)[0]
    apart = PROJECTOR.of(torch.cat([chunk, -chunk])) - PROJECTOR.of(torch.cat([-chunk, chunk]))
    assert apart[:4].norm() > 1
