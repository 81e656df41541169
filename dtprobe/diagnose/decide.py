"""From findings to one answer: causes before their effects, the likelier before the less likely, or that it is not decided."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from dtprobe.diagnose.beside import beside
from dtprobe.diagnose.calibration import calibrated
from dtprobe.diagnose.case import Case, Finding, Quote
from dtprobe.diagnose.diagnosis import HEALTHY, UNDETERMINED, Diagnosis
from dtprobe.diagnose.modes import modes
from dtprobe.diagnose.relevance import relevant
from dtprobe.diagnose.weigh import Candidate, evidence, weigh
from dtprobe.readers.artifact import Problem

DECIDED = 0.5
"""Below this likelihood the answer is `undetermined`."""
SHOWN = 10
"""So many lines of evidence are shown."""
RIVAL = 0.6
"""How much a failure that the answer does not explain takes from its confidence."""


def decide(case: Case, findings: Sequence[Finding], failed: Sequence[Problem] = ()) -> Diagnosis:
    """The answer: the likeliest failure that no other one explains, or that the artifacts do not decide.

    `failed` are analysts that could not judge this case; the answer says so.
    """
    known = modes()
    ranked = weigh(relevant(case, findings), {name: one.explains for name, one in known.items()})
    failures = [one for one in ranked if one.mode != HEALTHY]
    healthy = next((one for one in ranked if one.mode == HEALTHY), None)
    best = failures[0] if failures and failures[0].likelihood >= DECIDED else None
    doubt = failures[0].likelihood if failures else 0.0
    if best is None and healthy is not None and healthy.likelihood * (1 - doubt) >= DECIDED:
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
        evidence=_shown(case, best, others),
        missing=missing,
        fix=about.fix,
        scenario=about.scenario,
        ruled_out=tuple(_ruled_out(one, best) for one in others),
        waits=next((one.waits for one in best.findings if one.waits), ()),
        not_proven=next((one.not_proven for one in best.findings if one.not_proven), ""),
    )


def _shown(case: Case, best: Candidate, others: Sequence[Candidate]) -> tuple[Quote, ...]:
    """The lines that decide, then those that belong to them, then the rest."""
    quotes = evidence(best, others, SHOWN)
    more = beside(case, quotes)
    kept = quotes[: SHOWN - len(more)]
    decisive = [one for one in kept if one.role == "cause"]
    return (*decisive, *more, *(one for one in kept if one.role != "cause"))


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
        first_failing_rank=lead.first if lead and lead.first != "all" else None,
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
