"""An exception on one rank reaches the others as a network error."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dtprobe import Scenario
from dtprobe.authoring import survivors

if TYPE_CHECKING:
    from dtprobe import Evidence, Verdict

RAISES = (survivors.at_step("exception", type="ValueError"),)

scenario = Scenario(
    name="python-exception-one-rank",
    failure_mode="python-exception-one-rank",
    title="An exception on one rank reaches the others as a network error",
    claim="An exception that ends one rank reaches the others as a connection error, which says neither what was raised nor where.",
    source="failure modes people meet",
    layer="code",
    certifies_not="Nothing about a rank that catches its exception and stays: then the others wait (cleanup-deadlock-after-exception).",
    world_size=survivors.WORLD_SIZE,
    timeout_s=60,
    repeats=2,
    control=survivors.arm(),
    fault=survivors.arm(faults=RAISES),
    mitigated=survivors.arm("--checked", faults=RAISES),
    expect={"torch>=2.9": "reproduced"},
)

CLAIM = survivors.Claim(
    fate="raised ValueError",
    hit=lambda outcomes, tries: outcomes["repeat"].isin(tries.loc[tries["error"].eq("ValueError"), "repeat"]),
    says=r"Connection (closed by peer|reset by peer)|Broken pipe",
    by_timeout=False,
    cure_says="ValueError",
)


@scenario.judge
def judge(evidence: Evidence) -> Verdict:
    """The others' errors, and whether the cured ones carry the exception that rank 1 raised."""
    return survivors.judge(evidence, CLAIM)
