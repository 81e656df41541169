"""The audit names every silent loss within one step, and nothing in steps that are sound; without it training goes on in silence."""

from __future__ import annotations

from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[3] / "examples"
ALL = ["body.weight", "body.bias", "head.weight", "head.bias"]

PRELUDE = f"""
import warnings; warnings.simplefilter("ignore")
sys.path.insert(0, {str(EXAMPLES)!r})
import reduction_audit as shown
from dtprobe.errors import DtprobeError
from dtprobe.framework.precision import GradientLoss, ReductionAudit, audit
plain(60)

def facts(report):
    return [[each.parameter, str(each.kind), list(each.ranks), each.because] for each in report]
"""


WORDS = {
    "module-called": "went past DDP",
    "part-called": "got 2 gradients from 1 forward",
    "no-sync-left-on": "no_sync()",
    "no-sync-around-forward-only": "no_sync()",
    "autograd-grad": "torch.autograd.grad",
    "replaced-after-wrap": "replaced after the wrap",
    "added-after-wrap": "added after the wrap",
    "unfrozen-after-wrap": "unfrozen since",
    "hook-unreduced": "the communication hook unreduced returned its own bucket",
    "hook-undivided": "the communication hook undivided sums over 2 ranks and does not divide",
    "hook-divided-twice": "divides by 2 twice",
    "hook-stale": "Stale.reduce returned something else",
    "fsdp2-sync-left-off": "set_requires_gradient_sync(False)",
    "fsdp2-undivided": "set_gradient_divide_factor(1)",
    "fsdp2-added-after": "plain parameter beside those of fully_shard",
}


def test_each_silent_loss_is_found_in_its_first_step_and_without_the_audit_goes_on_in_silence(job):
    ranks = job(
        PRELUDE
        + """
sound = shown.train(shown.healthy())
said = {}
for name, (make, parameters, kind) in shown.FAULTS.items():
    trained = shown.train(make())  # three steps, which end without an error
    away = max((trained[each] - sound[each]).abs().max().item() for each in sound)
    said[name] = {"wrong by": max(shown.drift(trained), away), "found": facts(shown.audited_step(make())),
                  "parameters": parameters, "kind": kind}
say(**said)
"""
    )
    assert ranks[0].only.keys() == WORDS.keys(), ranks[0].output
    for fault, why in WORDS.items():
        first, second = (rank.only[fault] for rank in ranks)
        assert first["wrong by"] > 1e-3, fault
        assert first["found"] == second["found"], fault
        lost = [(name, first["kind"], [0, 1]) for name in first["parameters"]]
        assert [(name, kind, on) for name, kind, on, _ in first["found"]] == lost, fault
        assert all(why in because for *_, because in first["found"]), (fault, first["found"])


