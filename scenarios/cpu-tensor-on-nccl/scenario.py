"""A CPU tensor on a group whose backend serves GPUs only: it is refused at once, and nothing is copied in silence."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dtprobe import Arm, Mitigation, Scenario, Verdict, VerdictKind
from dtprobe.authoring import symptoms, tries

if TYPE_CHECKING:
    from dtprobe import Evidence

SUM = 2.0
SAYS = "No backend type associated with device type cpu"

scenario = Scenario(
    name="cpu-tensor-on-nccl",
    failure_mode="cpu-tensor-on-nccl",
    title="A CPU tensor meets a group for GPUs",
    claim="NCCL takes a CPU tensor by copying it to the GPU and back without a word.",
    source="failure document, section 2.1",
    layer="c10d",
    certifies_not="Without a GPU the backend is a stand-in called fake_nccl (gloo, registered for cuda only): torch refuses before it "
    "asks any backend, and that is what is shown. NCCL itself is shown with --device cuda.",
    world_size=2,
    timeout_s=60,
    repeats=2,
    control=Arm("worker.py", args=("--backends", "cpu")),
    fault=Arm("worker.py", args=("--backends", "cuda")),
    mitigated=Arm("worker.py", args=("--backends", "both")),
    expect={"torch>=2.9": "refuted"},
)


@scenario.judge
def judge(evidence: Evidence) -> Verdict:
    """How the all-reduces of CPU tensors ended on a group that serves only GPUs."""
    rows = symptoms.attempts(evidence, "all_reduce")
    if (nothing := symptoms.undecided(evidence, {"all-reduces": rows})) is not None:
        return nothing
    served = tries.text(rows, "serves")
    value = tries.number(rows, "value")
    right = rows["error"].eq("").fillna(False) & value.eq(SUM)
    refused = rows["text"].str.contains(SAYS, regex=False).fillna(False)
    own = rows["arm"].eq("fault") & served.eq("cuda")
    told, silent, tried = int((refused & value.eq(1))[own].sum()), int(right[own].sum()), int(own.sum())
    if not tried:
        kind = VerdictKind.NOT_REPRODUCED
    elif silent == tried:
        kind = VerdictKind.REPRODUCED
    else:
        kind = VerdictKind.REFUTED if told == tried else VerdictKind.PARTLY
    mitigation, cured = Mitigation.NONE, ""
    if evidence.ran("mitigated"):
        well, total = symptoms.counts(rows, right & served.eq("cpu,cuda"), "mitigated")
        held = well == total > 0 and symptoms.ended_well(evidence, "mitigated")
        mitigation = Mitigation.HELD if held else Mitigation.FAILED
        cured = f" With a backend for each device type {well} of {total} were right."
    return Verdict(
        kind=kind,
        mitigation=mitigation,
        control_healthy=symptoms.ended_well(evidence, "control")
        and symptoms.unmarred(rows, "control")
        and right[rows["arm"].eq("control")].all(),
        metrics={
            "refused": symptoms.share(rows, refused, documented="never: a silent copy"),
            "right": symptoms.share(rows, right),
            "took_s": symptoms.measure(rows, "took_s"),
        },
        because=f'{told} of {tried} all-reduces of a CPU tensor raised "{SAYS}" and left the tensor alone, {silent} worked.{cured}',
    )


gpu = scenario.with_variant(
    "gpu",
    title=f"{scenario.title} (NCCL, two GPUs)",
    certifies_not="Two GPUs of one host; nothing about other back ends.",
    needs=("linux", "torch", "cuda:2"),
    tags=("gpu",),
    measures_cost=False,
    repeats=1,
    control=Arm("worker.py", args=("--backends", "cpu", "--device", "cuda")),
    fault=Arm("worker.py", args=("--backends", "cuda", "--device", "cuda")),
    mitigated=Arm("worker.py", args=("--backends", "both", "--device", "cuda")),
)
gpu.judge(judge)
