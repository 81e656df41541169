"""Groups that not all ranks create, or with different members: the error is a store key that nobody explains."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dtprobe import Arm, Mitigation, Scenario, Verdict
from dtprobe.authoring import symptoms

if TYPE_CHECKING:
    import pandas as pd

    from dtprobe import Evidence

CULPRIT = 1
TIMEOUT_S = 2.0
TIMEOUT = ("--timeout-s", str(TIMEOUT_S))


def _arms(misuse: str) -> dict[str, Arm]:
    return {
        "fault": Arm("worker.py", ("--misuse", misuse, *TIMEOUT, "--ways", "none")),
        "mitigated": Arm("worker.py", ("--misuse", misuse, *TIMEOUT, "--ways", "registry")),
    }


scenario = Scenario(
    name="new-group-misuse",
    failure_mode="new-group-misuse",
    title="Only one rank calls new_group",
    claim="`new_group` is collective over the whole job: where one rank alone calls it, that rank waits until the group's timeout and fails "
    "with a store key in place of a rank's name, and the others go on without notice.",
    source="failure document, section 2.5 (initialisation order); torch documentation of new_group",
    layer="code",
    certifies_not="Nothing about NCCL, whose communicators are made at their first use.",
    variant="one-rank",
    default=True,
    world_size=2,
    repeats=2,
    control=Arm("worker.py", ("--timeout-s", "30", "--ways", "none,registry")),
    **_arms("one-rank"),
    expect={"torch>=2.9": "reproduced"},
)

rank_lists = scenario.with_variant(
    "rank-lists",
    default=False,
    title="A rank calls new_group with other members",
    claim="Where ranks call `new_group` with different lists, all of them wait until the group's timeout and fail with a store key in place "
    "of a rank's name, and of what differs.",
    world_size=3,
    **_arms("rank-lists"),
)


@scenario.judge
def judge(evidence: Evidence) -> Verdict:
    """Tries of the rank that is alone: failed at the timeout, with a store key and without a rank."""
    return _judged(evidence, only=(0,))


@rank_lists.judge
def judge_rank_lists(evidence: Evidence) -> Verdict:
    """Tries of all ranks: failed at the timeout, with a store key and without a rank."""
    return _judged(evidence, only=(0, 1, 2))


def _judged(evidence: Evidence, only: tuple[int, ...]) -> Verdict:
    tries = _tries(evidence)
    plain = tries[tries["way"].eq("none") & tries["rank"].isin(only)]
    if (nothing := symptoms.undecided(evidence, {"tries": plain})) is not None:
        return nothing
    hung, clean = (symptoms.counts(plain, plain["hung"], arm) for arm in ("fault", "control"))
    kind = symptoms.apart(hung, clean)
    text = plain.loc[plain["hung"], "text"]
    because = (
        f"{hung[0]} of {hung[1]} tries failed at the {TIMEOUT_S:g} s timeout with a store key and no rank's name"
        + (f' ("{text.iloc[0]}")' if len(text) else "")
        + f", {clean[0]} of {clean[1]} in control."
    )
    cured = tries[tries["arm"].eq("mitigated")]
    if len(cured):
        because += f" The registry: {int(cured['told'].sum())} of {len(cured)} errors named rank {CULPRIT}, after {cured['took_s'].max():.2g} s at most."
    return Verdict(
        kind=kind,
        mitigation=_mitigation(evidence, cured, only),
        control_healthy=symptoms.unmarred(symptoms.attempts(evidence), "control")
        and symptoms.ended_well(evidence, "control")
        and tries.loc[tries["arm"].eq("control"), "sum"].eq(evidence.world_size).all(),
        metrics={
            "failed_at_the_timeout_unnamed": symptoms.share(plain, plain["hung"]),
            "errors_naming_the_culprit": symptoms.share(tries[tries["failed"]], tries["told"]),
            "time_to_error_s": symptoms.measure(tries[tries["failed"]], "took_s"),
        },
        because=because + symptoms.chance(kind),
    )


def _tries(evidence: Evidence) -> pd.DataFrame:
    """All tries: `hung` failed at the timeout with a key and no name, `told` named the culprit."""
    rows = symptoms.attempts(evidence, "use").reindex(columns=[*symptoms.COLUMNS, "way", "sum", "named"])
    failed = rows["error"].fillna("").ne("").astype(bool)
    late = rows["took_s"].ge(0.9 * TIMEOUT_S).fillna(False).astype(bool)
    keyed = rows["text"].str.contains("keys: ", regex=False).fillna(False).astype(bool) & rows["named"].fillna("").eq("")
    return rows.assign(failed=failed, hung=failed & late & keyed, told=rows["named"].eq(str(CULPRIT)))


def _mitigation(evidence: Evidence, cured: pd.DataFrame, only: tuple[int, ...]) -> Mitigation:
    """Held where the registry told each rank that took part which one differs or is missing."""
    if not evidence.ran("mitigated"):
        return Mitigation.NONE
    held = set(cured["rank"]) == set(only) and cured["told"].all() and cured["way"].eq("registry").all()
    return Mitigation.HELD if held and symptoms.ended_well(evidence, "mitigated") else Mitigation.FAILED