SOUND = """
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from dtprobe.framework.precision import ConsistentScaler, reduce_in_fp32

class Partly(shown.Net):
    "Uses the head on every rank, the body on rank 0 only, and `never` nowhere."
    def __init__(self):
        super().__init__()
        self.never = torch.nn.Linear(2, 2)
    def forward(self, x):
        return self.head(torch.tanh(self.body(x) if RANK == 0 else x.new_ones(len(x), 8)))

class Checkpointed(shown.Net):
    def __init__(self, reentrant):
        super().__init__()
        self.reentrant = reentrant
    def forward(self, x):
        return checkpoint(super().forward, x.requires_grad_(), use_reentrant=self.reentrant)

class Penalised(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.net = shown.Net()
    def forward(self, x):
        return self.net(x).mean() + 0.1 * self.net.body.weight.norm()

def ddp(**options):
    return shown.usual(DDP(shown.Net(), **options))

def hooked(hook):
    _, model = shown.wrapped()
    model.register_comm_hook(None, hook)
    return shown.usual(model)

def halves():
    model = DDP(shown.Net().bfloat16())
    reduce_in_fp32(model)
    return shown.Training(model, lambda x: shown.loss(model(x.bfloat16())).backward())

def whole_step():
    "Unscaled, clipped, stepped and zeroed inside the window, twice."
    _, model = shown.wrapped()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = ConsistentScaler("cpu", timeout_s=60)
    def backward(x):
        for part in x.chunk(2):
            scaler.scale(shown.loss(model(part))).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    return shown.Training(model, backward)

def synced_twice():
    _, model = shown.wrapped()
    return shown.Training(model, lambda x: [shown.loss(model(part)).backward() for part in x.chunk(2)])

def diagnosed():
    "A gradient asked for beside the step's own, as for a norm of each loss."
    _, model = shown.wrapped()
    def backward(x):
        shown.loss(model(x)).backward()
        torch.autograd.grad(model.module(x).sum(), list(model.parameters()))
    return shown.Training(model, backward)

def ignored():
    net = shown.Net()
    DDP._set_params_and_buffers_to_ignore_for_model(net, ["head.weight", "head.bias"])
    return shown.usual(DDP(net))

def fsdp2_halves():
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    return shown.usual(fully_shard(shown.Net(), mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16)))

def nonfinite():
    _, model = shown.wrapped()
    return shown.Training(model, lambda x: (shown.loss(model(x)) * (float("inf") if RANK else 1.0)).backward())

KINDS = {
    **shown.HEALTHY,
    "unused allowed": lambda: shown.usual(DDP(Partly(), find_unused_parameters=True)),
    "static graph": lambda: ddp(static_graph=True),
    "bucket views": lambda: ddp(gradient_as_bucket_view=True),
    "many buckets": lambda: ddp(bucket_cap_mb=0.00005),
    "checkpointed": lambda: shown.usual(DDP(Checkpointed(False))),
    "checkpointed, reentrant": lambda: shown.usual(DDP(Checkpointed(True))),
    "penalty": lambda: shown.Training(*(lambda m: (m, lambda x: m(x).backward()))(DDP(Penalised()))),
    "half-precision hook": lambda: hooked(fp16_compress_hook),
    "half-precision model": halves,
    "whole step": whole_step,
    "synced twice": synced_twice,
    "gradients asked for": diagnosed,
    "ignored": ignored,
    "fsdp2 in half precision": fsdp2_halves,
    "not finite": nonfinite,
}
"""


def test_sound_steps_give_no_alarm(job):
    ranks = job(
        PRELUDE
        + SOUND
        + """
said = {}
for name, make in KINDS.items():
    training = make()
    with ReductionAudit(training.model, timeout_s=60) as audited:
        for step in range(3):
            with audited.step() as report:
                training.backward(shown.batch(step, RANK))
            said.setdefault(name, []).append([len(report.losses), report.checked, str(report), list(report.without_gradient)])
            if step % 2:
                training.model.zero_grad()
say(**said)
"""
    )
    for rank in ranks:
        alarms = {name: steps for name, steps in rank.only.items() if any(lost for lost, *_ in steps)}
        assert not alarms
        assert all(checked >= 2 for steps in rank.only.values() for _, checked, *_ in steps)
        assert rank.only["unused allowed"][0][3] == ["never.weight", "never.bias"]


def test_one_bad_rank_and_a_bucket_that_waits_are_found_and_what_is_cut_off_is_listed(job):
    ranks = job(
        PRELUDE
        + """
def one_rank():
    "no_sync on one rank only would hang; its own hook on one rank is silent."
    _, model = shown.wrapped()
    def sometimes(state, bucket):
        mean = bucket.buffer().clone().div_(SIZE)
        dist.all_reduce(mean)
        future = torch.futures.Future()
        future.set_result(bucket.buffer() if RANK == 1 else mean)
        return future
    model.register_comm_hook(None, sometimes)
    return shown.usual(model)

def frozen():
    net, model = shown.wrapped()
    net.head.requires_grad_(False)
    return shown.usual(model)

def detached():
    net, model = shown.wrapped(find_unused_parameters=True)
    net.body.register_forward_hook(lambda module, args, output: output.detach())
    return shown.usual(model)

say(**{name: {"found": facts(report := shown.audited_step(make())), "none": list(report.without_gradient)}
       for name, make in {"one rank": one_rank, "frozen": frozen, "detached": detached}.items()})
"""
    )
    for rank in ranks:
        said = rank.only
        assert [(name, kind, on) for name, kind, on, _ in said["one rank"]["found"]] == [
            (name, "unreduced", [1]) for name in ALL
        ]
        assert [name for name, *_ in said["frozen"]["found"]] == ["body.weight", "body.bias"]
        assert "waits for head.bias, head.weight" in said["frozen"]["found"][0][3]
        assert (said["detached"]["found"], said["detached"]["none"]) == ([], ["body.weight", "body.bias"])


