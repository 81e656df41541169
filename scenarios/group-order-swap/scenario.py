"""Groups of the same members, created in another order on one rank, are swapped: wrong sums, no error."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dtprobe import Arm, Mitigation, Scenario, Verdict
from dtprobe.authoring import symptoms

if TYPE_CHECKING:
    import pandas as pd

    from dtprobe import Evidence

SWAPS = ("--swap-rank", "1")

scenario = Scenario(
    name="group-order-swap",
    failure_mode="group-order-swap",
    title="A rank creates two groups in the other order, and their sums are swapped",
    claim="Groups of equal members that one rank creates in another order are swapped: a sum over the first mixes the ranks' data for "
    "both, nothing is raised, and TORCH_DISTRIBUTED_DEBUG=DETAIL does not notice.",
    source="failure document, section 2.5 (initialisation order); measured here",
    layer="code",
    certifies_not="Nothing about NCCL, where ranks with communicators made at first use wait for each other instead.",
    world_size=2,
    repeats=2,
    control=Arm("worker.py", ("--ways", "none,detail,create,create_all")),
    fault=Arm("worker.py", (*SWAPS, "--ways", "none,detail")),
    mitigated=Arm("worker.py", (*SWAPS, "--ways", "create_all,create")),
    expect={"torch>=2.9": "reproduced"},
)


@scenario.judge
def judge(evidence: Evidence) -> Verdict:
    """Sums that are wrong without an error, by the way in which the groups were made."""
    sums = symptoms.attempts(evidence, "sum").reindex(columns=[*symptoms.COLUMNS, "way", "value", "right"])
    sums["silent"] = sums["error"].eq("") & sums["value"].ne(sums["right"])
    plain, detail = (sums[sums["way"].eq(way)] for way in ("none", "detail"))
    if (nothing := symptoms.undecided(evidence, {"sums": plain, "sums under DETAIL": detail})) is not None:
        return nothing
    wrong, clean = (symptoms.counts(plain, plain["silent"], arm) for arm in ("fault", "control"))
    unseen = symptoms.counts(detail, detail["silent"], "fault")
    kind = symptoms.apart(wrong, clean, whole=bool(wrong[0] == wrong[1] and unseen[0] == unseen[1]))
    every = symptoms.attempts(evidence)
    healthy = symptoms.unmarred(every, "control") and symptoms.ended_well(evidence, "control")
    refused, cured = _refused(evidence), sums[sums["way"].eq("create_all")]
    seen = ", ".join(f"{value:g}" for value in sorted(plain.loc[plain["arm"].eq("fault") & plain["silent"], "value"].unique()))
    because = (
        f"{wrong[0]} of {wrong[1]} sums were wrong without an error ({seen} in place of 3 and 300), {clean[0]} of {clean[1]} in control; "
        f"under DETAIL {unseen[0]} of {unseen[1]}."
    )
    if len(refused):
        because += f" The registry refused the order on {int(refused['refused'].sum())} of {len(refused)} ranks"
        right = symptoms.counts(cured, cured["value"].eq(cured["right"]), "mitigated")
        because += f", and given both groups at once made them right: {right[0]} of {right[1]} sums."
    return Verdict(
        kind=kind,
        mitigation=_mitigation(evidence, refused, cured),
        control_healthy=healthy and not sums.loc[sums["arm"].eq("control"), "silent"].any(),
        metrics={
            "silently_wrong": symptoms.share(plain, plain["silent"]),
            "silently_wrong_under_detail": symptoms.share(detail, detail["silent"]),
            "silently_wrong_by_create_all": symptoms.share(cured, cured["silent"]),
            "refused_by_create": symptoms.share(refused, refused["refused"]),
            "time_to_refusal_s": symptoms.measure(refused, "took_s"),
        },
        because=because + symptoms.chance(kind),
    )


def _refused(evidence: Evidence) -> pd.DataFrame:
    """The tries to make groups through the registry in the rank's own order, where ranks differ in it."""
    tries = symptoms.attempts(evidence, "make").reindex(columns=[*symptoms.COLUMNS, "way"])
    own = tries[tries["arm"].eq("mitigated") & tries["way"].eq("create")]
    return own.assign(refused=own["error"].eq("GroupMismatch") & own["text"].str.contains("small.*large", regex=True))


def _mitigation(evidence: Evidence, refused: pd.DataFrame, cured: pd.DataFrame) -> Mitigation:
    """Held where the registry refuses what differs, on every rank, and makes what it is given at once right."""
    if not evidence.ran("mitigated"):
        return Mitigation.NONE
    own = cured[cured["arm"].eq("mitigated")]
    held = len(refused) and refused["refused"].all() and len(own) and own["value"].eq(own["right"]).all()
    return Mitigation.HELD if held and symptoms.ended_well(evidence, "mitigated") else Mitigation.FAILED
