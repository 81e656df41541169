"""What the pages of a long history cost: reading it, the overview, the whole static site.

    python benchmarks/site.py [--runs 10000] [--repeats 5]

The history is made up: every scenario of the catalogue, night after night under four versions, three metrics in three arms, with nights'
summaries and, for the newest runs, folders whose reports have the size of real ones. Prints medians and spreads over the repeats.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from dtprobe import catalog, site
from dtprobe.store.archive import COLUMNS
from dtprobe.store.runs import folder_name, run_id

VERSIONS = (("2.10.0", "3.11.7"), ("2.11.0", "3.12.4"), ("2.12.0", "3.12.4"), ("2.13.0", "3.13.1"))
BLOCK = 20_000
REPORT_BYTES = 330_000
DAY_NS = 86_400 * 10**9
FIRST_NS = 1_700_000_000 * 10**9
METRICS = (("time_to_error_s", "s", 5.0), ("step_s", "s", 0.02), ("threads", "threads", 40.0))


def rows(runs: int, rng: random.Random) -> Iterator[list[dict[str, Any]]]:
    """The rows of each run, oldest first: one night after another, every scenario in each."""
    scenarios = catalog.load().scenarios
    for number in range(runs):
        night, place = divmod(number, len(scenarios))
        one = scenarios[place]
        torch, python = VERSIONS[night * len(VERSIONS) // (runs // len(scenarios) + 1)]
        started_ns = FIRST_NS + night * DAY_NS + place * 20 * 10**9
        good = rng.random() > 0.01
        common = {
            "run": run_id(started_ns, f"{number:08x}"),
            "scenario": one.name,
            "variant": one.variant,
            "failure_mode": one.failure_mode,
            "started_ns": started_ns,
            "torch": torch,
            "python": python,
            "host": "made-up",
            "git": f"{night:040x}",
            "seed": 0,
            "verdict": "reproduced" if good else "partly",
            "expected": "reproduced",
            "as_expected": good,
            "mitigation": "held",
            "night": f"{run_id(FIRST_NS + night * DAY_NS, '0')[:16]}-1",
            "took_s": 20 + rng.random(),
        }
        yield [
            {**common, "metric": metric, "arm": arm, "value": (value := level * rng.gauss(1, 0.04)), "low": value * 0.95, "high": value * 1.05, "n": 4, "unit": unit}
            for metric, unit, level in METRICS
            for arm in ("control", "fault", "mitigated")
        ]  # fmt: skip


def make(out: Path, runs: int, seed: int) -> None:
    """A history of `runs` runs in `out`, with a summary for every night and folders for the newest runs."""
    schema = pa.schema([(name, pa.type_for_alias(kind)) for name, kind in COLUMNS.items()])
    (out / "history").mkdir(parents=True)
    made = list(rows(runs, random.Random(seed)))
    flat = [row for run in made for row in run]
    for start in range(0, len(flat), BLOCK):
        table = pa.Table.from_pylist(flat[start : start + BLOCK], schema=schema)
        pq.write_table(table, out / "history" / f"block-{start:016x}.parquet")
    nights: dict[str, list[dict[str, Any]]] = {}
    for run in made:
        nights.setdefault(run[0]["night"], []).append(run[0])
    for night, ran in nights.items():
        folder = out / "suites" / night
        folder.mkdir(parents=True)
        summary = {
            "schema": "dtprobe.suite/1", "began_ns": ran[0]["started_ns"], "took_s": 1800.0, "interrupted": False,
            "well": all(one["as_expected"] for one in ran), "seed": 0, "repeats": None, "jobs": 2, "regressions": [],
            "versions": {"torch": ran[0]["torch"]}, "machine": {"python": ran[0]["python"]},
            "scenarios": [_told(one) for one in ran],
        }  # fmt: skip
        (folder / "summary.json").write_text(json.dumps(summary), encoding="utf-8")
    report = f'<!DOCTYPE html><html><body><main id="content">{"x" * REPORT_BYTES}</main></body></html>'
    newest = 3 * len(catalog.load().scenarios)
    for run in made[-newest:]:
        folder = out / folder_name(run[0]["scenario"], run[0]["variant"]) / run[0]["run"]
        folder.mkdir(parents=True)
        (folder / "report.html").write_text(report, encoding="utf-8")


def _told(run: dict[str, Any]) -> dict[str, Any]:
    name = f"{run['scenario']}:{run['variant']}" if run["variant"] else run["scenario"]
    return {
        "scenario": name,
        "status": "as-expected" if run["as_expected"] else "not-as-expected",
        "verdict": run["verdict"],
        "expected": run["expected"],
        "mitigation": "held",
        "because": "A sentence with the numbers that decide it, as long as those of real runs are. " * 4,
        "claim": "What the document says, in two lines of text that a reader can hold in mind. " * 2,
        "took_s": run["took_s"],
        "folder": f"{folder_name(run['scenario'], run['variant'])}/{run['run']}",
        "title": "What happens",
        "metrics": {},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=10_000)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    took: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory(prefix="site-") as temporary:
        out, to = Path(temporary) / "runs", Path(temporary) / "site"
        make(out, given.runs, given.seed)
        for _ in range(given.repeats):
            began = time.perf_counter()
            with closing(site.read(out, now_ns=FIRST_NS)) as known:
                read = time.perf_counter()
                pages = site.Pages(known)
                overview = pages.render("index.html") or ""
                shown = time.perf_counter()
                pages.render("index.html")
                again = time.perf_counter()
                built = site.write(known, to)
                done = time.perf_counter()
            measured = {"read the history": read - began, "overview, first": shown - read, "overview, again": again - shown}
            measured |= {"overview with reading": shown - began, "static site": done - again}
            for name, seconds in measured.items():
                took.setdefault(name, []).append(seconds)
        size = sum(path.stat().st_size for path in to.rglob("*") if path.is_file())
    print(f"{given.runs} runs, {len(catalog.load().scenarios)} scenarios; overview {len(overview) / 1e6:.2f} MB")
    print(f"site: {built.pages} pages, {built.reports} reports, {size / 1e6:.0f} MB\n")
    print(f"{'':24}{'median s':>10}{'least':>10}{'most':>10}")
    for name, each in took.items():
        print(f"{name:24}{statistics.median(each):10.3f}{min(each):10.3f}{max(each):10.3f}")


if __name__ == "__main__":
    main()
