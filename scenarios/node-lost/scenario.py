"""A whole host loses its power in the middle of training: no peer hears of it, and all wait until their timeout."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dtprobe import Arm, Scenario
from dtprobe.authoring import survivors

if TYPE_CHECKING:
    from dtprobe import Evidence, Verdict

LOST = (f"node:lose,node={survivors.CULPRIT},mark=came-training",)
LONG = ("--steps", "400")
"""So many steps that the fault comes in the middle of them."""

scenario = Scenario(
    name="node-lost",
    failure_mode="rank-lost",
    title="A host loses its power; the others wait until their timeout",
    claim="When a host is gone with its network, its peers' connections stay as they are: they wait until the timeout of their collective and "
    "then raise an error that names no rank and no host.",
    source="failure modes people meet",
    layer="network",
    certifies_not="Nothing about a host that comes back and answers with RST, nor about NCCL. Hosts are namespaces of one kernel: "
    "their cable goes dead, then their processes.",
    world_size=survivors.WORLD_SIZE,
    launch=f"hosts:{survivors.WORLD_SIZE}",
    timeout_s=60,
    repeats=2,
    measures_cost=False,
    needs=("linux", "torch", "root", "netns", "veth", "mount", "command:nsenter"),
    control=Arm("worker.py"),
    fault=Arm("worker.py", args=LONG, faults=LOST),
    mitigated=Arm("worker.py", args=(*LONG, "--checked"), faults=LOST),
    expect={"torch>=2.9": "reproduced"},
    # a rank that is stopped leaves the same silence: what tells them apart is that its host still answers
    looks_like=("rank-stopped", "collective-skipped"),
)

CLAIM = survivors.Claim(
    fate="was gone with its host",
    hit=lambda outcomes, tries: outcomes["exit_code"].isna() & outcomes["signal"].isna() & ~outcomes["timed_out"].fillna(False),
    says="Timed out waiting",
    by_timeout=True,
)


@scenario.judge
def judge(evidence: Evidence) -> Verdict:
    """The others' errors, and whether nobody could see how rank 1 ended."""
    return survivors.judge(evidence, CLAIM)
