"""The handle of an isend is dropped, and the message with it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dtprobe import Arm, Scenario, Verdict
from dtprobe.authoring import symptoms, tries

if TYPE_CHECKING:
    from dtprobe import Evidence

TIMEOUT_S = 2.0
PROGRAM = "../send-send-deadlock/worker.py"

scenario = Scenario(
    name="dropped-isend",
    failure_mode="dropped-isend",
    title="An isend whose handle nobody keeps is cancelled",
    claim="Where the handle that isend returned is not kept, the message is cancelled: the sender goes on at once and without an error, and the "
    "receiver waits until its timeout.",
    source="failure document, section 4.3; failure modes people meet",
    layer="code",
    certifies_not="Nothing about NCCL, where the message is enqueued on a stream and the handle is not needed for it.",
    world_size=2,
    timeout_s=60,
    repeats=2,
    control=Arm(PROGRAM, args=("--mode", "kept", "--rounds", "3", "--timeout-s", "30")),
    fault=Arm(PROGRAM, args=("--mode", "dropped", "--rounds", "3", "--timeout-s", str(TIMEOUT_S))),
    mitigated=Arm(PROGRAM, args=("--mode", "dropped", "--rounds", "3", "--exchange")),
    expect={"torch>=2.9": "reproduced"},
    looks_like=(
        "p2p-unpaired",
    ),  # gloo records no point-to-point calls: a send that was dropped and one never made leave the same
)


@scenario.judge
def judge(evidence: Evidence) -> Verdict:
    """Rounds in which rank 1 timed out in a receive and rank 0 had no error."""
    rows = symptoms.attempts(evidence, "round")
    if (nothing := symptoms.undecided(evidence, {"rounds": rows})) is not None:
        return nothing
    keys = ["arm", "repeat", "round"]
    sender = rows[rows["rank"].eq(0)]
    own = rows[rows["rank"].eq(1)].merge(sender[[*keys, "error", "took_s"]], on=keys, how="left", suffixes=("", "_of_sender"))
    late = tries.text(own, "text").str.contains(r"Timed out waiting \d+ms for recv operation")
    late &= own["took_s"].ge(0.9 * TIMEOUT_S)
    silent = own["error_of_sender"].eq("") & own["took_s_of_sender"].lt(own["took_s"])
    ok = own["error"].eq("") & tries.number(own, "wrong").eq(0) & tries.number(own, "received").eq(1)
    return tries.judged(
        evidence,
        own,
        late & silent,
        shown=f"ended with the receiver's {TIMEOUT_S:g} s timeout and without an error on the sender",
        cured=ok & tries.number(own, "exchanged").eq(1),
        healed="delivered the message",
        metrics={
            "sender_s": symptoms.measure(sender, "took_s"),
            "receiver_s": symptoms.measure(own, "took_s"),
            "arrived": symptoms.share(own, ok),
        },
    )
