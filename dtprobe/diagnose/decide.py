"""From findings to one answer: causes before their effects, the likelier before the less likely, or that it is not decided."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from dtprobe.diagnose.case import Case, Finding
from dtprobe.diagnose.diagnosis import UNDETERMINED, Diagnosis

DECIDED = 0.5
"""Below this likelihood the answer is `undetermined`."""


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


def decide(case: Case, findings: Sequence[Finding]) -> Diagnosis:
    """The answer."""
    known = modes()
    found = {one.mode for one in findings}
    effects = {mode for cause in found for mode in known[cause].explains}
    causes = sorted((one for one in findings if one.mode not in effects), key=lambda one: -one.likelihood)
    best = causes[0] if causes else None
    mode = best.mode if best is not None and best.likelihood >= DECIDED else UNDETERMINED
    about = known[mode]
    return Diagnosis(
        failure_mode=mode,
        group=about.group,
        locus=about.locus,
        first_failing_rank=best.first if best else None,
        host=best.host if best else None,
        suspects=best.suspects if best else (),
        confidence=best.likelihood if best else 0.0,
        because=best.because if best else "Nothing in the artifacts says what failed.",
        evidence=best.evidence if best else (),
        missing=tuple(case.missing) + tuple(f"{one.source}: {one.text}" for one in case.problems),
        fix=about.fix,
        scenario=about.scenario,
        ruled_out=tuple(one for one in findings if one is not best),
        not_proven=best.not_proven if best else "",
    )
