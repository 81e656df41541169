"""The hosts of a run on several nodes: how far their clocks were off, and which were lost."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from dtprobe.report import words

if TYPE_CHECKING:
    from dtprobe.report.findings import Table
    from dtprobe.report.load import RunFolder

MOST = 64
EQUAL_NS = 1_000_000
"""An offset below this is printed as none: no log that people read has finer stamps."""


def table(folder: RunFolder) -> Table | None:
    """A row a host, a column an arm; None where no arm ran on several nodes. Of the repeats the one in which the clock was most off counts."""
    from dtprobe.report.findings import Table

    found: dict[str, dict[str, list[Mapping[str, Any]]]] = {}
    ranks: dict[str, Any] = {}
    reference = ""
    for run in folder.arm_runs:
        said = run.get("hosts")
        if not isinstance(said, dict) or not isinstance(said.get("hosts"), dict):
            continue
        reference = words.clip(said.get("reference") or "", 60)
        for name, host in list(said["hosts"].items())[:MOST]:
            if isinstance(host, dict):
                ranks[name] = host.get("ranks") or []
                found.setdefault(name, {}).setdefault(str(run.get("arm")), []).append(host)
    if not found:
        return None
    arms = tuple(arm for arm in folder.arms if any(arm in by_arm for by_arm in found.values()))
    rows = tuple(
        (f"{words.clip(name, 60)}, {words.ranks(ranks[name])}", *(_cell(by_arm.get(arm, [])) for arm in arms))
        for name, by_arm in found.items()
    )
    return Table(
        name="hosts",
        title="Hosts and their clocks",
        what="host",
        arms=arms,
        rows=rows,
        note=f"Against the clock of {reference or 'the machine that started the run'}, measured before and after the ranks ran. Times in this "
        "report are corrected by it; raw artifacts keep their hosts' own.",
        places=(),
    )


def _cell(hosts: list[Mapping[str, Any]]) -> str:
    if not hosts:
        return "-"
    lost = [host for host in hosts if host.get("lost")]
    if lost:
        return f"lost in {len(lost)} of {len(hosts)} runs: {words.clip(lost[0]['lost'], 120)}"
    worst = max(hosts, key=lambda host: abs(_number(host.get("offset_ns"))))
    offset_ns, doubt = _number(worst.get("offset_ns")), words.number(_number(worst.get("uncertainty_ns")) / 1e9, "s")
    if worst.get("stepped"):
        return f"set in mid-run, uncertain by {doubt}"
    if abs(offset_ns) < EQUAL_NS:
        return f"equal within {words.number(max(abs(offset_ns), _number(worst.get('uncertainty_ns'))) / 1e9, 's')}"
    way = "ahead" if offset_ns < 0 else "behind"
    return f"{words.number(abs(offset_ns) / 1e9, 's')} {way}, within {doubt}"


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) else 0.0
