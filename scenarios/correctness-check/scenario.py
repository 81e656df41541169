"""An all-reduce that is checked by printing one value: what the check sees, and what is really there."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dtprobe import Arm, Mitigation, Scenario, Verdict, VerdictKind
from dtprobe.authoring import symptoms, tries

if TYPE_CHECKING:
    from dtprobe import Evidence

CULPRIT = 1
ELEMENT = 1234
FAULT = f"collective:corrupt,rank={CULPRIT},op=all_reduce,group=default,every=1,element={ELEMENT},bit=30,where=output"

scenario = Scenario(
    name="correctness-check",
    failure_mode="silent-corruption",
    title="A check of all-reduce that passes over a wrong result",
    claim="all_reduce returns its result; random tensors are equal on all ranks; and a value that rank 0 prints shows that all-reduce works.",
    source="failure document, section 1",
    layer="code",
    certifies_not="Nothing about how often results are wrong: here one element on rank 1 is changed on purpose.",
    world_size=2,
    timeout_s=60,
    repeats=2,
    control=Arm("worker.py"),
    fault=Arm("worker.py", faults=(FAULT,)),
    mitigated=Arm("worker.py", args=("--check",), faults=(FAULT,)),
    expect={"torch>=2.9": "refuted"},
)


@scenario.judge
def judge(evidence: Evidence) -> Verdict:
    """Of the results that were really different on the two ranks, those that the printed value and the framework's check noticed."""
    rows = symptoms.attempts(evidence)
    printed = rows[rows["what"].eq("printed")]
    if (nothing := symptoms.undecided(evidence, {"all-reduces": printed})) is not None:
        return nothing
    corrupt = tries.number(printed, "differing").gt(0)
    alarm = ~tries.number(printed, "passed").eq(1) & printed["rank"].eq(0)
    at_root = printed["rank"].eq(0)  # where the document looks
    seen, there = (symptoms.counts(printed, one & at_root, "fault")[0] for one in (corrupt & alarm, corrupt))
    document = rows[rows["what"].eq("document")]
    fault = document["arm"].eq("fault")
    none, unequal = tries.text(document, "returned").eq("NoneType"), tries.number(document, "differing").gt(0)
    if not there:
        kind = VerdictKind.NOT_REPRODUCED
    elif seen == 0 and none[fault].all() and unequal[fault].all():
        kind = VerdictKind.REFUTED
    else:
        kind = (
            VerdictKind.REPRODUCED if seen == there and not (none[fault].any() or unequal[fault].any()) else VerdictKind.PARTLY
        )
    mitigation, cured = Mitigation.NONE, ""
    checks = rows[rows["what"].eq("check")]
    named = tries.text(checks, "named").eq(",".join(map(str, range(scenario.world_size)))) & checks["error"].eq("Inconsistent")
    named &= tries.text(checks, "text").str.contains(rf"\b{ELEMENT}\b")
    if evidence.ran("mitigated"):
        planted = int((corrupt & printed["arm"].eq("mitigated")).sum())
        found = symptoms.counts(checks, named, "mitigated")[0]
        held = planted and found == planted and symptoms.ended_well(evidence, "mitigated")
        mitigation = Mitigation.HELD if held else Mitigation.FAILED
        cured = f" The consistency check raised on {found} of {planted}, naming the element."
    clean = printed["arm"].eq("control")
    return Verdict(
        kind=kind,
        mitigation=mitigation,
        control_healthy=symptoms.ended_well(evidence, "control")
        and symptoms.unmarred(rows, "control")
        and not (corrupt | alarm | tries.number(printed, "wrong").gt(0))[clean].any(),
        metrics={
            "results_that_differ": symptoms.share(printed, corrupt),
            "noticed_by_the_printed_value": symptoms.share(printed[at_root], (corrupt & alarm)[at_root], documented="all"),
            "noticed_by_the_check": symptoms.share(checks, named),
            "all_reduce_returned_none": symptoms.share(document, none, documented="the result"),
            "unseeded_tensors_differ": symptoms.share(document, unequal, documented="equal"),
        },
        because=f"Rank 0's printed value noticed {seen} of {there} results that differed between the ranks. all_reduce returned None in "
        f"{int(none[fault].sum())} of {int(fault.sum())} calls, and unseeded random tensors differed in {int(unequal[fault].sum())}.{cured}",
    )
