"""A tensor is used while a collective or a send that was not waited for is still under way."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dtprobe import Arm, Scenario, Verdict, VerdictKind
from dtprobe.authoring import symptoms, tries

if TYPE_CHECKING:
    from dtprobe import Evidence


def _arm(patterns: str, device: str = "cpu", elements: int = 1024) -> Arm:
    return Arm("worker.py", args=("--patterns", patterns, "--device", device, "--elements", str(elements)))


LARGE = 1 << 24
"""Elements: a kernel of NCCL's has read a small tensor before the next kernel of the same GPU can write to it (6 of 12 tries at 4 KB)."""


GPU = {
    "certifies_not": "Two GPUs of one host, tensors of 4 KB, one stream of the program's own.",
    "needs": ("linux", "torch", "cuda:2"),
    "tags": ("gpu",),
    "measures_cost": False,
    "repeats": 2,
}


scenario = Scenario(
    name="read-before-wait",
    failure_mode="read-before-wait",
    title="A result is read before the collective has finished",
    claim="Reading a tensor after all_reduce gives what it held before, unless one waits; gloo's collectives are synchronous.",
    source="failure document, section 2.1",
    layer="code",
    certifies_not="Nothing about streams of a GPU, where the host's wait is not the device's.",
    world_size=2,
    timeout_s=60,
    repeats=2,
    control=_arm("waited"),
    fault=_arm("early,plain"),
    mitigated=_arm("by_function"),
    expect={"torch>=2.9": "partly"},
)

overwritten = scenario.with_variant(
    "overwritten",
    title="A tensor is overwritten while it is being reduced",
    claim="A tensor that is written between an asynchronous all_reduce and its wait gives wrong sums on all ranks, without an error.",
    source="measured here",
    fault=_arm("overwritten"),
    mitigated=_arm("by_function_overwritten"),
    expect={"torch>=2.9": "reproduced"},
)

sent = scenario.with_variant(
    "sent",
    title="A tensor is overwritten while it is being sent",
    claim="What is written to a tensor between isend and its wait arrives in the place of what was sent, without an error.",
    source="measured here",
    control=_arm("sent"),
    fault=_arm("sent_early"),
    mitigated=_arm("exchanged"),
    expect={"torch>=2.9": "reproduced"},
)

gpu = scenario.with_variant(
    "gpu",
    title=f"{scenario.title} (NCCL, two GPUs)",
    control=_arm("waited", "cuda"),
    fault=_arm("early,plain", "cuda"),
    mitigated=_arm("by_function", "cuda"),
    **GPU,
)

gpu_overwritten = overwritten.with_variant(
    "gpu-overwritten",
    title=f"{overwritten.title} (NCCL, two GPUs)",
    control=_arm("waited", "cuda", LARGE),
    fault=_arm("overwritten", "cuda", LARGE),
    mitigated=_arm("by_function_overwritten", "cuda", LARGE),
    **{**GPU, "certifies_not": "Two GPUs of one host, tensors of 64 MiB, one stream of the program's own."},
)


@scenario.judge
@gpu.judge
def judge(evidence: Evidence) -> Verdict:
    """Reads of the rank that is ahead: those before wait, and those after a plain all_reduce."""
    rows = symptoms.attempts(evidence)
    rows = rows[tries.number(rows, "ahead").eq(1)]
    stale = rows["error"].eq("") & tries.number(rows, "own").eq(1)
    plain = rows["what"].eq("plain")
    old, asked = int(stale[plain].sum()), int(plain.sum())
    verdict = tries.judged(
        evidence,
        rows[~plain],
        stale[~plain],
        shown="read what the tensor held before",
        cured=(rows["error"].eq("") & tries.number(rows, "wrong").eq(0) & tries.text(rows, "what").eq("by_function"))[~plain],
        healed="read the sum",
        # a plain all_reduce returns when the sum is there, so half of the claim is wrong
        kind=VerdictKind.REPRODUCED if old and old == asked else VerdictKind.PARTLY,
        metrics={"stale_after_a_plain_all_reduce": symptoms.share(rows[plain], stale[plain])},
        more=f"After a plain all_reduce {old} of {asked} reads were old, so it is synchronous; with async_op it is not.",
    )
    return verdict


@overwritten.judge
@gpu_overwritten.judge
def judge_overwritten(evidence: Evidence) -> Verdict:
    """Sums on both ranks where one wrote into its tensor meanwhile."""
    rows = symptoms.attempts(evidence)
    silent, wrong = rows["error"].eq(""), tries.number(rows, "wrong")
    return tries.judged(
        evidence,
        rows,
        silent & wrong.gt(0),
        shown="ended without an error and with a wrong sum",
        cured=silent & wrong.eq(0) & tries.text(rows, "what").eq("by_function_overwritten"),
        healed="were right",
        metrics={"wrong_elements": symptoms.measure(rows, "wrong", unit="")},
    )


@sent.judge
def judge_sent(evidence: Evidence) -> Verdict:
    """What arrived at rank 1, and whether rank 0 was told."""
    rows = symptoms.attempts(evidence)
    if (nothing := symptoms.undecided(evidence, {"tries": rows})) is not None:
        return nothing
    keys = ["arm", "repeat", "what", "trial"]
    told = rows.loc[rows["rank"].eq(0), [*keys, "error"]].rename(columns={"error": "told"})
    arrived = rows[rows["rank"].eq(1)].merge(told, on=keys, how="left")
    wrong = arrived["error"].eq("") & tries.number(arrived, "wrong").gt(0)
    return tries.judged(
        evidence,
        arrived,
        wrong & tries.text(arrived, "told").eq(""),
        shown="gave the receiver what was written later, without an error on either side",
        cured=tries.text(arrived, "told").eq("BufferBusy"),
        healed="raised BufferBusy on the sender",
        metrics={"arrived_wrong": symptoms.share(arrived, wrong)},
    )
