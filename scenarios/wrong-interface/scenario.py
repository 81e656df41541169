"""A network interface that one rank does not have: that rank says so, and the others wait and learn nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dtprobe import Arm, Mitigation, Scenario, Verdict
from dtprobe.authoring import symptoms

if TYPE_CHECKING:
    import pandas as pd

    from dtprobe import Evidence

WRONG = 1
INTERFACE = "nope0"
TIMEOUT_S = 4.0
TIMEOUT = ("--timeout-s", str(TIMEOUT_S))
ELSEWHERE = (f"environment:set,rank={WRONG},var=GLOO_SOCKET_IFNAME,value={INTERFACE}",)

scenario = Scenario(
    name="wrong-interface",
    failure_mode="gloo-ifname-invalid",
    title="GLOO_SOCKET_IFNAME names an interface that one rank does not have",
    claim="A rank that is given an interface it does not have fails at once and says its name; the other ranks wait until the timeout and "
    "fail with a store key that says nothing of it.",
    source="failure modes people meet; gloo transport/tcp/device.cc",
    layer="c10d",
    certifies_not="Nothing about an interface that exists and leads nowhere, nor about NCCL_SOCKET_IFNAME.",
    world_size=2,
    repeats=2,
    control=Arm("worker.py", ("--timeout-s", "30")),
    fault=Arm("worker.py", TIMEOUT, faults=ELSEWHERE),
    mitigated=Arm("worker.py", (*TIMEOUT, "--start", "framework"), faults=ELSEWHERE),
    expect={"torch>=2.9": "reproduced"},
)


@scenario.judge
def judge(evidence: Evidence) -> Verdict:
    """Which rank learns the cause, and how long the other one takes to fail."""
    tries = _tries(evidence)
    if (nothing := symptoms.undecided(evidence, {"starts": tries})) is not None:
        return nothing
    failed, clean = (symptoms.counts(tries, tries["failed"], arm) for arm in ("fault", "control"))
    fault = tries[tries["arm"].eq("fault")]
    wrong, others = fault[fault["rank"].eq(WRONG)], fault[fault["rank"].ne(WRONG)]
    waited = others["took_s"].ge(0.9 * TIMEOUT_S).fillna(False) & ~others["told"]
    kind = symptoms.apart(failed, clean, whole=bool(wrong["told"].all() and waited.all()))
    because = (
        f"{int(wrong['told'].sum())} of {len(wrong)} starts of rank {WRONG} failed with the interface's name; {int(waited.sum())} of {len(others)} of "
        f"the other rank waited out the {TIMEOUT_S:g} s timeout and did not learn it"
        + (f' ("{others["text"].iloc[0].splitlines()[0]}")' if waited.any() else "")
        + f". Control: {clean[0]} of {clean[1]} failed."
    )
    cured = tries[tries["arm"].eq("mitigated")]
    if len(cured):
        because += f" The framework's start: {int(cured['told_all'].sum())} of {len(cured)} errors, on both ranks, named rank {WRONG} and the interface."
    return Verdict(
        kind=kind,
        mitigation=_mitigation(evidence, cured),
        control_healthy=symptoms.unmarred(tries, "control")
        and symptoms.ended_well(evidence, "control")
        and tries.loc[tries["arm"].eq("control"), "sum"].eq(evidence.world_size).all(),
        metrics={
            "starts_failed": symptoms.share(tries, tries["failed"]),
            "errors_with_the_interface": symptoms.share(tries[tries["failed"]], tries["told"]),
            "time_to_error_of_the_other_rank_s": symptoms.measure(tries[tries["failed"] & tries["rank"].ne(WRONG)], "took_s"),
        },
        because=because + symptoms.chance(kind),
    )


def _tries(evidence: Evidence) -> pd.DataFrame:
    """All starts: `told` with the interface's name, `told_all` also with the rank that was given it."""
    rows = symptoms.attempts(evidence, "start").reindex(columns=[*symptoms.COLUMNS, "how", "sum", "named"])
    told = rows["text"].str.contains(INTERFACE, regex=False).fillna(False).astype(bool)
    ranked = rows["text"].str.contains(rf"rank {WRONG}: .*{INTERFACE}", regex=True).fillna(False).astype(bool)
    return rows.assign(failed=rows["error"].fillna("unknown").ne("").astype(bool), told=told, told_all=ranked)


def _mitigation(evidence: Evidence, cured: pd.DataFrame) -> Mitigation:
    """Held where every rank got the cause and the rank that has it, no later than the deadline."""
    if not evidence.ran("mitigated"):
        return Mitigation.NONE
    held = len(cured) == len(evidence.outcomes[evidence.outcomes["arm"].eq("mitigated")]) and cured["told_all"].all()
    return Mitigation.HELD if held else Mitigation.FAILED
