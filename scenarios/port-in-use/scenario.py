"""The port belongs to another program: rank 0 says so, and the others may wait for ever."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

from dtprobe import Arm, Mitigation, Scenario, Verdict
from dtprobe.authoring import symptoms

if TYPE_CHECKING:
    import pandas as pd

    from dtprobe import Evidence

TIMEOUT_S = 4.0
GIVE_UP_S = 9.0
TAKEN = ("--taken", "--timeout-s", str(TIMEOUT_S), "--give-up-s", str(GIVE_UP_S))

scenario = Scenario(
    name="port-in-use",
    failure_mode="eaddrinuse",
    title="Another program listens at MASTER_PORT and says nothing",
    claim="Rank 0 fails at once with EADDRINUSE; the other ranks connect to whatever listens there, and where that says nothing they wait on, "
    "long after their timeout.",
    source="failure modes people meet; measured here",
    layer="store",
    certifies_not="Nothing about a port that a store of another job holds: there ranks of two jobs can meet.",
    world_size=2,
    repeats=2,
    control=Arm("worker.py", ("--timeout-s", "30", "--give-up-s", "60", "--ways", "framework,derived,torch")),
    fault=Arm("worker.py", (*TAKEN, "--ways", "torch")),
    mitigated=Arm("worker.py", (*TAKEN, "--ways", "framework,derived")),
    expect={"torch>=2.9": "reproduced"},
)


@scenario.judge
def judge(evidence: Evidence) -> Verdict:
    """Starts of rank 0 that say EADDRINUSE, and starts of rank 1 that had not ended at twice their timeout."""
    tries = _tries(evidence)
    plain = tries[tries["way"].eq("torch")]
    if (nothing := symptoms.undecided(evidence, {"starts": plain})) is not None:
        return nothing
    bad, clean = (symptoms.counts(plain, plain["failed"], arm) for arm in ("fault", "control"))
    fault = plain[plain["arm"].eq("fault")]
    first, others = fault[fault["rank"].eq(0)], fault[fault["rank"].ne(0)]
    refused = first["text"].str.contains("EADDRINUSE", regex=False).fillna(False)
    kind = symptoms.apart(bad, clean, whole=bool(refused.all() and others["hung"].all()))
    because = (
        f"{int(refused.sum())} of {len(first)} starts of rank 0 failed with EADDRINUSE; {int(others['hung'].sum())} of {len(others)} of rank 1 had not "
        f"come back {GIVE_UP_S:g} s after, with a timeout of {TIMEOUT_S:g} s. Control: {clean[0]} of {clean[1]} failed."
    )
    cured = tries[tries["arm"].eq("mitigated")]
    named, derived = cured[cured["way"].eq("framework")], cured[cured["way"].eq("derived")]
    if len(cured):
        because += (
            f" The framework's start: {int(named['told'].sum())} of {len(named)} errors named rank 0 and the port; at a port derived from the run's name "
            f"{int(derived['sum'].eq(evidence.world_size).sum())} of {len(derived)} started."
        )
    return Verdict(
        kind=kind,
        mitigation=_mitigation(evidence, named, derived),
        control_healthy=symptoms.unmarred(tries, "control") and symptoms.ended_well(evidence, "control"),
        metrics={
            "starts_failed_or_hung": symptoms.share(plain, plain["failed"]),
            "starts_hung": symptoms.share(tries, tries["hung"]),
            "errors_naming_rank_0": symptoms.share(tries[tries["failed"]], tries["told"]),
            "started_at_a_derived_port": symptoms.share(
                tries[tries["way"].eq("derived")], tries["sum"].eq(evidence.world_size)
            ),
            "time_to_error_s": symptoms.measure(tries[tries["failed"] & ~tries["hung"]], "took_s"),
        },
        because=because + symptoms.chance(kind),
    )


def _tries(evidence: Evidence) -> pd.DataFrame:
    """All starts by `way`: `hung` was ended by the alarm, `failed` that or an error, `told` named rank 0 and the port."""
    rows = symptoms.attempts(evidence).reindex(columns=[*symptoms.COLUMNS, "sum", "named"])
    ends = evidence.outcomes[["arm", "repeat", "rank", "signal"]]
    rows = rows.merge(ends, on=["arm", "repeat", "rank"], how="left")
    hung = ~rows["ended"] & rows["signal"].eq(signal.SIGALRM).fillna(False)
    told = rows["named"].eq("0") & rows["text"].str.contains(r"port \d+", regex=True).fillna(False)
    return rows.assign(
        way=rows["what"].str.removeprefix("start "),
        hung=hung.astype(bool),
        failed=(~rows["ended"] | rows["error"].ne("")).fillna(True).astype(bool),
        told=told.astype(bool),
    )


def _mitigation(evidence: Evidence, named: pd.DataFrame, derived: pd.DataFrame) -> Mitigation:
    """Held where each rank ends with an error that names rank 0 and the port, and a port of the run's own works."""
    if not evidence.ran("mitigated"):
        return Mitigation.NONE
    held = len(named) and named["told"].all() and len(derived) and derived["sum"].eq(evidence.world_size).all()
    return Mitigation.HELD if held and symptoms.ended_well(evidence, "mitigated") else Mitigation.FAILED
