"""A rank ends before its peers, with success: the others lose the connection, and the launcher sees nothing wrong with it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dtprobe import Scenario
from dtprobe.authoring import survivors

if TYPE_CHECKING:
    from dtprobe import Evidence, Verdict

EXIT = (survivors.at_step("exit0", clean="yes"),)

scenario = Scenario(
    name="rank-exits-early",
    failure_mode="peer-exited-early",
    title="A rank ends with success before its peers; they fail, and look guilty",
    claim="A rank that ends early with exit code 0 makes the others fail at once with a connection error; by exit codes the "
    "guilty rank is the only healthy one.",
    source="failure modes people meet",
    layer="code",
    certifies_not="Nothing about NCCL, where the others' kernels wait for the rank until the watchdog's timeout.",
    world_size=survivors.WORLD_SIZE,
    timeout_s=60,
    repeats=2,
    control=survivors.arm(),
    fault=survivors.arm(faults=EXIT),
    mitigated=survivors.arm("--checked", faults=EXIT),
    expect={"torch>=2.9": "reproduced"},
)

CLAIM = survivors.Claim(
    fate="ended with exit code 0 before its last step",
    hit=lambda outcomes, tries: outcomes["exit_code"].eq(0) & outcomes["repeat"].isin(tries.loc[~tries["ended"], "repeat"]),
    says=r"Connection (closed by peer|reset by peer)|Broken pipe",
    by_timeout=False,
    cure_says="left",
)


@scenario.judge
def judge(evidence: Evidence) -> Verdict:
    """The others' errors and how rank 1 ended."""
    return survivors.judge(evidence, CLAIM)
