"""What an overview of many runs costs, as they lie after single appends, after folding, by the fold itself, and beside plain pandas.

    python benchmarks/history.py [--runs 10000] [--rows 8] [--repeats 5]

Prints medians with the range over the repeats, and the ratio of one file a run to folded blocks. `as appended` is what a
user has: a fold whenever enough single-run files have gathered. Reading is timed in this process after one warm-up, and once
in a fresh interpreter, imports included. pandas reads the same files one by one and groups them to the same table; it checks no
file, and counts a run twice that lies in two.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
from rich.console import Console
from rich.table import Table

from dtprobe.store import History
from dtprobe.store.archive import COLUMNS, FOLD_AT, rows_of

ARMS = ("control", "fault", "mitigated")
START = 1_750_000_000_000_000_000


def run_rows(number: int, rows: int) -> list[dict[str, Any]]:
    """A run's rows, as a finished scenario's: about `rows` of them over 40 scenarios and 4 torch versions."""
    names = [f"metric-{index}" for index in range(max(1, rows // len(ARMS)))]
    metric = {arm: number * 0.5 for arm in ARMS} | {
        "unit": "s",
        "intervals": {arm: [0.1, 9.0] for arm in ARMS},
        "n": {arm: 3 for arm in ARMS},
    }
    run = {
        "id": f"20250615T{number:06d}Z-{number:08x}",
        "scenario": f"scenario-{number % 40}",
        "started_ns": START + number * 10**9,
    }
    run |= {"seed": number, "machine": {"host": "sample", "python": "3.11.7"}, "failure_mode": f"mode-{number % 40}"}
    verdict = {"verdict": "partly", "expected": "partly", "as_expected": number % 50 != 0, "mitigation": "held"}
    return rows_of(run, verdict | {"torch": f"2.{9 + number % 4}.0", "metrics": dict.fromkeys(names, metric)})


def plain_write(folder: Path, rows: Sequence[dict[str, Any]]) -> None:
    """A single-run file without the flush to disk, which would make the preparation take minutes."""
    schema = pa.schema([(name, pa.type_for_alias(kind)) for name, kind in COLUMNS.items()])
    pq.write_table(pa.Table.from_pylist([dict(row) for row in rows], schema=schema), folder / f"{rows[0]['run']}.parquet")


def timed(action: Callable[[], object], repeats: int) -> list[float]:
    action()
    seconds = []
    for _ in range(repeats):
        begin = time.perf_counter()
        action()
        seconds.append(time.perf_counter() - begin)
    return seconds


def overview(folder: Path) -> Callable[[], object]:
    def read() -> object:
        reading = History(folder).read()
        try:
            return reading.overview()
        finally:
            reading.close()

    return read


def by_pandas(folder: Path) -> Callable[[], object]:
    def read() -> object:
        rows = pd.concat([pd.read_parquet(path) for path in sorted(folder.glob("*.parquet"))], ignore_index=True)
        runs = rows.drop_duplicates("run").sort_values("started_ns")
        return runs.groupby(["scenario", "variant", "torch"]).agg(
            failure_mode=("failure_mode", "first"),
            runs=("run", "size"),
            as_expected=("as_expected", "sum"),
            last_verdict=("verdict", "last"),
            last_as_expected=("as_expected", "last"),
            last_mitigation=("mitigation", "last"),
            last_started_ns=("started_ns", "last"),
            last_run=("run", "last"),
        )

    return read


def fresh(folder: Path) -> float:
    program = f"from pathlib import Path; from dtprobe.store import History; print(len(History(Path({str(folder)!r})).read().overview()))"
    begin = time.perf_counter()
    subprocess.run((sys.executable, "-c", program), check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=10_000)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    table = Table("what", "median s", "range s", "files", box=None, header_style="bold")

    def told(what: str, seconds: Sequence[float], files: int) -> float:
        middle = statistics.median(seconds)
        table.add_row(what, f"{middle:.3f}", f"{min(seconds):.3f} to {max(seconds):.3f}", f"{files:,}")
        return middle

    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        history = History(folder)
        appends = []
        for number in range(options.runs):
            rows = run_rows(number, options.rows)
            if number < 50:
                begin = time.perf_counter()
                history.append(rows)
                appends.append(time.perf_counter() - begin)
            else:
                plain_write(folder, rows)
        told("append one run, flushed to disk", appends, 1)
        single = told(
            f"overview of {options.runs:,} runs, one file a run", timed(overview(folder), options.repeats), len(history.files())
        )
        begin = time.perf_counter()
        history.fold(time.time_ns)
        told("fold them all", [time.perf_counter() - begin], len(history.files()))
        for number in range(options.runs, options.runs + FOLD_AT - 1):
            plain_write(folder, run_rows(number, options.rows))
        appended = told(
            f"overview as appended (block and {FOLD_AT - 1} files)",
            timed(overview(folder), options.repeats),
            len(history.files()),
        )
        pandas = told("the same by plain pandas", timed(by_pandas(folder), options.repeats), len(history.files()))
        told("the overview in a fresh interpreter", [fresh(folder) for _ in range(options.repeats)], len(history.files()))
        begin = time.perf_counter()
        history.fold(time.time_ns)
        told(f"fold {FOLD_AT - 1} files into the block", [time.perf_counter() - begin], len(history.files()))
        folded = told("overview, folded", timed(overview(folder), options.repeats), len(history.files()))
    Console(width=100).print(table)
    print(
        f"one file a run costs {single / appended:.1f} times the overview as appended, {single / folded:.1f} times the folded one; "
        f"plain pandas over the same files {pandas / appended:.2f} times the overview as appended"
    )


if __name__ == "__main__":
    main()
