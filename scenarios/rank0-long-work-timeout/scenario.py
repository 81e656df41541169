"""Rank 0 works for longer than the others' timeout: healthy ranks end a healthy job."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dtprobe import Arm, Mitigation, Scenario, Verdict, VerdictKind
from dtprobe.authoring import symptoms

if TYPE_CHECKING:
    from dtprobe import Evidence

WORLD_SIZE = 3
TIMEOUT_S = 4.0
SAVE_S = 7.0

LONG = ("--timeout-s", str(TIMEOUT_S), "--save-s", str(SAVE_S))

scenario = Scenario(
    name="rank0-long-work-timeout",
    failure_mode="rank0-long-work-timeout",
    title="Rank 0 saves for longer than the others' timeout",
    claim="While rank 0 alone works on (a checkpoint, a preprocessing step), the others wait for it in a barrier and end the job at "
    "their timeout, although nothing is wrong; rank 0 then fails too, with a connection error.",
    source="failure modes people meet",
    layer="code",
    certifies_not="Nothing about storage: rank 0 only takes its time here.",
    world_size=WORLD_SIZE,
    timeout_s=60,
    repeats=2,
    control=Arm("worker.py", args=("--timeout-s", str(TIMEOUT_S))),
    fault=Arm("worker.py", args=LONG),
    mitigated=Arm("worker.py", args=(*LONG, "--cured")),
    expect={"torch>=2.9": "reproduced"},
)


@scenario.judge
def judge(evidence: Evidence) -> Verdict:
    """Which ranks failed at the checkpoint, when, and what they said."""
    saves = symptoms.attempts(evidence, "checkpoint")
    if verdict := symptoms.undecided(evidence, {"checkpoint": saves}):
        return verdict
    waiting = saves["rank"].ne(0)
    by_timeout = waiting & saves["text"].str.contains("Timed out", regex=False) & saves["took_s"].lt(SAVE_S)
    dragged = ~waiting & saves["text"].str.contains("closed by peer|reset by peer|Broken pipe")
    well = saves["error"].eq("") & saves["took_s"].ge(0.9 * SAVE_S)
    timed, _ = symptoms.counts(saves, by_timeout, "fault")
    along, tries = symptoms.counts(saves, dragged, "fault")
    kept, cured = symptoms.counts(saves, well, "mitigated")
    kind = VerdictKind.NOT_REPRODUCED
    if timed:
        kind = VerdictKind.REPRODUCED if timed + along == tries else VerdictKind.PARTLY
    mitigation = Mitigation.NONE
    if evidence.ran("mitigated"):
        held = cured > 0 and kept == cured and symptoms.ended_well(evidence, "mitigated")
        mitigation = Mitigation.HELD if held else Mitigation.FAILED
    return Verdict(
        kind=kind,
        mitigation=mitigation,
        control_healthy=symptoms.ended_well(evidence, "control") and symptoms.unmarred(saves, "control"),
        metrics={
            "checkpoints_failed": symptoms.share(saves, saves["error"].ne("")),
            "checkpoint_s": symptoms.measure(saves, "took_s"),
        },
        because=f"Rank 0 saved for {SAVE_S:g} s with a timeout of {TIMEOUT_S:g} s. Of {tries} ranks {timed} timed out waiting for it,"
        f" and {along} rank 0 failed with a connection error after its save. On a group with a timeout of its own {kept} of"
        f" {cured} ranks waited it out.",
    )
