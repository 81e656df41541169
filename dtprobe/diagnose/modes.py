"""What is known of each failure mode: the taxonomy, and beside it the cure, the scenario, and what the mode brings about."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files


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
