"""Every rank has entered the collective and none completes it: there is nobody behind to be named."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from dtprobe import Arm, Scenario, Verdict, VerdictKind, flight_recorder
from dtprobe.authoring import nccl, symptoms
from dtprobe.catalog import load_module

if TYPE_CHECKING:
    import pandas as pd

    from dtprobe import Evidence

watching = load_module(Path(__file__).resolve().with_name("watching.py"), "_dtprobe_scenario_watching")

WORLD_SIZE = 3
CUT_OFF = 1
TIMEOUT_S = 5.0
SUSPECT_S = 1.5

APART = "network:bandwidth,mbit=1000"
"""Ranks in namespaces of their own, with cables that lose nothing."""
JUMBO = "network:mtu,bytes=9000"
HOLE = f"network:blackhole,rank={CUT_OFF},after_s=10"
STEPS = ("--timeout-s", str(TIMEOUT_S))
ON = (*STEPS, "--for-s", "40")

mtu = Scenario(
    name="symmetric-hang",
    variant="mtu",
    default=True,
    failure_mode="symmetric-hang",
    title="Large packets vanish between all ranks: all have entered, none completes",
    claim="When packets vanish both ways, every rank is in the same all-reduce and none completes. Tools that look for the rank that is "
    "missing find none: the flight recorder's sequence numbers are equal everywhere, and the errors at the timeout name no rank.",
    source="failure modes people meet",
    layer="network",
    certifies_not="Nothing about RDMA or NCCL. The packets vanish at a bridge between network namespaces, not in a switch.",
    world_size=WORLD_SIZE,
    timeout_s=60,
    repeats=2,
    needs=("linux", "torch", "root", "netns", "veth", "tc"),
    probes=(flight_recorder(suspect_s=60), watching.Watching(suspect_s=SUSPECT_S)),
    control=Arm("worker.py", args=STEPS, faults=(APART,)),
    fault=Arm("worker.py", args=STEPS, faults=(JUMBO,)),
    no_cure_because="no rank is at fault and every rank has come: the network has to be mended, and the watch says so",
    expect={"torch>=2.9": "reproduced"},
)

blackhole = mtu.with_variant(
    "blackhole",
    default=False,
    title="All packets of one rank vanish: all have entered, none completes",
    fault=Arm("worker.py", args=ON, faults=(HOLE,)),
    no_cure_because="a collective that is under way when the packets vanish ends by its timeout; dtprobe.framework.checked names the rank"
    " only where the hole opens between two collectives",
)


@mtu.judge
@blackhole.judge
def judge(evidence: Evidence) -> Verdict:
    """Whether all ranks were in the same collective when they gave up, what their errors named, and what the watch said before."""
    steps = symptoms.attempts(evidence, "step")
    if verdict := symptoms.undecided(evidence, {"step": steps}):
        return verdict
    failed = steps[steps["error"].fillna("").ne("")].copy()
    failed["named"] = symptoms.naming(failed, (CUT_OFF,)) if len(failed) else False
    fault = failed[failed["arm"] == "fault"]
    runs = sorted({int(one) for one in evidence.outcomes.loc[evidence.outcomes["arm"] == "fault", "repeat"]})
    together = [one for one in runs if in_one_step(fault[fault["repeat"] == one])]
    timed = fault["text"].str.contains("Timed out", regex=False)
    seen = {
        one: evidence.suspicions[(evidence.suspicions["arm"] == "fault") & (evidence.suspicions["repeat"] == one)]
        for one in runs
    }
    symmetric = {one: seen[one][seen[one]["reason"].str.startswith("symmetric")]["t_ns"] for one in runs}
    called = {one: int(moments.min()) for one, moments in symmetric.items() if len(moments)}
    ends = evidence.events("attempt", "fault").reindex(columns=["repeat", "t_ns", "error"])
    given_up = ends[ends["error"].fillna("").ne("")].groupby("repeat")["t_ns"].min()
    in_time = [one for one in called if one in given_up.index and called[one] < given_up[one]]
    kind = VerdictKind.NOT_REPRODUCED
    if together and timed.any():
        whole = len(together) == len(runs) and not fault["named"].any()
        kind = VerdictKind.REPRODUCED if whole else VerdictKind.PARTLY
    text = str(fault.loc[timed, "text"].iloc[0]).partition("] ")[2][:80] if timed.any() else ""
    alarms = int(evidence.suspicions["arm"].eq("control").sum())
    return Verdict(
        kind=kind,
        control_healthy=symptoms.ended_well(evidence, "control") and symptoms.unmarred(steps, "control") and not alarms,
        metrics={
            "steps_failed": symptoms.share(steps, steps["error"].fillna("").ne("")),
            "errors_naming_the_rank": symptoms.share(failed, failed["named"]),
            "time_to_error_s": symptoms.measure(failed, "took_s"),
        },
        because=f"In {len(together)} of {len(runs)} runs all {WORLD_SIZE} ranks failed in one and the same all-reduce, {int(timed.sum())} of"
        f" {len(fault)} errors by the timeout"
        + (f' ("{text}")' if text else "")
        + f", {int(fault['named'].sum())} naming a rank. dtprobe's watch called it symmetric in {len(called)} of {len(runs)} runs,"
        f" before the first rank gave up in {len(in_time)}.",
    )


def in_one_step(failed: pd.DataFrame) -> bool:
    """Whether all ranks failed, and in the same step."""
    return failed["rank"].nunique() == WORLD_SIZE and failed["step"].nunique() == 1


gpu = nccl.variant(
    blackhole,
    "skip",
    title="A collective that all ranks have entered never begins on their GPUs (NCCL, two GPUs)",
    claim="On NCCL a collective that every rank has entered and whose work never begins hangs on all until the watchdog ends them; nobody is behind.",
    layer="nccl",
    differs=False,
    faults=(f"nccl:block,call=ncclAllReduce,nth={nccl.STEP + 1},where=stream",),
    mitigated=None,
    no_cure_because="no rank does wrong: a checked step sees equal calls, and a restart is what is left",
)


@gpu.judge
def judge_gpu(evidence: Evidence) -> Verdict:
    """How NCCL's waiting ranks end, and who is named before."""
    return nccl.judge(evidence, nccl.Claim(aborted=(0, nccl.CULPRIT), recorder_names=False))
