"""Prometheus metrics of a night that ended, from its `summary.json`, as a file for node_exporter's textfile collector.

Names and units follow https://prometheus.io/docs/practices/naming: base units, moments as Unix seconds (an age is `time() - moment`
in a query, so that it grows while nothing runs), `_info` for what is told in labels.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector

from dtprobe.errors import UsageError
from dtprobe.store.files import write_text

SUFFIX = ".prom"
"""The textfile collector reads no other files, so that it never meets a half-written one."""
STATUSES = ("as-expected", "not-as-expected", "flaky", "broken", "failed", "left-out", "not-run", "unsupported")
"""Always exported, with zero where nothing has it: a rule on a series that is absent would never fire."""
KINDS = ("verdict", "metric", "cost", "gone")
MOST_SCENARIOS = 2000
MOST_REGRESSIONS = 200
"""Series of its own for each up to here; what is above is counted, never silently dropped."""
_MOST_CHARACTERS = 120
_NS = 1e9


def gauge(name: str, text: str, value: float) -> GaugeMetricFamily:
    """One series without labels."""
    return GaugeMetricFamily(name, text, value=value)


def gauges(name: str, text: str, labels: Sequence[str], rows: Iterable[tuple[Sequence[Any], float]]) -> GaugeMetricFamily:
    """A series for each row of label values and its value; of rows with the same labels the last stands."""
    family = GaugeMetricFamily(name, text, labels=labels)
    for values, value in {tuple(label(one) for one in key): float(value) for key, value in rows}.items():
        family.add_metric(values, value)
    return family


def label(value: Any) -> str:
    """A label's value: nothing for None, and never so long that it becomes a payload."""
    text = "" if value is None else str(value)
    return text if len(text) <= _MOST_CHARACTERS else text[: _MOST_CHARACTERS - 3] + "..."


def families(data: Mapping[str, Any], *, night: str = "", last_good_ns: int | None = None) -> list[Metric]:
    """The metrics of a summary. `night` is its folder's name, `last_good_ns` when the latest night that was well ended.

    Raises UsageError for a mapping that is no summary of a suite.
    """
    try:
        return _families(data, night, last_good_ns)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UsageError(
            f"no metrics of this summary: {type(error).__name__}: {error}", "give the summary.json of a night"
        ) from error


