"""Pipeline stages that wait for each other: a schedule that crosses, a stage that is late, and messages without a name."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dtprobe import Arm, Scenario, Verdict, VerdictKind
from dtprobe.authoring import symptoms, tries

if TYPE_CHECKING:
    from dtprobe import Evidence

TIMEOUT_S = 2.0
LONG = ("--timeout-s", "30")
PAIR = "../send-send-deadlock/worker.py"
SAYS = r"Timed out waiting \d+ms for (?:send|recv) operation|[Cc]onnection (?:closed|reset) by peer|Broken pipe"

scenario = Scenario(
    name="pipeline-timeout",
    failure_mode="send-send-deadlock",
    title="Pipeline stages that send first time out in a cascade, with a barrier or without",
    claim="Without a barrier between micro-batches pipeline stages over gloo run into its timeout of 30 s, one after the other; a barrier "
    "before each micro-batch cures it.",
    source="failure document, section 4.3",
    layer="code",
    certifies_not="Nothing about NCCL, and nothing about a schedule of torch.distributed.pipelining, which batches its messages.",
    world_size=3,
    timeout_s=60,
    repeats=2,
    control=Arm("worker.py", args=("--orders", "paired,paired", *LONG)),
    fault=Arm("worker.py", args=("--orders", "crossed,barrier", "--timeout-s", str(TIMEOUT_S))),
    mitigated=Arm("worker.py", args=("--orders", "crossed,crossed", "--exchange", *LONG)),
    expect={"torch>=2.9": "partly"},
)

cascade = scenario.with_variant(
    "cascade",
    failure_mode="straggler",
    title="A late stage brings down the others, whose errors do not name it",
    claim="When one stage computes longer than the timeout, the others fail first, in errors that name no rank; the late one fails last, "
    "because a peer closed the connection.",
    source="failure document, section 4.3; measured here",
    control=Arm("worker.py", args=LONG),
    fault=Arm("worker.py", args=("--late", "--timeout-s", str(TIMEOUT_S))),
    mitigated=Arm("worker.py", args=("--late", "--timeout-s", str(TIMEOUT_S), "--exchange")),
    expect={"torch>=2.9": "reproduced"},
)

swapped = scenario.with_variant(
    "swapped",
    failure_mode="collective-order-mismatch",
    title="Micro-batches without a tag arrive in each other's place",
    claim="Two messages without tags whose receives are posted in the other order arrive in each other's place, without an error.",
    source="measured here",
    world_size=2,
    control=Arm(PAIR, args=("--mode", "in-order", "--rounds", "3", *LONG)),
    fault=Arm(PAIR, args=("--mode", "swapped", "--rounds", "3", *LONG)),
    mitigated=Arm(PAIR, args=("--mode", "swapped", "--rounds", "3", "--exchange")),
    expect={"torch>=2.9": "reproduced"},
)


@scenario.judge
def judge(evidence: Evidence) -> Verdict:
    """Stages whose round ended in a timeout or in the consequence of another's, with the barrier and without."""
    rows = symptoms.attempts(evidence, "round")
    stuck = tries.text(rows, "error").ne("") & tries.text(rows, "text").str.contains(SAYS)
    barrier = tries.text(rows, "order").eq("barrier") & rows["arm"].eq("fault")
    ok = rows["error"].eq("") & tries.number(rows, "wrong").eq(0)
    failed = rows[stuck & rows["arm"].eq("fault")]
    with_it, asked = int(stuck[barrier].sum()), int(barrier.sum())
    innocent = failed["rank"].eq(2)
    default_s = symptoms.measure(rows, "default_s", documented="30 s")
    return tries.judged(
        evidence,
        rows,
        stuck,
        shown=f"ended by the {TIMEOUT_S:g} s timeout, of the stage or of its neighbour",
        cured=ok & tries.number(rows, "exchanged").eq(1),
        healed="passed all messages in the same order of calls",
        # the cascade is there, the 30 s and the cure are not
        kind=VerdictKind.PARTLY if with_it else VerdictKind.REPRODUCED,
        metrics={
            "timed_out_in_spite_of_a_barrier": symptoms.share(rows[barrier], stuck[barrier], documented="cured"),
            "time_to_error_s": symptoms.measure(failed, "took_s", documented="30 s"),
            "round_s": symptoms.measure(rows, "took_s"),
            "default_timeout_s": default_s,
        },
        more=f"With a barrier before each micro-batch {with_it} of {asked} did. {int(innocent.sum())} of the {len(failed)} errors were "
        f"those of stage 2, which only waits for stage 1. The default timeout of this torch is {tries.number(rows, 'default_s').max() / 60:g} minutes."
        if asked
        else "",
    )


@cascade.judge
def judge_cascade(evidence: Evidence) -> Verdict:
    """Whose error came first, and whether any named stage 0."""
    rows = symptoms.attempts(evidence, "round")
    fail = tries.text(rows, "error").ne("")
    says = tries.text(rows, "text").str.contains(SAYS)
    told = symptoms.naming(rows, (0,)).fillna(False) | tries.text(rows, "named").eq("0")
    late = fail & says & ~told
    failed = rows[fail]
    first = failed.sort_values("took_s").groupby(["arm", "repeat"])["rank"].first().reset_index() if len(failed) else failed
    return tries.judged(
        evidence,
        rows,
        late,
        shown="failed in an error that does not name stage 0",
        cured=fail & told & tries.text(rows, "error").eq("StageTimeout"),
        healed="raised StageTimeout naming stage 0's rank",
        metrics={
            "errors_naming_the_late_stage": symptoms.share(failed, told[fail]),
            "first_error_was_the_late_stages": symptoms.share(first, first["rank"].eq(0)),
            "time_to_error_s": symptoms.measure(failed, "took_s"),
        },
        more="The first error came from "
        + ", ".join(f"stage {one}" for one in sorted(set(first.loc[first["arm"].eq("fault"), "rank"])))
        + "."
        if len(first) and first["arm"].eq("fault").any()
        else "",
        ends_with_error=True,
    )


@swapped.judge
def judge_swapped(evidence: Evidence) -> Verdict:
    """What rank 1 had in its two buffers."""
    rows = symptoms.attempts(evidence, "round")
    rows = rows[tries.number(rows, "received").eq(2)]
    silent, wrong = rows["error"].eq(""), tries.number(rows, "wrong")
    return tries.judged(
        evidence,
        rows,
        silent & wrong.gt(0),
        shown="ended without an error and with the micro-batches in each other's place",
        cured=silent & wrong.eq(0) & tries.number(rows, "exchanged").eq(1),
        healed="put each where it belongs",
        metrics={"wrong_elements": symptoms.measure(rows, "wrong", unit="")},
    )
