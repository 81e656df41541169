"""What torch.distributed.rpc does with a class of one's own: some arrive, some are refused, and some lose their gradient in silence."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dtprobe import Arm, Mitigation, Scenario, Verdict, VerdictKind
from dtprobe.authoring import symptoms, tries

if TYPE_CHECKING:
    from dtprobe import Evidence

CLAIMED = "No serializer registered for type"
BOUND = "does not have a __getstate__ method defined"

scenario = Scenario(
    name="rpc-custom-class",
    failure_mode="rpc-custom-class",
    title="Remote calls with classes of one's own",
    claim="RPC refuses custom classes, C++ ones and results of an autograd.Function alike, with `No serializer registered for type`.",
    source="failure document, section 2.3",
    layer="code",
    certifies_not="Nothing about classes bound from C++ other than the one that is at hand in torch, which stands for those without def_pickle.",
    world_size=2,
    timeout_s=90,
    repeats=2,
    control=Arm("worker.py", args=("--plain",)),
    fault=Arm("worker.py"),
    mitigated=Arm("worker.py", args=("--registry",)),
    expect={"torch>=2.9": "partly"},
)


@scenario.judge
def judge(evidence: Evidence) -> Verdict:
    """The matrix: what arrived whole, what was refused in which words, whose gradient was lost."""
    rows = symptoms.attempts(evidence)
    sends, gradients = rows[rows["what"].eq("send")], rows[rows["what"].eq("gradient")]
    if (nothing := symptoms.undecided(evidence, {"calls": sends, "gradients": gradients})) is not None:
        return nothing
    case, of = tries.text(sends, "case"), tries.text(gradients, "case")
    words = tries.text(sends, "text")
    whole = sends["error"].eq("") & tries.number(sends, "whole").eq(1)
    no_graph = case.eq("function") & sends["error"].eq("") & ~tries.number(sends, "has_grad_fn").eq(1)
    refused = case.eq("bound") & words.str.contains(BOUND, regex=False)
    lost = of.eq("subclass") & gradients["error"].eq("") & ~tries.number(gradients, "right").eq(1)
    claimed = words.str.contains(CLAIMED, regex=False)

    def in_fault(frame, holds, asked) -> tuple[int, int]:
        own = frame["arm"].eq("fault") & asked
        return int((holds & own).sum()), int(own.sum())

    bound, function, subclass = (
        in_fault(sends, refused, case.eq("bound")),
        in_fault(sends, no_graph, case.eq("function")),
        in_fault(gradients, lost, of.eq("subclass")),
    )
    as_claimed = in_fault(sends, claimed, case.ne(""))[0]
    kind = VerdictKind.NOT_REPRODUCED
    if bound[0] and bound[0] == bound[1]:
        kind = VerdictKind.REPRODUCED if as_claimed else VerdictKind.PARTLY
    right = gradients["error"].eq("") & tries.number(gradients, "right").eq(1)
    mitigation, cured = Mitigation.NONE, ""
    if evidence.ran("mitigated"):
        arrived, asked = symptoms.counts(sends, whole, "mitigated")
        well, total = symptoms.counts(gradients, right, "mitigated")
        held = arrived == asked > 0 and well == total > 0 and symptoms.ended_well(evidence, "mitigated")
        held = held and case[sends["arm"].eq("mitigated")].eq("bound").any()
        mitigation = Mitigation.HELD if held else Mitigation.FAILED
        cured = f" With the registry {arrived} of {asked} arrived whole and {well} of {total} gradients were right."
    clean = sends["arm"].eq("control")
    return Verdict(
        kind=kind,
        mitigation=mitigation,
        control_healthy=symptoms.ended_well(evidence, "control")
        and symptoms.unmarred(rows, "control")
        and bool(whole[clean].all() and right[gradients["arm"].eq("control")].all()),
        metrics={
            "arrived_whole": symptoms.share(sends, whole),
            "gradient_right": symptoms.share(gradients, right),
            "refused_as_claimed": symptoms.share(sends, claimed, documented="all custom classes"),
            "call_s": symptoms.measure(sends, "took_s"),
        },
        because=f'A class bound from C++ without def_pickle was refused in {bound[0]} of {bound[1]} calls ("{BOUND}"), none with the '
        f"words of the claim ({as_claimed}). The result of an autograd.Function arrived without its graph in {function[0]} of {function[1]}, and "
        f"the gradient through a tensor subclass was lost without an error in {subclass[0]} of {subclass[1]}.{cured}",
    )