def _families(data: Mapping[str, Any], night: str, last_good_ns: int | None) -> list[Metric]:
    rows = data["scenarios"]
    shown = rows[:MOST_SCENARIOS]
    found = data.get("regressions") or ()
    regressions = found[:MOST_REGRESSIONS]
    versions = data["versions"]
    statuses = (*STATUSES, *sorted({row["status"] for row in rows} - set(STATUSES)))
    kinds = (*KINDS, *sorted({one["kind"] for one in found} - set(KINDS)))
    ended_s = data["began_ns"] / _NS + data["took_s"]
    good_s = ended_s if data["well"] else last_good_ns / _NS if last_good_ns else None
    scenario = ("scenario",)
    info = InfoMetricFamily(
        "dtprobe_night",
        "The night that ended last, and what it ran on.",
        value={
            "night": label(night),
            "dtprobe": label(versions.get("dtprobe")),
            "torch": label(versions.get("torch")),
            "python": label(data["machine"]["python"]),
            "host": label(data["machine"]["host"]),
        },
    )
    made: list[Metric] = [
        info,
        gauge("dtprobe_night_start_timestamp_seconds", "When the night began.", data["began_ns"] / _NS),
        gauge("dtprobe_night_end_timestamp_seconds", "When the night ended.", ended_s),
        gauge("dtprobe_night_duration_seconds", "How long the night took.", data["took_s"]),
        gauge("dtprobe_night_success", "1 where every scenario that ran was as expected.", float(data["well"])),
        gauge("dtprobe_night_interrupted", "1 where the night was interrupted.", float(data["interrupted"])),
        gauges(
            "dtprobe_night_scenarios",
            "Scenarios of the night by what became of them.",
            ("status",),
            (((status,), sum(row["status"] == status for row in rows)) for status in statuses),
        ),
        gauges(
            "dtprobe_night_scenario_status",
            "1 for the status that the scenario has, 0 for those that it has not.",
            ("scenario", "status"),
            (((row["scenario"], status), float(row["status"] == status)) for row in shown for status in statuses),
        ),
        gauges(
            "dtprobe_night_scenario_verdict_info",
            "The scenario's verdict, the expected one, and whether its cure held.",
            ("scenario", "verdict", "expected", "mitigation"),
            (((row["scenario"], row["verdict"], row["expected"], row["mitigation"]), 1.0) for row in shown if row["verdict"]),
        ),
        gauges(
            "dtprobe_night_scenario_duration_seconds",
            "How long the scenario took.",
            scenario,
            (((row["scenario"],), row["took_s"]) for row in shown if row["took_s"]),
        ),
        gauges(
            "dtprobe_night_scenario_runs",
            "How often the scenario was run.",
            scenario,
            (((row["scenario"],), max(1, len(row.get("runs") or ()))) for row in shown if row["verdict"]),
        ),
        gauges(
            "dtprobe_night_regressions",
            "Regressions that the history shows, by kind.",
            ("kind",),
            (((kind,), sum(one["kind"] == kind for one in found)) for kind in kinds),
        ),
        gauges(
            "dtprobe_night_regression_confidence_ratio",
            "A regression that the history shows, with the confidence in it.",
            ("scenario", "metric", "arm", "kind"),
            (((one["scenario"], one["metric"], one["arm"], one["kind"]), one["confidence"]) for one in regressions),
        ),
        gauge(
            "dtprobe_night_series_left_out",
            "Scenarios and regressions above the bounds, which are counted but have no series of their own.",
            len(rows) - len(shown) + len(found) - len(regressions),
        ),
    ]
    if good_s is not None:
        made.append(gauge("dtprobe_night_last_success_timestamp_seconds", "When the latest good night ended.", good_s))
    if data.get("budget_s"):
        made.append(gauge("dtprobe_night_budget_seconds", "How long the night was allowed to take.", data["budget_s"]))
    return made


class _These(Collector):
    def __init__(self, made: Sequence[Metric]) -> None:
        self._made = made

    def collect(self) -> Iterable[Metric]:
        return self._made


def exposition(made: Sequence[Metric]) -> bytes:
    """The families in Prometheus' text format."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_These(made))
    return generate_latest(registry)


def check(path: Path) -> None:
    """Says before the night what would fail after it: raises UsageError where `path` cannot be a file of metrics."""
    if path.suffix != SUFFIX:
        raise UsageError(
            f"--metrics {path}: node_exporter reads only files that end in {SUFFIX}", f"name it {path.stem}{SUFFIX}"
        )
    if path.is_dir() or not path.parent.is_dir():
        raise UsageError(
            f"--metrics {path}: {'is a folder' if path.is_dir() else f'there is no folder {path.parent}'}",
            "name a file in the folder of node_exporter's --collector.textfile.directory",
        )


def write(path: Path, data: Mapping[str, Any], *, night: str = "", last_good_ns: int | None = None) -> None:
    """Write the metrics of a summary into `path`, atomically. Raises DtprobeError where the disk refuses; the old file then stands."""
    write_text(path, exposition(families(data, night=night, last_good_ns=last_good_ns)).decode())


def last_good_ns(suites: Path) -> int | None:
    """When the latest night in a folder of nights that was well ended: UTC in nanoseconds, None where none was.

    Nights are named by their time, so the newest are read first; a summary that cannot be read is no good night.
    """
    for file in sorted(suites.glob("*/summary.json"), reverse=True):
        try:
            data = json.loads(file.read_bytes())
            if data["well"]:
                return int(data["began_ns"] + data["took_s"] * _NS)
        except (OSError, ValueError, KeyError, TypeError):
            continue
    return None
