"""Whether anything failed at all."""

from __future__ import annotations

import re
from collections.abc import Iterator

from dtprobe.diagnose.case import Case, Finding, quote
from dtprobe.diagnose.facts.ends import ends
from dtprobe.diagnose.facts.raised import raised
from dtprobe.diagnose.facts.timeouts import waits
from dtprobe.diagnose.facts.words import SPOKEN, says, words
from dtprobe.diagnose.relevance import can_be_overcome
from dtprobe.diagnose.signatures import Signature, signatures

SURE = 0.9
_WARNS = re.compile(r"^\[?W\d{3,4} |^\[W |(?i:\bwarn(?:ing)?\b)")
_COMPLAINS = re.compile(
    r"(?i)\b(?:error|errors|exception|fatal|fail(?:ed|ure)?|abort(?:ed)?|killed|segfault|core dumped|timed? ?out|nan|hung|stuck|unreachable|refused|panic|denied)\b"
)
_NO_COMPLAINT = re.compile(
    r"(?i)\b(?:0|no|without|zero) (?:errors?|failures?|exceptions?|nan)\b|errors?[=: ]+0\b|error_file|(?:WER|word error|error rate|mean (?:abs\w*|squared) error|"
    r"\w*_error)\b|error[_ ](?:feedback|bound)|loss nan|skip(?:ped|ping)|retry(?:ing)?|retried|recovered|fail(?:ed|ures?)[=: ]+0\b|exit code 0"
)


def analyse(case: Case) -> Iterator[Finding]:
    """A finding where text was read, every rank that ended did so with code 0, and nothing complains that was not overcome."""
    if not case.lines or raised(case) or waits(case).timeouts or waits(case).gloo:
        return
    if any(one.code != 0 for one in ends(case)):
        return
    known, told = signatures(), words(case)
    lasts = {rank: lines[-3:] for rank, lines in told.by_rank.items() if lines} or {-1: list(told.unsaid[-5:])}
    clean = {rank: line for rank, lines in lasts.items() for line in lines if says("says-clean-end", line)}
    codes = [one for one in ends(case) if one.code == 0]
    steps = {step for rank in told.by_rank if (step := told.step(rank)) is not None}
    whole = len(clean) == len(lasts) or bool(codes)
    # Logs of kernels and tools are full of such words: of these the signatures know what counts.
    spoken = (line for line in case.lines if line.artifact.kind in SPOKEN)
    signs = [line for line in spoken if _COMPLAINS.search(line.text) and not _NO_COMPLAINT.search(line.text)]
    signs = [line for line in signs if not (whole and _WARNS.search(line.text))]
    signs += [event.line for event in case.events if _failed(known[event.signature], whole=whole)]
    if any(not told.trained_after(line.artifact.name, line.number) for line in signs):
        return
    if clean and (whole or len(steps) <= 1):
        likelihood, why = SURE, "Every rank ended cleanly"
    elif codes:
        likelihood, why = SURE, "The processes ended with code 0"
    elif len(steps) == 1 and len(told.by_rank) > 1:
        likelihood, why = 0.55, "All ranks reached the same step"
    else:
        return
    shown = [quote(line, "confirm") for line in list(clean.values())[:4]] or [quote(one.line, "confirm") for one in codes[:4]]
    yield Finding(
        mode="healthy",
        analyst="healthy",
        likelihood=likelihood,
        because=f"{why}, and nothing in {len(case.lines)} lines tells of a failure.",
        evidence=tuple(shown),
        not_proven="that results are right",
    )


def _failed(signature: Signature, *, whole: bool) -> bool:
    """Whether such a line stands for a failure: trouble at the start does not, where every rank ended well after all."""
    if signature.mode is None:
        return signature.role == "cause"
    return not (whole and can_be_overcome(signature.mode))
