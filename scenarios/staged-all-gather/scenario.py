"""An all-gather that is said to be slow on a backend that does not exist for collectives."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dtprobe import Arm, Scenario, Verdict, VerdictKind
from dtprobe.authoring import symptoms, tries

if TYPE_CHECKING:
    from dtprobe import Evidence

scenario = Scenario(
    name="staged-all-gather",
    failure_mode="slow-collective-path",
    title="An all-gather over TensorPipe, and its copies",
    claim="all_gather_into_tensor over the TensorPipe backend stages its data through the host and is a third as fast, 9.1 against "
    "28.4 GB/s; two thirds of the GPU's time are copies.",
    source="failure document, section 4.4",
    layer="c10d",
    certifies_not="On the CPU there is no staging: speed and share of copies with CUDA tensors over gloo need a GPU.",
    world_size=2,
    timeout_s=60,
    repeats=2,
    control=Arm("worker.py"),
    fault=Arm("worker.py", args=("--ask",)),
    no_cure_because="the backend that the claim is about does not exist, so there is nothing to cure; a group that is asked for says so",
    expect={"torch>=2.9": "refuted"},
)

MUCH = str(16 << 20)
"""Elements of float32, 64 MiB a rank."""

gpu = scenario.with_variant(
    "gpu",
    title="An all-gather of tensors on GPUs over gloo, and its copies (two GPUs)",
    claim="An all-gather of tensors on GPUs that is staged through the host is a third as fast as NCCL's, and two thirds of its time are "
    "copies.",
    certifies_not="Two GPUs of one host over NVLink. What gloo reaches between hosts is another matter.",
    needs=("linux", "torch", "cuda:2"),
    tags=("gpu",),
    measures_cost=False,
    repeats=1,
    control=Arm("worker.py", args=("--device", "cuda", "--elements", MUCH)),
    fault=Arm("worker.py", args=("--device", "cuda", "--elements", MUCH, "--staging")),
    no_cure_because="NCCL, the control, is the cure",
)

COPIES = 0.5
"""From this share of its time on, copies are most of what a staged all-gather does."""


@gpu.judge
def judge_gpu(evidence: Evidence) -> Verdict:
    """How much slower the staged form is, and the share of its time in which memory is copied from or to a GPU."""
    rows = symptoms.attempts(evidence, "stage")
    if (nothing := symptoms.undecided(evidence, {"all-gathers": rows})) is not None:
        return nothing
    rows = rows.assign(call_s=tries.number(rows, "call_s"), copy_s=tries.number(rows, "copy_s"))
    rows["copying"] = rows["copy_s"] / rows["call_s"]
    own = rows[tries.text(rows, "form").eq("tensor")]
    median = own.groupby("arm")[["call_s", "copying"]].median()
    slower = float(median.loc["fault", "call_s"] / median.loc["control", "call_s"])
    copying = float(median.loc["fault", "copying"])
    kind = VerdictKind.NOT_REPRODUCED
    if slower > 1:
        kind = VerdictKind.REPRODUCED if copying >= COPIES else VerdictKind.REFUTED
    return Verdict(
        kind=kind,
        control_healthy=symptoms.ended_well(evidence, "control") and symptoms.unmarred(rows, "control"),
        metrics={
            "call_s": symptoms.measure(own, "call_s"),
            "copying": symptoms.measure(own, "copying", unit="share", documented="two thirds"),
        },
        because=f"Over gloo an all-gather of 64 MiB a rank took {slower:.0f} times as long as over NCCL; {copying:.1%} of its time were copies "
        f"from or to a GPU, {float(median.loc['control', 'copying']):.1%} over NCCL.",
    )


@scenario.judge
def judge(evidence: Evidence) -> Verdict:
    """How torch answers who asks for collectives over TensorPipe; copies and times of both forms of an all-gather over gloo."""
    rows = symptoms.attempts(evidence)
    gathers, asked = rows[rows["what"].eq("gather")], rows[rows["what"].eq("ask")]
    if (nothing := symptoms.undecided(evidence, {"all-gathers": gathers})) is not None:
        return nothing
    refused = tries.text(asked, "error").ne("")
    own = asked["arm"].eq("fault")
    said, tried = int((refused & own).sum()), int(own.sum())
    kind = VerdictKind.NOT_REPRODUCED
    if tried:
        kind = VerdictKind.REFUTED if said == tried else VerdictKind.PARTLY
    form = tries.text(gathers, "form")
    as_list, as_tensor = gathers[form.eq("list")], gathers[form.eq("tensor")]
    copied = [int(tries.number(some, "copies").max()) if len(some) else 0 for some in (as_list, as_tensor)]
    text = str(asked.loc[refused & own, "text"].iloc[0]).split("\n")[0][:120] if said else ""
    quoted = f' ("{text}")' if text else ""
    compared = rows["what"].eq("compare") & rows["arm"].eq("control")
    return Verdict(
        kind=kind,
        control_healthy=symptoms.ended_well(evidence, "control")
        and symptoms.unmarred(rows, "control")
        and not tries.number(rows, "wrong")[compared].any(),
        metrics={
            "list_form_s": symptoms.measure(as_list, "took_s"),
            "tensor_form_s": symptoms.measure(as_tensor, "took_s"),
            "list_form_copies": symptoms.measure(as_list, "copies", unit="calls"),
            "tensor_form_copies": symptoms.measure(as_tensor, "copies", unit="calls"),
            "refused": symptoms.share(asked, refused, documented="never: 9.1 GB/s"),
        },
        because=f"torch refused collectives over TensorPipe in {said} of {tried} tries{quoted}. Over gloo the list form "
        f"of an all-gather makes {copied[0]} copies a call that torch's profiler sees, and the tensor form {copied[1]}.",
    )
