"""A rank crashes in native code, by SIGSEGV or by abort(3): its own log is empty, the others' logs are full."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dtprobe import Scenario
from dtprobe.authoring import survivors

if TYPE_CHECKING:
    from dtprobe import Evidence, Verdict

SEGFAULT, ABORT = (survivors.at_step("segfault"),), (survivors.at_step("abort"),)

segfault = Scenario(
    name="rank-crashed",
    variant="sigsegv",
    default=True,
    failure_mode="sigsegv",
    title="A rank dies of SIGSEGV; only the others have a traceback",
    claim="A rank that dies of SIGSEGV leaves no traceback; the others fail at once with a connection error that names no rank, "
    "and theirs are the only tracebacks of the job.",
    source="failure modes people meet",
    layer="process",
    certifies_not="Nothing about where a real crash comes from; the address read here is 0, by the injector.",
    world_size=survivors.WORLD_SIZE,
    timeout_s=60,
    repeats=2,
    control=survivors.arm(),
    fault=survivors.arm(faults=SEGFAULT),
    mitigated=survivors.arm("--checked", faults=SEGFAULT),
    expect={"torch>=2.9": "reproduced"},
)

aborted = segfault.with_variant(
    "sigabrt",
    default=False,
    failure_mode="sigabrt",
    title="A rank aborts; only the others have a traceback",
    claim="A rank that aborts (a failed assertion in C++, std::terminate) leaves no Python traceback; the others fail at once with "
    "a connection error that names no rank.",
    certifies_not="Nothing about what makes a real library abort; here the injector calls abort(3).",
    fault=survivors.arm(faults=ABORT),
    mitigated=survivors.arm("--checked", faults=ABORT),
)


def _claim(signal: int) -> object:
    return survivors.Claim(
        fate=f"died of signal {signal}",
        hit=survivors.ended_by(signal),
        says=r"Connection (closed by peer|reset by peer)|Broken pipe",
        by_timeout=False,
    )


@segfault.judge
def judge_segfault(evidence: Evidence) -> Verdict:
    """The others' errors and whether rank 1 died of signal 11."""
    return survivors.judge(evidence, _claim(11))


@aborted.judge
def judge_aborted(evidence: Evidence) -> Verdict:
    """The others' errors and whether rank 1 died of signal 6."""
    return survivors.judge(evidence, _claim(6))
