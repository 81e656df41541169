"""torch's pipelining over an exchange: the same losses and gradients, and the stage at the root of a standstill named."""

from __future__ import annotations

import pytest

TRAIN = """
import logging
from dtprobe.framework.groups import Groups
from dtprobe.framework.pipeline import Exchange, exchanged
from torch.distributed import pipelining
logging.disable(logging.ERROR)
CPU = torch.device("cpu")

class Block(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.inner, self.gate = torch.nn.Linear(width, width), torch.nn.Linear(width, 1)
    def forward(self, x, *more):
        y = torch.tanh(self.inner(x)) + x
        # two tensors go to the next stage: slots
        return y, torch.sigmoid(self.gate(y)) * (more[0] if more else 1.0)

class Last(Block):
    def forward(self, x, *more):
        y, gate = super().forward(x, *more)
        return y * gate

def blocks(stages, single=False):
    torch.manual_seed(7)
    return [(Last if single or k == stages - 1 else Block)(6) for k in range(stages)]

def batch(step):
    torch.manual_seed(100 + step)
    return torch.randn(8, 6), torch.randn(8, 6)

def eager(stages, steps, single=False):
    model, losses = blocks(stages, single), []
    for step in range(steps):
        x, target = batch(step)
        for block in model:
            block.zero_grad()
        # micro-batches of 2, their mean: what the schedules compute
        for part, want in zip(x.chunk(4), target.chunk(4)):
            values = (part,)
            for block in model:
                values = block(*values)
                values = values if isinstance(values, tuple) else (values,)
            loss = torch.nn.functional.mse_loss(values[0], want)
            losses.append(loss.item())
            (loss / 4).backward()
    return losses, [[p.grad.clone() for p in block.parameters()] for block in model]

def placed(name, stages):
    if name == "ScheduleZBVZeroBubble":
        return [RANK, 2 * SIZE - 1 - RANK]
    return list(range(RANK, stages, SIZE))

def pipelined(name, stages, steps, group, wrap=lambda stage: stage):
    # torch 2.13's zero-bubble schedules fail on a block of two outputs, exchange or not
    whole, losses = blocks(stages, "Zero" in name), []
    mine = [wrap(pipelining.PipelineStage(whole[k], k, stages, CPU, group=group)) for k in placed(name, stages)]
    schedule = getattr(pipelining.schedules, name)
    single = issubclass(schedule, pipelining.schedules.PipelineScheduleSingle)
    schedule = schedule(mine[0] if single else mine, 4, loss_fn=torch.nn.functional.mse_loss)
    for step in range(steps):
        x, target = batch(step)
        for stage in mine:
            stage.submod.zero_grad()
        found = []
        last = any(stage.is_last for stage in mine)
        schedule.step(*((x,) if RANK == 0 else ()), **(dict(target=target, losses=found) if last else {}))
        losses += [loss.item() for loss in found]
    return losses, {k: [p.grad for p in whole[k].parameters()] for k in placed(name, stages)}

def failed(call):
    begun = time.monotonic()
    try:
        call()
    except Exception as error:
        return {"error": type(error).__name__, "text": str(error), "stage": getattr(error, "stage", None), "took_s": time.monotonic() - begun}
    return {"error": None}
plain(20)
"""

SCHEDULES = {
    2: [
        ("ScheduleGPipe", 2),
        ("Schedule1F1B", 2),
        ("ScheduleInterleaved1F1B", 4),
        ("ScheduleInterleavedZeroBubble", 4),
        ("ScheduleZBVZeroBubble", 4),
    ],
    4: [("ScheduleGPipe", 4), ("Schedule1F1B", 4), ("ScheduleInterleaved1F1B", 8)],
}


