"""A group made without a timeout waits for 30 minutes, whatever the default group was given."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dtprobe import Arm, Mitigation, Scenario, Verdict
from dtprobe.authoring import symptoms

if TYPE_CHECKING:
    import pandas as pd

    from dtprobe import Evidence

TIMEOUT_S = 1.5
LATE_S = 4.0
DEFAULT_S = 1800.0
"""What `new_group` gives a gloo group (torch.distributed.constants.default_pg_timeout); NCCL's is 10 minutes."""

TIMEOUT = ("--timeout-s", str(TIMEOUT_S))
LATE = (*TIMEOUT, "--late-s", str(LATE_S))

scenario = Scenario(
    name="timeout-not-inherited",
    failure_mode="timeout-not-inherited",
    title="A new group does not take over the default group's timeout",
    claim="`new_group` without a timeout has torch's default of 30 minutes also where the default group was given a shorter one, so a rank "
    "waits on it long after the timeout that the job was started with.",
    source="failure modes people meet; torch.distributed.distributed_c10d",
    layer="c10d",
    certifies_not="Nothing about NCCL, whose default is 10 minutes and whose watchdog enforces it.",
    world_size=2,
    repeats=2,
    control=Arm("worker.py", ("--timeout-s", "30", "--groups", "new_group,explicit,registry")),
    fault=Arm("worker.py", (*LATE, "--groups", "new_group")),
    mitigated=Arm("worker.py", (*LATE, "--groups", "registry")),
    expect={"torch>=2.9": "reproduced"},
)


@scenario.judge
def judge(evidence: Evidence) -> Verdict:
    """All-reduces in which a punctual rank waited past the timeout without an error, and the timeouts that the groups report."""
    waits = _waits(evidence)
    plain = waits[waits["how"].eq("new_group")]
    if (nothing := symptoms.undecided(evidence, {"waits": plain})) is not None:
        return nothing
    over, clean = (symptoms.counts(plain, plain["overstayed"], arm) for arm in ("fault", "control"))
    timeouts = evidence.events("timeout").reindex(columns=["arm", "how", "group_s"])
    bare = timeouts[timeouts["how"].eq("new_group")]
    given = bare.loc[bare["arm"].eq("fault"), "group_s"]
    kind = symptoms.apart(over, clean, whole=bool(over[0] == over[1] and given.eq(DEFAULT_S).all()))
    cured = waits[waits["arm"].eq("mitigated")]
    because = (
        f"With {TIMEOUT_S:g} s for the default group, groups made without one reported {given.median():g} s, and {over[0]} of {over[1]} waits of a "
        f"punctual rank lasted {LATE_S:g} s without an error, {clean[0]} of {clean[1]} in control."
    )
    if len(cured):
        because += f" Made by the registry: {int(cured['in_time'].sum())} of {len(cured)} waits failed at {TIMEOUT_S:g} s."
    return Verdict(
        kind=kind,
        mitigation=_mitigation(evidence, cured),
        control_healthy=symptoms.unmarred(symptoms.attempts(evidence), "control") and symptoms.ended_well(evidence, "control"),
        metrics={
            "waited_past_the_timeout": symptoms.share(waits, waits["overstayed"]),
            "failed_at_the_timeout": symptoms.share(waits, waits["in_time"]),
            "wait_s": symptoms.measure(waits[waits["how"].isin(("new_group", "registry"))], "took_s"),
            "timeout_of_new_group_s": symptoms.measure(bare, "group_s", documented="1800 beside 6"),
            "timeout_of_registry_s": symptoms.measure(timeouts[timeouts["how"].eq("registry")], "group_s"),
        },
        because=because + symptoms.chance(kind),
    )


def _waits(evidence: Evidence) -> pd.DataFrame:
    """What the ranks that came in time met: `overstayed` ended well long after the timeout, `in_time` failed at it."""
    rows = symptoms.attempts(evidence, "all_reduce").reindex(columns=[*symptoms.COLUMNS, "how", "late"])
    rows = rows[rows["late"].eq(False)]
    failed = rows["error"].fillna("").ne("")
    return rows.assign(
        overstayed=(rows["error"].eq("") & rows["took_s"].gt(2 * TIMEOUT_S)).fillna(False).astype(bool),
        in_time=(failed & rows["took_s"].between(0.9 * TIMEOUT_S, LATE_S)).fillna(False).astype(bool),
    )


def _mitigation(evidence: Evidence, cured: pd.DataFrame) -> Mitigation:
    if not evidence.ran("mitigated"):
        return Mitigation.NONE
    held = len(cured) and cured["how"].eq("registry").all() and cured["in_time"].all()
    return Mitigation.HELD if held and symptoms.ended_well(evidence, "mitigated") else Mitigation.FAILED
