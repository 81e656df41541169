"""Which scenarios a night runs, and why each of them: by name, tag, capability, and by what has changed since a commit."""

from __future__ import annotations

import difflib
import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from dtprobe.catalog import PACKAGE, Broken, Catalog
from dtprobe.errors import UsageError
from dtprobe.scenario import Scenario

NOT_RUN = frozenset({"cli", "diagnose", "engines", "matrix", "report", "serve", "signals", "site", "suite", "trends"})
"""Packages of dtprobe that no arm of a scenario executes: what is changed in them changes no verdict."""


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What was asked for. Conditions of different kinds must all hold, of several of one kind one is enough.

    `tags` are tags or layers of scenarios, `capabilities` what a scenario needs (`cuda` means `cuda:2` too). `changed` is a commit: a scenario is
    chosen where a file differs from it that the scenario consists of.
    """

    only: Sequence[str] = ()
    tags: Sequence[str] = ()
    capabilities: Sequence[str] = ()
    changed: str | None = None


@dataclass(frozen=True, kw_only=True)
class Selection:
    """The scenarios, in the catalogue's order; `because` says of each why, where more was asked than everything."""

    scenarios: tuple[Scenario, ...]
    broken: tuple[Broken, ...]
    because: Mapping[str, str] = field(default_factory=dict)


def choose(found: Catalog, wanted: Wanted, *, environ: Mapping[str, str] = os.environ) -> Selection:
    """Raises UsageError for a name, tag or capability that no scenario has, for a commit that is none, and where nothing is left."""
    plain = {entry.folder.name: entry for entry in found.broken}
    names = [name for name in wanted.only if name not in plain]
    kept = list(found.chosen(names)) if names or not wanted.only else []
    broken = tuple(entry for name, entry in plain.items() if not wanted.only or name in wanted.only)
    reasons: dict[str, list[str]] = {one.id: [] for one in kept}

    def narrow(kind: str, asked: Sequence[str], of: Mapping[str, Sequence[str]]) -> None:
        known = sorted({value for values in of.values() for value in values})
        for value in asked:
            if value not in known:
                close = difflib.get_close_matches(value, known, n=3, cutoff=0.5)
                raise UsageError(
                    f"--{kind} {value}: no scenario has it",
                    f"did you mean {', '.join(close or known)}?" if known else "leave it out",
                )
        for one in list(kept):
            hits = [value for value in asked if value in of[one.id]]
            if asked and not hits:
                kept.remove(one)
            reasons[one.id] += [f"{kind} {value}" for value in hits]

    narrow("tag", wanted.tags, {one.id: (*one.tags, one.layer) for one in found.scenarios})
    needs = {one.id: tuple({need for full in one.needs for need in (full, _plain(full))}) for one in found.scenarios}
    narrow("capability", wanted.capabilities, needs)
    if wanted.changed is not None:
        around = {folder: changed_files(folder, wanted.changed, environ) for folder in {one.folder.parent for one in kept}}
        for one in list(kept):
            files = touched(one, around[one.folder.parent])
            if not files:
                kept.remove(one)
            else:
                more = f" and {len(files) - 1} more" if len(files) > 1 else ""
                reasons[one.id].append(f"{files[0]}{more} changed since {wanted.changed}")
    return Selection(
        scenarios=tuple(kept),
        broken=broken,
        because={one.id: "; ".join(reasons[one.id]) for one in kept if reasons[one.id]},
    )


def _plain(need: str) -> str:
    """`cuda:2` -> `cuda`, `torch>=2.13` -> `torch`."""
    for mark in (":", ">", "=", "<"):
        need = need.partition(mark)[0]
    return need


def changed_files(folder: Path, commit: str, environ: Mapping[str, str]) -> tuple[Path, tuple[str, ...]]:
    """The repository around a folder, and its files that differ from that commit, as paths in it; those that git does not know yet too."""

    def git(*words: str) -> str:
        try:
            done = subprocess.run(
                ("git", "-C", str(folder), *words),
                capture_output=True,
                text=True,
                errors="surrogateescape",
                timeout=30,
                check=False,
                env={**environ, "GIT_OPTIONAL_LOCKS": "0", "LC_ALL": "C"},
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise UsageError(f"--changed {commit}: git does not answer: {error}", "choose by --only or --tag") from error
        if done.returncode:
            last = (done.stderr.strip().splitlines() or ["git failed"])[-1]
            raise UsageError(f"--changed {commit}: {last}", f"name a commit of the repository around {folder}")
        return done.stdout

    top = Path(git("rev-parse", "--show-toplevel").strip())
    git("rev-parse", "--verify", "--end-of-options", f"{commit}^{{commit}}")
    differ = git("-C", str(top), "diff", "--name-only", "-z", "--end-of-options", commit, "--")
    new = git("-C", str(top), "ls-files", "--others", "--exclude-standard", "-z")
    return top, tuple(sorted({name for text in (differ, new) for name in text.split("\0") if name}))


def touched(scenario: Scenario, changed: tuple[Path, tuple[str, ...]]) -> list[str]:
    """Of the changed files those that the scenario consists of: its folder, the programs and injectors of its arms, what all share."""
    top, names = changed
    folders = [scenario.folder.resolve()]
    for arm in scenario.arms.values():
        folders.append((scenario.folder / arm.program).resolve().parent)
        folders += [PACKAGE.parent / "injectors" / fault.partition(":")[0] for fault in arm.faults]
    found = []
    for name in names:
        path = top / name
        if path.suffix == ".md":
            continue
        if (
            any(path.is_relative_to(folder) for folder in folders)
            or path == PACKAGE.parent / "pyproject.toml"
            or (path.is_relative_to(PACKAGE) and path.relative_to(PACKAGE).parts[0] not in NOT_RUN)
        ):
            found.append(name)
    return found