@pytest.mark.parametrize("ranks", SCHEDULES)
def test_losses_and_every_gradient_equal_eager_and_to_the_bit_the_plain_schedule(job, ranks):
    ended = job(
        TRAIN
        + f"""
for name, stages in {SCHEDULES[ranks]}:
    want, gradients = eager(stages, 2, "Zero" in name)
    with Groups(timeout_s=20) as groups, Exchange(groups.create("pipeline"), stages=stages, timeout_s=20) as exchange:
        losses, ours = pipelined(name, stages, 2, exchange.group, lambda stage: exchanged(stage, exchange))
        completed = exchange.completed
    plain_losses, theirs = pipelined(name, stages, 2, None)
    say(
        name=name,
        losses=not losses or torch.allclose(torch.tensor(losses), torch.tensor(want)),
        eager=all(torch.allclose(a, b, atol=1e-6) for k in ours for a, b in zip(ours[k], gradients[k], strict=True)),
        plain=losses == plain_losses and all(torch.equal(a, b) for k in ours for a, b in zip(ours[k], theirs[k], strict=True)),
        through=completed >= 2 * 4 * 2,
        count=len(losses),
    )
""",
        world_size=ranks,
    )
    for rank in ended:
        assert [said["name"] for said in rank.said] == [name for name, _ in SCHEDULES[ranks]], rank.output
        for said in rank.said:
            assert said["losses"] and said["eager"] and said["plain"] and said["through"], said
    assert all(sum(rank.said[at]["count"] for rank in ended) == 8 for at in range(len(SCHEDULES[ranks])))


SKIP = """
def skips(stage):
    if stage.stage_index == 1:
        give = stage.get_fwd_send_ops
        stage.get_fwd_send_ops = lambda microbatch: [] if microbatch == 2 else give(microbatch)
    return stage
"""


def test_a_stage_that_skips_a_send_is_named_by_every_stage(job):
    ranks = job(
        TRAIN
        + SKIP
        + """
def attempt():
    with Groups(timeout_s=20) as groups, Exchange(groups.create("pipeline"), timeout_s=1.5) as exchange:
        pipelined("Schedule1F1B", 4, 2, exchange.group, lambda stage: skips(exchanged(stage, exchange)))
say(**failed(attempt))
""",
        world_size=4,
    )
    for rank in ranks:
        assert (rank.only["error"], rank.only["stage"]) == ("StageTimeout", 1), rank.output
        assert "stage 1 is at the root" in rank.only["text"] and "micro-batch" in rank.only["text"]


def test_without_the_exchange_a_skipped_send_swaps_micro_batches_or_hangs_until_a_timeout_that_names_no_stage(job):
    ranks = job(
        TRAIN
        + SKIP
        + """
group = dist.new_group(timeout=seconds(2))
say(**failed(lambda: pipelined("Schedule1F1B", 4, 2, group, skips)))
""",
        world_size=4,
    )
    for rank in ranks:
        assert rank.only["error"] == "RuntimeError" and "stage" not in rank.only["text"].lower(), rank.output


def test_a_stage_stopped_before_its_set_up_messages_is_named_too(job):
    ranks = job(
        TRAIN
        + """
pids = [None] * SIZE
dist.all_gather_object(pids, os.getpid())
def attempt():
    with Groups(timeout_s=20) as groups, Exchange(groups.create("pipeline"), timeout_s=1) as exchange:
        if RANK == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        pipelined("ScheduleGPipe", 3, 1, exchange.group, lambda stage: exchanged(stage, exchange))
say(**failed(attempt))
if RANK == 0:
    time.sleep(0.5)
    os.kill(pids[1], signal.SIGKILL)
""",
        world_size=3,
    )
    for rank in (ranks[0], ranks[2]):
        assert (rank.only["error"], rank.only["stage"]) == ("StageTimeout", 1), rank.output


def test_a_stage_of_another_pipeline_is_refused(job):
    ranks = job(
        TRAIN
        + """
with Groups(timeout_s=20) as groups, Exchange(groups.create("pipeline"), timeout_s=5) as exchange:
    say(**failed(lambda: exchanged(pipelining.PipelineStage(blocks(3)[0], 0, 3, CPU), exchange)))
"""
    )
    for rank in ranks:
        assert rank.only["error"] == "UsageError" and "3" in rank.only["text"]
