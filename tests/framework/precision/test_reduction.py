"""Gradients reduced in float32 keep what a reduction in half precision rounds away."""

from __future__ import annotations

WRAPPED = """
import warnings; warnings.simplefilter("ignore")
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP
from dtprobe.framework.precision import reduce_in_fp32
plain(60)

class Given(torch.nn.Module):
    "A weight whose gradient is what is passed in."
    def __init__(self, size=2, dtype=torch.float32):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(size, dtype=dtype))
    def forward(self, gradient):
        return (self.weight * gradient.to(self.weight.dtype)).sum()

def gradient(model, value):
    model(value).backward()
    found = (model.module if isinstance(model, DDP) else model).weight.grad
    return (found.full_tensor() if hasattr(found, "full_tensor") else found).double()

def mean(value):
    total = value.double().clone()
    dist.all_reduce(total)
    return total / SIZE

def off(found, value):
    right = mean(value)
    return ((found - right).norm() / right.norm()).item()
"""


def test_fsdp2_keeps_half_a_unit_that_bfloat16_drops_and_refuses_once_it_has_run(job):
    ranks = job(
        WRAPPED
        + """
def sharded():
    return fully_shard(Given(), mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))

value = torch.full((2,), 256.0 if RANK == 0 else 1.0)
rounded, kept = sharded(), sharded()
reduce_in_fp32(kept)
before = gradient(rounded, value).tolist()
say(rounded=before, kept=gradient(kept, value).tolist(), late=caught(lambda: reduce_in_fp32(rounded))["text"])
dist.barrier()
"""
    )
    for rank in ranks:
        assert rank.only["rounded"] == [128.0, 128.0] and rank.only["kept"] == [128.5, 128.5]
        assert "has run already" in rank.only["late"] and "reduce_dtype=torch.float32" in rank.only["late"]


def test_ddp_reduces_half_precision_gradients_in_float32_and_leaves_the_mean(job):
    ranks = job(
        WRAPPED
        + """
torch.manual_seed(RANK)
value = torch.randn(20000).bfloat16()
plainly, exactly = (DDP(Given(20000, torch.bfloat16)) for _ in range(2))
compressed, wide = DDP(Given(20000)), DDP(Given(20000))
compressed.register_comm_hook(None, fp16_compress_hook)
reduce_in_fp32(exactly)
reduce_in_fp32(wide)
rounded_once = off(mean(value).bfloat16().double(), value)
say(plainly=off(gradient(plainly, value), value), exactly=off(gradient(exactly, value), value), once=rounded_once,
    compressed=off(gradient(compressed, value.float()), value), wide=off(gradient(wide, value.float()), value))
dist.barrier()
""",
        world_size=3,
    )
    for rank in ranks:
        said = rank.only
        assert said["exactly"] <= 1.01 * said["once"]  # nothing but the one rounding that the gradient's own dtype asks for
        assert said["plainly"] > 1.3 * said["exactly"]
        assert said["compressed"] > 1e-4 and said["wide"] < 1e-7


def test_what_it_cannot_do_is_refused_with_the_way_out(job):
    ranks = job(
        WRAPPED
        + """
hooked = DDP(Given())
hooked.register_comm_hook(None, fp16_compress_hook)
say(plain=caught(lambda: reduce_in_fp32(Given())), hooked=caught(lambda: reduce_in_fp32(hooked)))
dist.barrier()
"""
    )
    for rank in ranks:
        assert rank.only["plain"]["error"] == rank.only["hooked"]["error"] == "UsageError"
        assert "neither DistributedDataParallel nor fully_shard" in rank.only["plain"]["text"]
        assert "fp16_compress_hook already" in rank.only["hooked"]["text"]
