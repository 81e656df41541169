"""A rank is killed from outside in the middle of training: the others know at once that a connection broke, not whose."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dtprobe import Scenario
from dtprobe.authoring import survivors

if TYPE_CHECKING:
    from dtprobe import Evidence, Verdict

KILL = (survivors.at_step("kill"),)

scenario = Scenario(
    name="rank-killed",
    failure_mode="rank-killed",
    title="A rank is killed from outside; the others see a broken connection",
    claim="When a rank is killed, the collectives of the others fail at once, long before their timeout, with a connection error "
    "that names an address and no rank; nothing in their logs says that a rank was killed.",
    source="failure modes people meet",
    layer="process",
    certifies_not="Nothing about a lost host: there no kernel closes the connections, and the others wait for their timeout. "
    "Nothing about NCCL, whose watchdog decides.",
    world_size=survivors.WORLD_SIZE,
    timeout_s=60,
    repeats=2,
    control=survivors.arm(),
    fault=survivors.arm(faults=KILL),
    mitigated=survivors.arm("--checked", faults=KILL),
    expect={"torch>=2.9": "reproduced"},
)

CLAIM = survivors.Claim(
    fate="was killed by signal 9",
    hit=survivors.ended_by(9),
    says=r"Connection (closed by peer|reset by peer)|Broken pipe",
    by_timeout=False,
)


@scenario.judge
def judge(evidence: Evidence) -> Verdict:
    """The others' errors and how rank 1 ended."""
    return survivors.judge(evidence, CLAIM)
