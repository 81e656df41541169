"""From findings to one answer: causes before their effects, the likelier before the less likely, or that it is not decided."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files

from dtprobe.diagnose.calibration import calibrated
from dtprobe.diagnose.case import Case, Finding
from dtprobe.diagnose.diagnosis import HEALTHY, UNDETERMINED, Diagnosis
from dtprobe.diagnose.facts.raised import raised
from dtprobe.diagnose.facts.words import words
from dtprobe.diagnose.weigh import Candidate, evidence, level, weigh
from dtprobe.readers.artifact import Problem

DECIDED = 0.5
"""Below this likelihood the answer is `undetermined`."""
SHOWN = 10
"""So many lines of evidence are shown."""
STARTING = frozenset({"bootstrap", "network", "config"})
SILENT = frozenset({"nested-launcher", "timeout-not-inherited", "duplicate-gpu", "clock-skew"})
"""These let a job end well and wrong."""
WELL = 0.9
OVERCOME = 0.3
"""What is left of trouble of these classes where steps were printed below its lines."""
RIVAL = 0.6
"""How much a failure that the answer does not explain takes from its confidence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """What is known of a failure mode."""

    group: str
    locus: str
    title: str = ""
    fix: str = ""
    scenario: str | None = None
    explains: frozenset[str] = frozenset()


@cache
def modes() -> Mapping[str, Known]:
    """Every failure mode of the taxonomy."""
    package = files("dtprobe")
    taxonomy = tomllib.loads((package / "taxonomy.toml").read_text(encoding="utf-8"))["modes"]
    more = tomllib.loads((package / "diagnose" / "knowledge" / "modes.toml").read_text(encoding="utf-8"))
    return {
        name: Known(
            group=entry["class"],
            locus=entry["locus"],
            title=entry["title"],
            fix=more.get(name, {}).get("fix", ""),
            scenario=more.get(name, {}).get("scenario"),
            explains=frozenset(more.get(name, {}).get("explains", ())),
        )
        for name, entry in taxonomy.items()
    }


def decide(case: Case, findings: Sequence[Finding], failed: Sequence[Problem] = ()) -> Diagnosis:
    """The answer: the likeliest failure that no other one explains, or that the artifacts do not decide.

    `failed` are analysts that could not judge this case; the answer says so.
    """
    known = modes()
    well = any(one.mode == HEALTHY and one.likelihood >= WELL for one in findings)
    ranked = weigh([_overcome(case, one, well=well) for one in findings], {name: one.explains for name, one in known.items()})
    failures = [one for one in ranked if one.mode != HEALTHY]
    healthy = next((one for one in ranked if one.mode == HEALTHY), None)
    best = failures[0] if failures and failures[0].likelihood >= DECIDED else None
    doubt = failures[0].likelihood if failures else 0.0
    if best is None and healthy is not None and healthy.likelihood - doubt >= DECIDED:
        best = healthy
    missing = tuple(case.missing) + tuple(f"{one.source}: {one.text}" for one in (*case.problems, *failed))
    if best is None:
        return _undetermined(ranked, missing)
    about = known[best.mode]
    others = [one for one in ranked if one is not best]
    return Diagnosis(
        failure_mode=best.mode,
        group=about.group,
        locus=about.locus,
        first_failing_rank=best.first,
        host=best.host,
        suspects=best.suspects,
        confidence=confidence(best, others),
        because=_because(best, others),
        evidence=evidence(best, others, SHOWN),
        missing=missing,
        fix=about.fix,
        scenario=about.scenario,
        ruled_out=tuple(_ruled_out(one, best) for one in others),
        waits=next((one.waits for one in best.findings if one.waits), ()),
        not_proven=next((one.not_proven for one in best.findings if one.not_proven), ""),
    )


def can_be_overcome(mode: str) -> bool:
    """Whether a job may get over this: trouble at the start that is neither silent nor the machine's."""
    return modes()[mode].group in STARTING and mode not in SILENT and level(mode) != level("ib-link-flap")


def _overcome(case: Case, one: Finding, *, well: bool) -> Finding:
    """Trouble at the start that the job got over hardly failed it, unless an exception says it did.

    It got over it where it trained afterwards, or where every rank ended well.
    """
    if not can_be_overcome(one.mode):
        return one
    ends = {(item.line.artifact.name, item.line.number) for item in raised(case)}
    places = [(item.file, item.line) for item in one.evidence if item.role == "cause"]
    if not places or any(place in ends for place in places):
        return one
    if not well and any(not words(case).trained_after(*place) for place in places):
        return one
    return replace(one, likelihood=one.likelihood * OVERCOME)


def confidence(best: Candidate, others: Sequence[Candidate]) -> float:
    """How likely the answer is right: what speaks for it, less where another failure that it does not explain is as likely."""
    rival = max((one.likelihood for one in others if not one.explained_by and one.mode != HEALTHY), default=0.0)
    return calibrated(best.likelihood * (1 - RIVAL * max(0.0, rival - DECIDED)))


def _because(best: Candidate, others: Sequence[Candidate]) -> str:
    """Two sentences: what happened, and what it brought about or why else it is believed."""
    said = best.best.because.strip()
    said = said if said.endswith((".", "!", "?")) else said + "."
    effects = [one for one in others if best.mode in one.explained_by]
    if effects and said.count(". ") == 0:
        titles = modes()
        seen = ", ".join(titles[one.mode].title for one in effects[:2])
        said += f" What else the artifacts show follows from it: {seen}."
    return said


def _ruled_out(one: Candidate, best: Candidate) -> Finding:
    """The best finding of a mode that lost, its reason with it."""
    why = (
        f"it follows from {best.mode}"
        if best.mode in one.explained_by
        else f"less likely ({one.likelihood:.2f}) than {best.mode}"
    )
    if one.explained_by and best.mode not in one.explained_by:
        why = f"it follows from {one.explained_by[0]}"
    return replace(one.best, because=f"{one.best.because.rstrip('.')}: {why}.")


def _undetermined(ranked: Sequence[Candidate], missing: tuple[str, ...]) -> Diagnosis:
    """No answer, with the likeliest lead and what would decide."""
    known = modes()[UNDETERMINED]
    lead = ranked[0] if ranked else None
    because = "Nothing in the artifacts says what failed."
    if lead is not None:
        because = f"The artifacts do not decide; the likeliest lead is {lead.mode} ({lead.likelihood:.2f}): {lead.best.because}"
    return Diagnosis(
        failure_mode=UNDETERMINED,
        group=known.group,
        locus=known.locus,
        first_failing_rank=lead.first if lead else None,
        host=lead.host if lead else None,
        suspects=(),
        confidence=min(lead.likelihood, DECIDED) if lead else 0.0,
        because=because,
        evidence=evidence(lead, ranked[1:], SHOWN) if lead else (),
        missing=(
            *missing,
            *(() if lead is None or not lead.best.not_proven else (f"what would decide: {lead.best.not_proven}",)),
        ),
        fix=known.fix,
        scenario=None,
        ruled_out=tuple(one.best for one in ranked),
        not_proven=lead.best.not_proven if lead else "",
    )
