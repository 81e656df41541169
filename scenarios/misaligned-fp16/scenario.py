"""Half-precision all-reduces at addresses that are not multiples of 32 bytes: nothing fails, whatever is said."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dtprobe import Arm, Mitigation, Scenario, Verdict, VerdictKind
from dtprobe.authoring import symptoms, tries

if TYPE_CHECKING:
    from dtprobe import Evidence

scenario = Scenario(
    name="misaligned-fp16",
    failure_mode="misaligned-collective",
    title="Half-precision buffers off a multiple of 32 bytes",
    claim="An all-reduce in half precision needs buffers aligned to 32 bytes, and fails with an invalid usage error or gives wrong "
    "values where they are not.",
    source="failure document, section 4.2",
    layer="c10d",
    certifies_not="This is gloo on the CPU. NCCL is right at such addresses too but slower, which only a GPU shows; kernels of one's own "
    "that load vectors do fail at them.",
    world_size=2,
    timeout_s=60,
    repeats=2,
    control=Arm("worker.py"),
    fault=Arm("worker.py", args=("--off", "1,2,8,16")),
    mitigated=Arm("worker.py", args=("--off", "1,2,8,16", "--guarded")),
    expect={"torch>=2.9": "refuted"},
)


@scenario.judge
def judge(evidence: Evidence) -> Verdict:
    """All-reduces at misaligned addresses that raised or were wrong; whether the guard handed aligned ones down."""
    rows = symptoms.attempts(evidence, "all_reduce")
    if (nothing := symptoms.undecided(evidence, {"all-reduces": rows})) is not None:
        return nothing
    off, wrong, copies = (tries.number(rows, name) for name in ("off", "wrong", "copies"))
    failed = rows["error"].ne("") | wrong.gt(0)
    fault = rows["arm"].eq("fault") & off.gt(0)
    bad, tried = int(failed[fault].fillna(True).sum()), int(fault.sum())
    if not tried:
        kind = VerdictKind.NOT_REPRODUCED
    elif bad == tried:
        kind = VerdictKind.REPRODUCED
    else:
        kind = VerdictKind.PARTLY if bad else VerdictKind.REFUTED
    mitigation, cured = Mitigation.NONE, ""
    if evidence.ran("mitigated"):
        own = rows["arm"].eq("mitigated")
        well = (~failed & off.gt(0) & copies.eq(1))[own].fillna(False)
        held = len(well) and well.all() and symptoms.ended_well(evidence, "mitigated")
        mitigation = Mitigation.HELD if held else Mitigation.FAILED
        cured = f" Guarded: {int(well.sum())} of {len(well)} ran on an aligned copy and were right."
    distances = ", ".join(str(int(one)) for one in sorted(off[fault].unique()))
    return Verdict(
        kind=kind,
        mitigation=mitigation,
        control_healthy=symptoms.ended_well(evidence, "control")
        and symptoms.unmarred(rows, "control")
        and not (wrong.gt(0) | off.gt(0))[rows["arm"].eq("control")].any(),
        metrics={
            "failed_or_wrong": symptoms.share(rows, failed, documented="NCCL_INVALID_USAGE below 32-byte alignment"),
            "misaligned": symptoms.share(rows, off.gt(0)),
            "copied_by_the_guard": symptoms.share(rows, copies.gt(0)),
            "all_reduce_s": symptoms.measure(rows, "took_s"),
        },
        because=f"{bad} of {tried} all-reduces of float16 at addresses {distances or 0} bytes off a multiple of 32 raised or had wrong "
        f"elements.{cured}",
    )


gpu = scenario.with_variant(
    "gpu",
    title=f"{scenario.title} (NCCL, two GPUs)",
    certifies_not="Two GPUs of one host, tensors of 2 KB: what misalignment costs large ones is another measurement.",
    needs=("linux", "torch", "cuda:2"),
    tags=("gpu",),
    measures_cost=False,
    repeats=1,
    control=Arm("worker.py", args=("--device", "cuda")),
    fault=Arm("worker.py", args=("--device", "cuda", "--off", "2,4,8,16")),
    mitigated=Arm("worker.py", args=("--device", "cuda", "--off", "2,4,8,16", "--guarded")),
)
gpu.judge(judge)
