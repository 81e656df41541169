"""What an injector has done inside the ranks, by a plug-in of `dtprobe.hook`: its plan goes in as files, firings come back."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import dtprobe
from dtprobe.inject import Firing, Site

HOOK = Path(dtprobe.__file__).resolve().parent / "hook"
FIRED = "injected.jsonl"
"""In a rank's folder: a line for each firing inside the rank, appended at one stroke before the fault acts."""


class Plan:
    """The part of one fault in the plan `name` that all faults of an arm run share: a folder with a file a fault.

    The plug-in finds the folder in the variable `DTPROBE_<NAME>_PLAN`.
    """

    def __init__(self, site: Site, name: str, plugin: Path) -> None:
        own = hashlib.sha256(str(site.folder).encode()).hexdigest()[:12]
        self.folder = site.scratch / f"{name}-{own}"
        self.file = self.folder / f"{site.index:03}.json"
        self._variable = f"DTPROBE_{name.upper()}_PLAN"
        self._plugin = plugin

    def write(self, part: Mapping[str, Any]) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        fresh = self.file.with_suffix(".new")
        fresh.write_text(json.dumps(part), encoding="utf-8")
        fresh.replace(self.file)

    def parts(self) -> list[dict[str, Any]]:
        """What all faults have written, in their order."""
        return [json.loads(file.read_text(encoding="utf-8")) for file in sorted(self.folder.glob("*.json"))]

    def environ(self) -> dict[str, str]:
        """Variables for the ranks (or for the launcher that hands them down)."""
        return {"PYTHONPATH": str(HOOK), "DTPROBE_HOOKS": str(self._plugin), self._variable: str(self.folder)}

    def remove(self) -> None:
        """Ranks that start from now on find nothing."""
        self.file.unlink(missing_ok=True)
        if self.folder.is_dir() and not any(self.folder.iterdir()):
            shutil.rmtree(self.folder, ignore_errors=True)


def lines(site: Site) -> Iterator[dict[str, Any]]:
    """What the ranks said about this fault, rank by rank, oldest first; a line that a kill cut short is left out."""
    for file in sorted(site.folder.glob(f"rank*/{FIRED}")):
        for text in file.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                line = json.loads(text)
            except ValueError:
                continue
            if line.get("index") == site.index:
                yield line


def firings(site: Site) -> tuple[Firing, ...]:
    """The firings of this fault inside the ranks, in order of time; `ended` lines close the one before of their process."""
    found: list[dict[str, Any]] = []
    for line in lines(site):
        if line["kind"] == "fired":
            found.append(line)
        elif line["kind"] == "ended" and found and found[-1]["pid"] == line["pid"]:
            found[-1] = {**found[-1], "ended_ns": line["t_ns"]}
    return tuple(
        Firing(
            t_ns=one["t_ns"],
            rank=one["rank"],
            call=one["call"],
            nth=one["nth"],
            ended_ns=one.get("ended_ns"),
            detail=one["detail"],
        )
        for one in sorted(found, key=lambda one: one["t_ns"])
    )


def refusals(site: Site) -> list[str]:
    """Why the fault could not be applied, in the ranks' own words."""
    return [f"rank {line['rank']}: {line['detail']}" for line in lines(site) if line["kind"] == "refused"]
