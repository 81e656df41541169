"""The digest of a tensor's bits: the formula, on every device and at every alignment, and what must not cancel in it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dtprobe.framework.consistency import digest
from dtprobe.framework.consistency.digest import BLOCK, WORDS, block_sums, weights


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


@pytest.mark.needs("cuda")
def test_a_gpu_has_the_same_sums_as_a_cpu():
    for number, dtype in enumerate((torch.float32, torch.bfloat16, torch.uint8, torch.complex64)):
        bits = torch.randint(
            0, 256, (20_000_003 * dtype.itemsize,), dtype=torch.uint8, generator=torch.Generator().manual_seed(number)
        )
        x = bits.view(dtype)[1:]
        assert block_sums([x.cuda(), bits.cuda().view(dtype)[1:]])[1].tolist() == block_sums([x])[0].tolist()
        assert block_sums([x.cuda()])[0].tolist() == block_sums([x])[0].tolist()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("count", [1, 2, 64, 8192, 100_000])
def test_signs_that_change_in_many_elements_do_not_cancel(dtype, count):
    x = torch.zeros(100_000, dtype=dtype)
    y = x.clone()
    y[:count] = -0.0
    assert x.equal(y)
    assert [a.tolist() for a in block_sums([x])] != [b.tolist() for b in block_sums([y])]
