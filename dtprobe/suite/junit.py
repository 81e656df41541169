"""JUnit XML of a night, from its rows alone, so that a resumed night has one file with everything in it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from dtprobe.store.files import write_text

SKIPPED = ("unsupported", "left-out", "not-run")
FILE = "junit.xml"


def write(folder: Path, data: Mapping[str, Any]) -> Path:
    """Write `junit.xml` from a summary: a test case a scenario, with verdict, cure, seed, runs and metrics as properties."""
    rows = data["scenarios"]
    counts = {
        "tests": len(rows),
        "failures": sum(_outcome(row) == "failure" for row in rows),
        "errors": sum(_outcome(row) == "error" for row in rows),
        "skipped": sum(row["status"] in SKIPPED for row in rows),
    }
    suites = ElementTree.Element("testsuites", {"name": "dtprobe nightly"})
    began = datetime.fromtimestamp(data["began_ns"] / 1e9, UTC).isoformat()
    said = {
        "name": "dtprobe",
        "time": f"{data['took_s']:.3f}",
        "timestamp": began,
        "hostname": str(data["machine"].get("host")),
    }
    suite = ElementTree.SubElement(suites, "testsuite", {**said, **{name: str(n) for name, n in counts.items()}})
    for row in rows:
        name, _, variant = row["scenario"].partition(":")
        case = ElementTree.SubElement(
            suite, "testcase", {"classname": f"dtprobe.{name}", "name": variant or name, "time": f"{row['took_s']:.3f}"}
        )
        properties = ElementTree.SubElement(case, "properties")
        for key, value in _properties(row):
            ElementTree.SubElement(properties, "property", {"name": key, "value": _clean(value)})
        outcome = _outcome(row)
        if outcome:
            message = {"message": _clean(row["because"] or row["status"])}
            ElementTree.SubElement(case, outcome, message if outcome == "skipped" else {**message, "type": row["status"]})
    write_text(folder / FILE, ElementTree.tostring(suites, encoding="unicode", xml_declaration=True))
    return folder / FILE


def _outcome(row: Mapping[str, Any]) -> str:
    if row["status"] in SKIPPED:
        return "skipped"
    if row["status"] == "failed":
        return "error"
    return "" if row["status"] == "as-expected" or (row["status"] == "flaky" and not row["new"]) else "failure"


def _properties(row: Mapping[str, Any]) -> list[tuple[str, str]]:
    told = [(key, row[key]) for key in ("status", "verdict", "expected", "mitigation", "seed", "host", "folder")]
    told += [("runs", json.dumps(row["runs"]))] if row["runs"] else []
    for name, metric in row["metrics"].items():
        told += [(f"{name} {arm}", metric[arm]) for arm in ("control", "fault", "mitigated") if metric.get(arm) is not None]
    return [(key, str(value)) for key, value in told if value not in (None, "")]


def _clean(text: object) -> str:
    """What XML 1.0 can hold of it."""
    return "".join(
        one if one in "\t\n\r" or 0x20 <= ord(one) < 0xD800 or 0xE000 <= ord(one) < 0xFFFE else "?" for one in str(text)
    )
