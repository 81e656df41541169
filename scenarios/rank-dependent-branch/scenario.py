"""A branch on local data holds a collective: one rank makes one more, and the error comes steps later, on that rank."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dtprobe import Arm, Mitigation, Scenario, Verdict
from dtprobe.authoring import symptoms

if TYPE_CHECKING:
    import pandas as pd

    from dtprobe import Evidence

SPIKES = 1
SPIKE_STEP = 3
TIMEOUT_S = 2.5
PROVOKED = ("--spike-rank", str(SPIKES), "--timeout-s", str(TIMEOUT_S))

scenario = Scenario(
    name="rank-dependent-branch",
    failure_mode="data-dependent-branch-desync",
    title="A branch on local data makes one rank call one collective more",
    claim="A collective under a condition on local data raises nothing in the step in which one rank takes it: from the next step on all "
    "sums are wrong, and only the last one waits for its timeout, on the rank that took it. TORCH_DISTRIBUTED_DEBUG=DETAIL is no sooner.",
    source="failure modes people meet; measured here",
    layer="code",
    certifies_not="Nothing about branches whose collective has another size or type, which are noticed where they meet the others'.",
    world_size=2,
    repeats=2,
    control=Arm("worker.py", ("--ways", "none,detail,checked,agreed", "--timeout-s", "30")),
    fault=Arm("worker.py", (*PROVOKED, "--ways", "none,detail")),
    mitigated=Arm("worker.py", (*PROVOKED, "--ways", "checked,agreed")),
    expect={"torch>=2.9": "reproduced"},
)


@scenario.judge
def judge(evidence: Evidence) -> Verdict:
    """Steps after the branch whose sum is wrong, or that fail at the timeout; the step of the branch itself."""
    steps = _steps(evidence)
    after = steps[steps["step"].gt(SPIKE_STEP)]
    plain, detail = (after[after["way"].eq(way)] for way in ("none", "detail"))
    if (nothing := symptoms.undecided(evidence, {"steps": plain, "steps under DETAIL": detail})) is not None:
        return nothing
    spoiled, clean = (symptoms.counts(plain, plain["spoiled"], arm) for arm in ("fault", "control"))
    unseen = symptoms.counts(detail, detail["spoiled"], "fault")
    fault = steps[steps["arm"].eq("fault") & steps["way"].isin(("none", "detail"))]
    at_once = int(fault.loc[fault["step"].le(SPIKE_STEP), "failed"].sum())
    blamed = fault.loc[fault["failed"], "rank"]
    kind = symptoms.apart(
        spoiled,
        clean,
        whole=bool(spoiled[0] == spoiled[1] and unseen[0] == unseen[1] and not at_once and blamed.eq(SPIKES).all()),
    )
    silent = symptoms.counts(plain, plain["silent"], "fault")
    because = (
        f"{spoiled[0]} of {spoiled[1]} steps after the branch were wrong ({silent[0]} without an error), {clean[0]} of {clean[1]} in control; "
        f"under DETAIL {unseen[0]} of {unseen[1]}. The step of the branch raised {at_once} errors; rank {SPIKES} raised "
        f"{int(blamed.eq(SPIKES).sum())} of the {len(blamed)} later ones."
    )
    cured = steps[steps["arm"].eq("mitigated")]
    told, agreed = cured[cured["way"].eq("checked") & cured["failed"]], cured[cured["way"].eq("agreed")]
    if len(told):
        because += (
            f" Checked: {int(told['told'].sum())} of {len(told)} errors named rank {SPIKES} in the very step; where all ranks took the "
            f"branch together {int(agreed['silent'].sum() + agreed['failed'].sum())} of {len(agreed)} steps were wrong."
        )
    return Verdict(
        kind=kind,
        mitigation=_mitigation(evidence, cured),
        control_healthy=symptoms.unmarred(symptoms.attempts(evidence), "control")
        and symptoms.ended_well(evidence, "control")
        and not steps.loc[steps["arm"].eq("control"), "silent"].any(),
        metrics={
            "wrong_after_the_branch": symptoms.share(plain, plain["spoiled"]),
            "silently_wrong_after_the_branch": symptoms.share(plain, plain["silent"]),
            "wrong_after_the_branch_under_detail": symptoms.share(detail, detail["spoiled"]),
            "wrong_after_an_agreed_branch": symptoms.share(agreed, agreed["spoiled"]),
            "errors_naming_the_culprit": symptoms.share(steps[steps["failed"]], steps.loc[steps["failed"], "told"]),
            "time_to_error_s": symptoms.measure(steps[steps["failed"] & steps["way"].isin(("none", "checked"))], "took_s"),
        },
        because=because + symptoms.chance(kind),
    )


def _steps(evidence: Evidence) -> pd.DataFrame:
    """All steps: `failed` raised, `silent` did not and has a wrong sum, `spoiled` is silent or failed at the timeout, `told` names the rank."""
    rows = symptoms.attempts(evidence, "step").reindex(columns=[*symptoms.COLUMNS, "way", "step", "sum", "right", "named"])
    failed = rows["error"].fillna("").ne("")
    silent = rows["error"].eq("").fillna(False) & rows["sum"].ne(rows["right"])
    late = failed & rows["took_s"].ge(0.9 * TIMEOUT_S).fillna(False)
    told = rows["named"].eq(str(SPIKES)) & rows["step"].eq(SPIKE_STEP)
    return rows.assign(
        failed=failed.astype(bool), silent=silent.astype(bool), spoiled=(silent | late).astype(bool), told=told.astype(bool)
    )


def _mitigation(evidence: Evidence, cured: pd.DataFrame) -> Mitigation:
    """Held where every rank raises in the step of the branch and names the rank, no sum is wrong, and an agreed branch works."""
    if not evidence.ran("mitigated"):
        return Mitigation.NONE
    checked, agreed = (cured[cured["way"].eq(way)] for way in ("checked", "agreed"))
    told = checked[checked["failed"]]
    ranks = int((evidence.outcomes["arm"] == "mitigated").sum())
    held = (
        len(told) == ranks and told["told"].all() and not cured["silent"].any() and len(agreed) and not agreed["failed"].any()
    )
    return Mitigation.HELD if held and symptoms.ended_well(evidence, "mitigated") else Mitigation.FAILED
