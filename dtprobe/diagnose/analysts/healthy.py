"""Whether anything failed at all."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from dtprobe.diagnose.case import Case, Finding, Line, quote
from dtprobe.diagnose.facts.ends import ends
from dtprobe.diagnose.facts.outcome import handled, outcome
from dtprobe.diagnose.facts.raised import raised
from dtprobe.diagnose.facts.timeouts import waits
from dtprobe.diagnose.facts.words import SPOKEN, words
from dtprobe.diagnose.relevance import can_be_overcome
from dtprobe.diagnose.signatures import Signature, signatures

SURE, TOLD, PROGRESS = 0.92, 0.88, 0.6
_WHO = {
    "launcher": "The launcher or scheduler says that the job ended well",
    "ranks": "Every rank came to its end",
    "progress": "All ranks went on to the end of their logs",
}
_WARNS = re.compile(r"^\[?W\d{3,4} |^\[W |(?i:\bwarn(?:ing)?\b)")
_INFORMS = re.compile(r"\[I\d{3,4} [\d:.]+ \S+\.(?:cpp|hpp|cc|cu|h):\d+\]")
"""Libraries' own level of a line: what is told for information is no complaint."""
_COMPLAINS = re.compile(
    r"(?i)\b(?:error|errors|exception|fatal|fail(?:ed|ure)?|abort(?:ed)?|killed|segfault|core dumped|timed? ?out|nan|hung|stuck|unreachable|refused|panic|denied)\b"
)
_NO_COMPLAINT = re.compile(
    r"(?i)\b(?:0|no|without|zero) (?:errors?|failures?|exceptions?|nan)\b|errors?[=: ]+0\b|error_file|(?:WER|word error|error rate|mean (?:abs\w*|squared) error|"
    r"\w*_error)\b|error[_ ](?:feedback|bound)|loss nan|skip(?:ped|ping)|retry(?:ing)?|retried|recovered|fail(?:ed|ures?)[=: ]+0\b|exit code 0"
)


def analyse(case: Case) -> Iterator[Finding]:
    """A finding where the job came to its end: told by its launcher or its ranks, or, less surely, where nothing tells of a failure."""
    ended = outcome(case)
    if ended is None:
        yield from _codes(case)
        return
    signs = _signs(case, whole=ended.told)
    if ended.by == "progress" and handled(case):
        signs = [line for line in signs if not words(case).went_on(line.artifact.name, line.number)]
    if signs and (ended.by == "progress" or (ended.by == "ranks" and _unresolved(ended.lines, signs))):
        return
    spared = (
        f", whatever {len(signs)} lines complain of on the way"
        if signs
        else f", and nothing in {len(case.lines)} lines tells of a failure"
    )
    yield Finding(
        mode="healthy",
        analyst="healthy",
        likelihood=PROGRESS if ended.by == "progress" else TOLD if signs else SURE,
        because=f"{_WHO[ended.by]}{spared}.",
        evidence=tuple(quote(line, "confirm") for line in ended.lines[:4]),
        not_proven="that the job came to its end: no exit code, no word of a launcher or scheduler, no last word of the program"
        if ended.by == "progress"
        else "that results are right",
    )


def _unresolved(ends: Sequence[Line], signs: Sequence[Line]) -> bool:
    """Whether the program itself complained before its last word and did not train on: only who started it could tell that this was well."""
    last = {line.artifact.name: line.number for line in ends}
    return any(line.artifact.kind in SPOKEN and line.number <= last.get(line.artifact.name, 0) for line in signs)


def _codes(case: Case) -> Iterator[Finding]:
    """Every process that is told of ended with code 0."""
    codes = ends(case)
    if codes and all(one.code == 0 for one in codes) and not raised(case) and not (waits(case).timeouts or waits(case).gloo):
        signs = _signs(case, whole=True)
        if all(words(case).trained_after(line.artifact.name, line.number) for line in signs):
            yield Finding(
                mode="healthy",
                analyst="healthy",
                likelihood=SURE,
                because=f"The processes ended with code 0, and nothing in {len(case.lines)} lines tells of a failure.",
                evidence=tuple(quote(one.line, "confirm") for one in codes[:4]),
                not_proven="that results are right",
            )


def _signs(case: Case, *, whole: bool) -> list[Line]:
    """Lines that complain and that no progress in the same file follows; where the job ended well its warnings are none."""
    known, told = signatures(), words(case)
    # Logs of kernels and tools are full of such words: of these the signatures know what counts.
    spoken = (line for line in case.lines if line.artifact.kind in SPOKEN)
    signs = [line for line in spoken if _COMPLAINS.search(line.text) and not _NO_COMPLAINT.search(line.text)]
    signs = [line for line in signs if not _INFORMS.search(line.raw)]
    signs = [line for line in signs if not (whole and _WARNS.search(line.text))]
    signs += [event.line for event in case.events if _failed(known[event.signature], whole=whole)]
    return [line for line in signs if not told.trained_after(line.artifact.name, line.number)]


def _failed(signature: Signature, *, whole: bool) -> bool:
    """Whether such a line stands for a failure: trouble at the start does not, where every rank ended well after all."""
    if signature.mode is None:
        return signature.role == "cause"
    return not (whole and can_be_overcome(signature.mode))
