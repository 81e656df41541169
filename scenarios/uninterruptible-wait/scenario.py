"""A collective that waits is not ended by Ctrl-C, nor is a group by destroy: both take until the collective's timeout."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dtprobe import Arm, Mitigation, Scenario, Verdict, VerdictKind
from dtprobe.authoring import symptoms

if TYPE_CHECKING:
    import pandas as pd

    from dtprobe import Evidence

TIMEOUT_S = 6.0
AWAY_S = 9.0
PRESS_S = 1.0
"""How long rank 0 had waited when somebody wanted it to stop."""
LONG_S = 0.75 * (TIMEOUT_S - PRESS_S)
SHORT_S = 0.5 * (TIMEOUT_S - PRESS_S)

AWAY = ("--away-s", str(AWAY_S), "--timeout-s", str(TIMEOUT_S))
PRESS = ("process:int,rank=0,op=barrier,group=own,nth=1",)

scenario = Scenario(
    name="uninterruptible-wait",
    variant="interrupt",
    default=True,
    failure_mode="uninterruptible-wait",
    title="Ctrl-C in a collective that waits is served at the collective's timeout",
    claim="Ctrl-C does not end a gloo collective that waits for a peer: Python's handler runs when the collective's timeout has "
    "passed (30 minutes by default).",
    source="failure modes people meet; Python's signal documentation: handlers run in the main thread between bytecodes",
    layer="c10d",
    certifies_not="Nothing about NCCL, where the host thread waits in CUDA.",
    world_size=2,
    timeout_s=60,
    repeats=2,
    control=Arm("worker.py"),
    fault=Arm("worker.py", args=AWAY, faults=PRESS),
    mitigated=Arm("worker.py", args=(*AWAY, "--cured"), faults=PRESS),
    expect={"torch>=2.9": "reproduced"},
)

destroy = scenario.with_variant(
    "destroy",
    default=False,
    title="destroy_process_group waits for the timeout of a collective under way",
    claim="destroy_process_group does not end a gloo collective that is under way: it blocks until the collective's timeout.",
    source="failure modes people meet",
    control=Arm("worker.py", args=("--mode", "destroy")),
    fault=Arm("worker.py", args=("--mode", "destroy", *AWAY)),
    mitigated=Arm("worker.py", args=("--mode", "destroy", *AWAY, "--cured")),
)


@scenario.judge
def judge(evidence: Evidence) -> Verdict:
    """How long after the key press Python's handler ran."""
    waits = symptoms.attempts(evidence, "wait")
    if verdict := symptoms.undecided(evidence, {"wait": waits}):
        return verdict
    waits = waits.merge(presses(evidence), on=["arm", "repeat", "rank"], how="left")
    return _verdict(evidence, waits, "served_s", "Python's handler ran", "after Ctrl-C")


@destroy.judge
def judge_destroy(evidence: Evidence) -> Verdict:
    """How long the destruction of the group took."""
    waits = symptoms.attempts(evidence, "wait")
    if verdict := symptoms.undecided(evidence, {"wait": waits}):
        return verdict
    return _verdict(evidence, waits, "took_s", "the end of the group came", "after it was asked for")


def presses(evidence: Evidence) -> pd.DataFrame:
    """One row a key press that was served: `served_s` after it."""
    key = ["arm", "repeat", "rank"]
    pressed = evidence.events("pressed").reindex(columns=[*key, "t_ns"])
    handled = evidence.events("served").reindex(columns=[*key, "t_ns"])
    found = pressed.merge(handled, on=key, suffixes=("", "_served"))
    return found[key].assign(served_s=(found["t_ns_served"] - found["t_ns"]) / 1e9)


def _verdict(evidence: Evidence, waits: pd.DataFrame, column: str, what: str, since: str) -> Verdict:
    runs = {
        arm: int(evidence.outcomes.loc[evidence.outcomes["arm"] == arm, "repeat"].nunique()) for arm in evidence.outcomes["arm"]
    }
    long, short = waits[column].ge(LONG_S), waits[column].le(SHORT_S)
    late, _ = symptoms.counts(waits, long, "fault")
    soon, _ = symptoms.counts(waits, short, "mitigated")
    kind = VerdictKind.NOT_REPRODUCED
    if late:
        kind = VerdictKind.REPRODUCED if late == runs["fault"] else VerdictKind.PARTLY
    mitigation = Mitigation.NONE
    if evidence.ran("mitigated"):
        mitigation = Mitigation.HELD if soon == runs["mitigated"] else Mitigation.FAILED
    medians = waits.dropna(subset=[column]).groupby("arm")[column].median()

    def median(arm: str) -> str:
        return f" ({medians[arm]:.2f} s in the median)" if arm in medians else ""

    return Verdict(
        kind=kind,
        mitigation=mitigation,
        control_healthy=symptoms.ended_well(evidence, "control") and symptoms.unmarred(waits, "control"),
        metrics={"ended_late": symptoms.share(waits, long), column: symptoms.measure(waits, column)},
        because=f"In {late} of {runs['fault']} runs {what} {LONG_S:.3g} s or more {since}{median('fault')}, with a timeout of"
        f" {TIMEOUT_S:g} s that had {TIMEOUT_S - PRESS_S:g} s left. Cured: within {SHORT_S:.3g} s in {soon} of"
        f" {runs.get('mitigated', 0)}{median('mitigated')}.",
    )
