"""Two ranks that both send first: each waits for the other to receive."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dtprobe import Arm, Scenario, Verdict
from dtprobe.authoring import symptoms, tries

if TYPE_CHECKING:
    from dtprobe import Evidence

TIMEOUT_S = 2.0

scenario = Scenario(
    name="send-send-deadlock",
    failure_mode="send-send-deadlock",
    title="Both sides send first and wait for each other",
    claim="Two ranks that each call send before recv wait for each other until the timeout, and both errors speak of a send operation and "
    "name no rank.",
    source="failure modes people meet; failure document, section 4.3",
    layer="code",
    certifies_not="Nothing about NCCL, where small messages may pass and large ones hang. On gloo the size does not matter.",
    world_size=2,
    timeout_s=60,
    repeats=2,
    control=Arm("worker.py", args=("--mode", "ordered", "--timeout-s", "30")),
    fault=Arm("worker.py", args=("--mode", "send-first", "--timeout-s", str(TIMEOUT_S))),
    mitigated=Arm("worker.py", args=("--mode", "send-first", "--exchange")),
    expect={"torch>=2.9": "reproduced"},
)


@scenario.judge
def judge(evidence: Evidence) -> Verdict:
    """Rounds that ended in a timeout of the send."""
    rows = symptoms.attempts(evidence, "round")
    late = tries.text(rows, "error").ne("") & rows["took_s"].ge(0.9 * TIMEOUT_S)
    said = tries.text(rows, "text").str.contains(r"Timed out waiting \d+ms for send operation")
    closed = tries.text(rows, "text").str.contains(r"[Cc]onnection closed by peer")
    named = tries.text(rows, "text").str.contains(r"\branks? \d")
    ok = rows["error"].eq("") & tries.number(rows, "wrong").eq(0) & tries.number(rows, "received").eq(1)
    failed = rows[tries.text(rows, "error").ne("")]
    texts = rows["text"][said].str.extract(r"(Timed out.*?operation)")[0]
    return tries.judged(
        evidence,
        rows,
        # whose timeout passes first closes the connection, which is the other's error
        ((late & said) | closed) & ~named,
        shown=f"ended by the {TIMEOUT_S:g} s timeout of a send, in an error that names no rank",
        cured=ok & tries.number(rows, "exchanged").eq(1),
        healed="passed both messages",
        metrics={
            "says_send_timed_out": symptoms.share(rows, said),
            "errors_naming_a_rank": symptoms.share(rows, named),
            "time_to_error_s": symptoms.measure(failed, "took_s"),
            "round_s": symptoms.measure(rows, "took_s"),
        },
        more=f'{len(texts)} said "{texts.iloc[0]}", the others that the peer closed the connection.' if len(texts) else "",
    )
