"""The incident note: all that the terminal, the page and the Markdown say about a diagnosis, in words."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from dtprobe.diagnose.case import First
from dtprobe.diagnose.diagnosis import HEALTHY, UNDETERMINED, Diagnosis
from dtprobe.diagnose.modes import modes
from dtprobe.report import words
from dtprobe.report.postmortem import moments, waits
from dtprobe.report.postmortem.advice import Advice, to_collect

QUOTE = 600
"""Characters shown of a line."""
BECAUSE, FIX = 600, 1200
EVIDENCE = 20
RIVALS = 8
MISSING = 20
SENTENCES = 12
ROLES: Mapping[str, str] = {"cause": "cause", "confirm": "confirms it", "effect": "effect"}
_SURE = (
    (0.95, "almost certain"),
    (0.85, "very likely"),
    (0.7, "likely"),
    (0.5, "more likely than not"),
    (0.0, "a mere possibility"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Exhibit:
    """A line of evidence, and what part it plays."""

    where: str
    text: str
    role: str
    meaning: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Rival:
    """Another explanation that was looked at. `because` is what spoke for it, and why it is not the answer."""

    mode: str
    title: str
    who: str
    because: str
    likelihood: str


@dataclass(frozen=True, kw_only=True)
class Note:
    """What is said, in the order in which it is read. `kind` is fault, undetermined or healthy.

    `left_out` maps the name of a list to how many of its entries are not shown.
    """

    kind: str
    mode: str
    title: str
    answer: str
    because: str
    confidence: str
    sure: str
    who: str
    facts: tuple[tuple[str, str], ...]
    evidence: tuple[Exhibit, ...]
    not_proven: str
    rivals: tuple[Rival, ...]
    missing: tuple[str, ...]
    collect: tuple[Advice, ...]
    fix: str
    scenario: str
    command: str
    read: tuple[tuple[str, int], ...]
    timeline: moments.Timeline
    waits: waits.Graph | None
    wait_sentences: tuple[str, ...]
    cycles: tuple[str, ...]
    left_out: Mapping[str, int]


def of(diagnosis: Diagnosis) -> Note:
    """The note of a diagnosis."""
    kind = diagnosis.failure_mode if diagnosis.failure_mode in (HEALTHY, UNDETERMINED) else "fault"
    rivals = _rivals(diagnosis)
    graph = waits.graph(diagnosis.waits, moments.blamed_ranks(diagnosis))
    sentences = graph.sentences if graph else ()
    read = sorted(((words.clip(name, 60), count) for name, count in diagnosis.read.items()), key=lambda one: (-one[1], one[0]))
    return Note(
        kind=kind,
        mode=words.clip(diagnosis.failure_mode, 80),
        title=_title(diagnosis.failure_mode),
        answer=_answer(diagnosis, kind),
        because=sentence(words.clip(diagnosis.because, BECAUSE)),
        confidence=f"{sure(diagnosis.confidence)} ({diagnosis.confidence:.0%})" if kind != UNDETERMINED else "not decided",
        sure=sure(diagnosis.confidence) if kind != UNDETERMINED else "not decided",
        who=_who(diagnosis.first_failing_rank, diagnosis.host) if kind != HEALTHY else "",
        facts=_facts(diagnosis, kind),
        evidence=tuple(
            Exhibit(
                where=moments.place(one.file, one.line),
                text=words.clip(one.text.strip("\r\n"), QUOTE),
                role=one.role,
                meaning=ROLES.get(one.role, one.role),
            )
            for one in diagnosis.evidence[:EVIDENCE]
        ),
        not_proven=sentence(words.clip(diagnosis.not_proven, BECAUSE)),
        rivals=rivals[:RIVALS],
        missing=tuple(words.clip(text, 300).replace("\n", " ") for text in diagnosis.missing[:MISSING]),
        collect=to_collect(diagnosis.read) if kind == UNDETERMINED else (),
        fix=sentence(words.clip(diagnosis.fix, FIX)),
        scenario=words.clip(diagnosis.scenario or "", 80),
        command=f"dtprobe run {words.clip(diagnosis.scenario, 80)}" if diagnosis.scenario else "",
        read=tuple(read),
        timeline=moments.timeline(diagnosis),
        waits=graph,
        wait_sentences=sentences[:SENTENCES],
        cycles=tuple(_cycle(cycle) for cycle in (graph.cycles if graph else ())[:SENTENCES]),
        left_out={
            "evidence": max(0, len(diagnosis.evidence) - EVIDENCE),
            "rivals": max(0, len(rivals) - RIVALS),
            "missing": max(0, len(diagnosis.missing) - MISSING),
            "waits": max(0, len(sentences) - SENTENCES),
        },
    )


def sure(confidence: float) -> str:
    """A probability in words."""
    return next(text for least, text in _SURE if confidence >= least or least == 0.0)


def sentence(text: str) -> str:
    """The text with a capital and a full stop, as far as it begins with a word."""
    text = text.strip()
    if not text:
        return ""
    head = text.split(maxsplit=1)[0]
    plain = head.isalpha() and head.islower()
    text = f"{text[0].upper()}{text[1:]}" if plain else text
    return text if text.endswith((".", "!", "?", ":")) else f"{text}."


def _title(mode: str) -> str:
    known = modes().get(mode)
    return known.title if known else mode.replace("-", " ")


def _answer(diagnosis: Diagnosis, kind: str) -> str:
    if kind == HEALTHY:
        return "No failure was found in these artifacts."
    if kind == UNDETERMINED:
        return "The artifacts do not decide what failed first."
    mode = words.clip(diagnosis.failure_mode, 80)
    first, suspects = diagnosis.first_failing_rank, diagnosis.suspects
    about = f"{mode}, {_title(diagnosis.failure_mode)}" if _title(diagnosis.failure_mode) != mode.replace("-", " ") else mode
    who = _who(first, diagnosis.host)
    if isinstance(first, int):
        return sentence(f"{who[0].upper()}{who[1:]} failed first: {about}")
    if first == "all":
        return sentence(f"No rank failed before the others: {about}")
    if suspects:
        return sentence(f"The job failed by {about}; the first rank is not certain, look at {words.ranks(suspects)}")
    return sentence(
        f"The job failed by {about}{f', on host {words.clip(diagnosis.host, 60)}' if diagnosis.host else ''}; no single rank can be named"
    )


def _who(first: First, host: str | None) -> str:
    at = f" on host {words.clip(host, 60)}" if host else ""
    if first == "all":
        return f"all ranks{at}"
    return f"rank {first}{at}" if first is not None else f"a rank{at}, which one is not known" if host else "not known"


def _facts(diagnosis: Diagnosis, kind: str) -> tuple[tuple[str, str], ...]:
    facts = [("Failure mode", words.clip(diagnosis.failure_mode, 80))] if kind == "fault" else []
    if kind == "fault":
        facts += [("Class", words.clip(diagnosis.group, 40)), ("Cause lies in", words.clip(diagnosis.locus, 40))]
    others = [rank for rank in diagnosis.suspects if rank != diagnosis.first_failing_rank]
    if others and kind != HEALTHY:
        facts.append(("Suspects", words.clip(words.ranks(diagnosis.suspects), 120)))
    if diagnosis.read:
        facts.append(("Files read", f"{sum(diagnosis.read.values()):,}"))
    return tuple(facts)


def _rivals(diagnosis: Diagnosis) -> tuple[Rival, ...]:
    """The findings that lost, each mode and rank once; those that agree with the answer are none."""
    found: dict[tuple[str, First], Rival] = {}
    for one in diagnosis.ruled_out:
        key = (one.mode, one.first)
        agrees = one.mode == diagnosis.failure_mode and one.first in (diagnosis.first_failing_rank, None)
        if key not in found and not agrees:
            found[key] = Rival(
                mode=words.clip(one.mode, 80),
                title=_title(one.mode),
                who=_who(one.first, one.host) if one.first is not None or one.host else "",
                because=sentence(words.clip(one.because, 400)),
                likelihood=f"{one.likelihood:.0%} by itself",
            )
    return tuple(found.values())


def _cycle(ranks: tuple[int, ...]) -> str:
    shown = [str(rank) for rank in ranks] if len(ranks) <= 8 else [*map(str, ranks[:6]), "...", str(ranks[-1])]
    return f"{len(ranks):,} ranks wait in a circle, none of them can ever go on: {', '.join(shown)}"
