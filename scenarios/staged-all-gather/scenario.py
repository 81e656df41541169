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
