"""The rank that hosts the store ends: the others cannot even make a group among themselves any more."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dtprobe import Arm, Mitigation, Scenario, Verdict, VerdictKind
from dtprobe.authoring import symptoms

if TYPE_CHECKING:
    from dtprobe import Evidence

SUM = 3.0
"""Of what ranks 1 and 2 bring."""
SOON_S = 3.0
EXIT = ("process:exit0,rank=0,op=barrier,group=own,nth=1",)

scenario = Scenario(
    name="store-host-lost",
    failure_mode="store-host-lost",
    title="The rank that hosts the store ends, and the others cannot regroup",
    claim="When rank 0 ends, its TCPStore ends with it: whatever the others next ask of the store fails at once, with Broken pipe or "
    "another connection error, so they cannot make a group without rank 0 either.",
    source="failure modes people meet; torch TCPStore documentation: the server lives in one process",
    layer="store",
    certifies_not="Nothing about a host that vanishes with the network: then requests wait for their timeout.",
    world_size=3,
    timeout_s=60,
    repeats=2,
    control=Arm("worker.py"),
    fault=Arm("worker.py", faults=EXIT),
    mitigated=Arm("worker.py", args=("--cured", "--deadline-s", "20"), faults=EXIT),
    expect={"torch>=2.9": "reproduced"},
)


@scenario.judge
def judge(evidence: Evidence) -> Verdict:
    """Whether ranks 1 and 2 could make a group and sum over it."""
    tries = symptoms.attempts(evidence, "go on")
    if verdict := symptoms.undecided(evidence, {"go on": tries}):
        return verdict
    if "sum" not in tries:
        tries["sum"] = None
    lost = tries["text"].str.contains(
        r"Broken pipe|[Cc]onnection reset|closed by peer|failed to recv|Connection was (?:likely )?closed"
    )
    right = tries["error"].eq("") & tries["sum"].eq(SUM)
    failed, asked = symptoms.counts(tries, tries["error"].ne(""), "fault")
    at_once, _ = symptoms.counts(tries, lost & tries["took_s"].lt(SOON_S), "fault")
    went_on, cured = symptoms.counts(tries, right, "mitigated")
    kind = VerdictKind.NOT_REPRODUCED
    if failed:
        kind = VerdictKind.REPRODUCED if at_once == asked else VerdictKind.PARTLY
    mitigation = Mitigation.NONE
    if evidence.ran("mitigated"):
        mitigation = Mitigation.HELD if cured and went_on == cured else Mitigation.FAILED
    own = tries[tries["arm"].eq("fault") & tries["error"].ne("")]
    text = str(own["text"].iloc[0])[:120] if len(own) else ""
    return Verdict(
        kind=kind,
        mitigation=mitigation,
        control_healthy=symptoms.ended_well(evidence, "control")
        and symptoms.counts(tries, right, "control")[0] == symptoms.counts(tries, right, "control")[1],
        metrics={
            "could_not_go_on": symptoms.share(tries, ~right),
            "time_s": symptoms.measure(tries, "took_s"),
        },
        because=f"After rank 0 had ended {failed} of {asked} ranks could not make a group of ranks 1 and 2, {at_once} of them with a"
        f" connection error within {SOON_S:g} s"
        + (f' ("{text}")' if text else "")
        + f". With the store in files {went_on} of {cured} made it and summed right.",
    )