def test_on_three_ranks_a_sum_is_three_times_the_mean_and_check_raises_on_all(job):
    ranks = job(
        PRELUDE
        + """
report = shown.audited_step(shown.with_hook(shown.undivided)())
say(factor=report.losses[0].factor, raised=caught(report.check), cost=report.cost_s > 0)
""",
        world_size=3,
    )
    for rank in ranks:
        assert abs(rank.only["factor"] - 3) < 1e-3 and rank.only["cost"]
        assert (rank.only["raised"]["error"], rank.only["raised"]["ranks"]) == ("GradientLoss", [0, 1, 2])


def test_a_rank_that_leaves_the_step_is_named_and_its_own_error_passes(job):
    ranks = job(
        PRELUDE
        + """
training = shown.healthy()
audited = ReductionAudit(training.model, timeout_s=1)
def work():
    with audited.step():
        training.backward(shown.batch(0, RANK))
        if RANK == 1:
            raise ValueError("bad batch")
store = dist.distributed_c10d._get_default_store()
say(**caught(work))
store.set(f"said by {RANK}", "")
store.wait(["said by 0", "said by 1"], seconds(60))
"""
    )
    assert ranks[1].only["error"] == "ValueError"
    assert (ranks[0].only["error"], ranks[0].only["ranks"]) == ("MissingRanks", [1])


def test_a_model_that_nothing_reduces_is_refused(job):
    ranks = job(PRELUDE + "say(**caught(lambda: ReductionAudit(shown.Net())))\ndist.barrier()")
    assert all(
        rank.only["error"] == "UsageError" and "neither a DistributedDataParallel" in rank.only["text"] for rank in ranks
    )


@pytest.mark.nightly
def test_replicas_of_shards_on_four_ranks(job):
    ranks = job(
        PRELUDE
        + """
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
said = {}
for name in ("sound", "replicas not reduced"):
    model = fully_shard(shown.Net(), mesh=mesh)
    if name != "sound":
        model.set_requires_all_reduce(False)
    said[name] = facts(shown.audited_step(shown.usual(model)))
say(**said)
""",
        world_size=4,
    )
    for rank in ranks:
        assert rank.only["sound"] == []
        assert [name for name, *_ in rank.only["replicas not reduced"]] == ALL
        assert "set_requires_all_reduce(False)" in rank.only["replicas not reduced"][0][3]


@pytest.mark.nightly
def test_stages_of_a_pipeline_with_two_replicas_each_are_audited_side_by_side(job):
    ranks = job(
        PRELUDE
        + """
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.nn.parallel import DistributedDataParallel
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "pipeline"))
number = mesh.get_local_rank("pipeline")
said = {}
for name in ("sound", "undivided"):
    torch.manual_seed(number)
    model = DistributedDataParallel(torch.nn.Linear(6, 6), process_group=mesh.get_group("data"))
    if name != "sound" and number == 1:
        def undivided(group, bucket):
            return dist.all_reduce(bucket.buffer(), group=group, async_op=True).get_future().then(lambda future: future.value()[0])
        model.register_comm_hook(mesh.get_group("data"), undivided)
    sample = torch.empty(2, 6, requires_grad=number > 0)
    stage = PipelineStage(model, number, 2, torch.device("cpu"), input_args=(sample,), group=mesh.get_group("pipeline"),
                          output_args=(torch.empty(2, 6, requires_grad=True),))
    schedule = ScheduleGPipe(stage, 2, loss_fn=lambda out, target: (out - target).square().mean())
    with audit(model, timeout_s=60) as report:
        x = shown.batch(0, RANK // 2)[:4]
        schedule.step(*([x] if number == 0 else []), **({"target": x} if number == 1 else {}))
    said[name] = [str(loss) for loss in report]
say(**said)
""",
        world_size=4,
    )
    for rank in ranks:
        assert rank.only["sound"] == []
        lost = [text.split(": ")[0] for text in rank.only["undivided"]]
        assert lost == ([] if rank.rank % 2 == 0 else ["weight", "bias"])
        assert all("undivided sums over 2 ranks" in text for text in rank.only["undivided"])
