"""A rank is stopped in the middle of training: its connections stay, so the others wait until their timeout."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dtprobe import Scenario, flight_recorder
from dtprobe.authoring import nccl, survivors

if TYPE_CHECKING:
    from dtprobe import Evidence, Verdict

STOPPED_S = 7.0
STOP = (survivors.at_step("stop", for_s=STOPPED_S),)

scenario = Scenario(
    name="rank-stopped",
    failure_mode="rank-stopped",
    title="A rank is stopped; the others wait for it until their timeout",
    claim="A stopped rank keeps its connections, so the others wait until the timeout of their collective and then raise an error "
    "that names no rank.",
    source="failure modes people meet",
    layer="process",
    certifies_not="Nothing about a host that freezes as a whole, nor about NCCL, whose kernels spin and whose watchdog aborts.",
    world_size=survivors.WORLD_SIZE,
    timeout_s=60,
    repeats=2,
    control=survivors.arm(timeout_s=survivors.WAITED_S),
    fault=survivors.arm(timeout_s=survivors.WAITED_S, faults=STOP),
    mitigated=survivors.arm("--checked", timeout_s=survivors.WAITED_S, faults=STOP),
    expect={"torch>=2.9": "reproduced"},
)


@scenario.judge
def judge(evidence: Evidence) -> Verdict:
    """The others' errors, and whether /proc showed rank 1 stopped."""
    samples = evidence.frame("proc", "fault")
    stopped = samples[samples["rank"].eq(survivors.CULPRIT) & samples["state"].eq("T")]
    claim = survivors.Claim(
        fate="was seen stopped",
        hit=lambda outcomes, tries: outcomes["repeat"].isin(stopped["repeat"]),
        says="Timed out waiting",
        by_timeout=True,
    )
    return survivors.judge(evidence, claim)


gpu = nccl.variant(
    scenario,
    "skip",
    claim="On NCCL the others of a stopped rank wait in a kernel until the watchdog ends them; the stopped rank's own watchdog is stopped with it.",
    differs=False,
    faults=(f"process:stop,rank={nccl.CULPRIT},op=all_reduce,nth={nccl.STEP + 1},for_s={nccl.AWAY_S:g}",),
    probes=(flight_recorder(interval_s=0.25, suspect_s=1.0),),
)


@gpu.judge
def judge_gpu(evidence: Evidence) -> Verdict:
    """How NCCL's waiting ranks end, and who is named before."""
    return nccl.judge(evidence, nccl.Claim())
