"""The history of runs: one small Parquet file a run, folded into blocks now and then, queried by DuckDB.

A writer only ever adds a file of its own name, so any number of writers lose nothing. Opening a Parquet file costs about a
millisecond: folding keeps the number of files, and so the time of an overview, bounded however many runs there are.
"""

from __future__ import annotations

import fcntl
import glob
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dtprobe.errors import DtprobeError
from dtprobe.scenario import ARMS
from dtprobe.store.files import TEMPORARY_SUFFIX, write_parquet, writing

if TYPE_CHECKING:
    import duckdb
    import pandas as pd
    import pyarrow as pa

COLUMNS: Mapping[str, str] = {
    "run": "string",
    "scenario": "string",
    "variant": "string",
    "failure_mode": "string",
    "started_ns": "int64",
    "torch": "string",
    "python": "string",
    "host": "string",
    "git": "string",
    "seed": "int64",
    "verdict": "string",
    "expected": "string",
    "as_expected": "bool",
    "mitigation": "string",
    "metric": "string",
    "arm": "string",
    "value": "double",
    "low": "double",
    "high": "double",
    "n": "int64",
    "unit": "string",
    "night": "string",
    "kernel": "string",
    "cores": "int64",
    "world_size": "int64",
    "launch": "string",
    "took_s": "double",
}
"""Column -> Arrow type. One row a metric and arm; a run without metrics is one row with null `metric` and `arm`.

What the recorders cost is a metric too, `cost <their names>`, a ratio of arm `control`. `night` names the suite that the run belonged to.
"""

LATER = ("night", "kernel", "cores", "world_size", "launch", "took_s")
"""Columns that files of earlier versions lack; there they are null."""

COST = "cost "
"""How the names of those metrics begin."""

FOLD_AT = 100
BLOCK_ROWS = 200_000
_STALE_NS = 3600 * 10**9
_ATTEMPTS = 5

OVERVIEW = """
    WITH runs AS (
        SELECT DISTINCT run, scenario, variant, failure_mode, started_ns, torch, verdict, as_expected, mitigation FROM history
    )
    SELECT scenario, variant, torch, any_value(failure_mode) AS failure_mode, count(*) AS runs,
           count(*) FILTER (WHERE as_expected) AS as_expected,
           arg_max(verdict, started_ns) AS last_verdict, arg_max(as_expected, started_ns) AS last_as_expected,
           arg_max(mitigation, started_ns) AS last_mitigation,
           max(started_ns) AS last_started_ns, arg_max(run, started_ns) AS last_run
    FROM runs GROUP BY scenario, variant, torch ORDER BY scenario, variant, torch
"""


@dataclass(frozen=True)
class BrokenFile:
    """A history file that could not be read, and why; its rows are missing from the answer."""

    path: Path
    reason: str


class Reading:
    """The history as it was at one moment: a table `history` in a DuckDB of its own, and the files that could not be read."""

    def __init__(self, connection: duckdb.DuckDBPyConnection, broken: tuple[BrokenFile, ...]) -> None:
        self._connection = connection
        self.broken = broken

    def sql(self, query: str, parameters: Sequence[Any] = ()) -> pd.DataFrame:
        """The answer to a DuckDB query over the table `history` (columns: COLUMNS)."""
        return self._connection.execute(query, list(parameters)).df()

    def frame(self) -> pd.DataFrame:
        """Every row, oldest run first."""
        return self.sql("SELECT * FROM history ORDER BY started_ns, run, metric, arm")

    def overview(self) -> pd.DataFrame:
        """One row a scenario, variant and torch version: number of runs, how many were as expected, and the last one's verdict."""
        return self.sql(OVERVIEW)

    def close(self) -> None:
        self._connection.close()


class History:
    """The history in a folder (`<out>/history`), which need not exist before the first `append`.

    At `fold_at` single-run files folding is due; a block with `block_rows` rows is full and left alone.
    """

    def __init__(self, folder: Path, *, fold_at: int = FOLD_AT, block_rows: int = BLOCK_ROWS) -> None:
        self.folder = folder
        self._fold_at = fold_at
        self._block_rows = block_rows

    def append(self, rows: Sequence[Mapping[str, Any]]) -> Path:
        """Adds the rows of one finished run as a file named by the run; the same run again replaces it."""
        runs = {row["run"] for row in rows}
        if len(runs) != 1:
            raise ValueError(f"rows of {len(runs)} runs, one expected")
        path = self.folder / f"{runs.pop()}.parquet"
        with writing(path):
            self.folder.mkdir(parents=True, exist_ok=True)
        import pyarrow as pa

        write_parquet(path, pa.Table.from_pylist([dict(row) for row in rows], schema=_schema()))
        return path

    def files(self) -> list[Path]:
        """Blocks first, then the single runs."""
        found = sorted(self.folder.glob("[!.]*.parquet"))
        return sorted(found, key=lambda path: not path.name.startswith("block-"))

    def read(self) -> Reading:
        """The whole history now. A file that is damaged or no history is named in `broken`, and the rest is read."""
        import duckdb

        for _ in range(_ATTEMPTS):
            connection = duckdb.connect()
            try:
                return Reading(connection, tuple(_load(connection, self.files())))
            except FileNotFoundError:  # folded into a block since it was listed: list again
                connection.close()
        raise DtprobeError(
            f"{self.folder}: files vanish as fast as they are listed", "wait until whoever removes them has ended"
        )

    def fold_if_due(self, now_ns: Callable[[], int]) -> None:
        """`fold` when `fold_at` single-run files have gathered. Called after each finished run."""
        if sum(1 for path in self.files() if not path.name.startswith("block-")) >= self._fold_at:
            self.fold(now_ns)

    def fold(self, now_ns: Callable[[], int]) -> Path | None:
        """Folds single-run files and small blocks into one block and removes them; None where another process is folding.

        The block is in place before anything is removed: a kill in between leaves rows twice, which `read` counts once. Damaged
        files stay where they are. Also removes temporary files that writers killed an hour ago or earlier left.
        """
        with _only_one(self.folder / ".lock") as alone:
            if not alone:
                return None
            for path in self.folder.glob(f".*{TEMPORARY_SUFFIX}"):
                if now_ns() - path.stat().st_mtime_ns > _STALE_NS:
                    path.unlink(missing_ok=True)
            return self._fold()

    def _fold(self) -> Path | None:
        import duckdb
        import pyarrow.parquet as pq

        with duckdb.connect() as connection:
            small = [path for path in self.files() if not self._is_full(path)]
            broken = {bad.path for bad in _load(connection, small)}
            folded = [path for path in small if path not in broken]
            if len(folded) < 2:
                return None
            table = connection.sql("SELECT * FROM history ORDER BY started_ns, run, metric, arm").to_arrow_table()
        names = "\n".join(path.name for path in folded)
        block = self.folder / f"block-{sha256(names.encode()).hexdigest()[:16]}.parquet"
        write_parquet(block, table.cast(_schema()))
        if pq.read_metadata(block).num_rows != table.num_rows:
            raise DtprobeError(
                f"{block}: {table.num_rows} rows written, not all came back", "nothing was removed; check the disk"
            )
        for path in folded:
            path.unlink(missing_ok=True)
        return block

    def _is_full(self, path: Path) -> bool:
        import pyarrow as pa
        import pyarrow.parquet as pq

        try:
            return path.name.startswith("block-") and pq.read_metadata(path).num_rows >= self._block_rows
        except (OSError, pa.ArrowException):
            return False  # damaged: loading names it


def rows_of(run: Mapping[str, Any], verdict: Mapping[str, Any], took_s: float | None = None) -> list[dict[str, Any]]:
    """A finished run's rows, from the contents of its `run.json` and `verdict.json`; `took_s` where `run.json` has no end yet."""
    if took_s is None and run.get("ended_ns"):
        took_s = (run["ended_ns"] - run["started_ns"]) / 1e9
    machine = run.get("machine") or {}
    git = run.get("git")
    common = {
        "run": run["id"],
        "scenario": run["scenario"],
        "variant": run.get("variant") or "",
        "failure_mode": verdict.get("failure_mode") or run.get("failure_mode"),
        "started_ns": run["started_ns"],
        "torch": verdict.get("torch"),
        "python": machine.get("python"),
        "host": machine.get("host"),
        "git": git.get("commit") if isinstance(git, Mapping) else git,
        "seed": run.get("seed"),
        "verdict": verdict["verdict"],
        "expected": verdict.get("expected"),
        "as_expected": verdict.get("as_expected"),
        "mitigation": verdict.get("mitigation"),
        "night": run.get("night"),
        "kernel": machine.get("kernel"),
        "cores": machine.get("cores"),
        "world_size": run.get("world_size"),
        "launch": run.get("launch"),
        "took_s": took_s,
    }
    rows = []
    for name, metric in (verdict.get("metrics") or {}).items():
        for arm in ARMS:
            if metric.get(arm) is None:
                continue
            low, high = (metric.get("intervals") or {}).get(arm) or (None, None)
            measured = {"value": metric[arm], "low": low, "high": high, "n": (metric.get("n") or {}).get(arm)}
            rows.append({**common, "metric": name, "arm": arm, "unit": metric.get("unit"), **measured})
    for names, cost in (verdict.get("overhead") or {}).items():
        measured = {"value": cost.get("ratio"), "low": cost.get("low"), "high": cost.get("high"), "n": cost.get("n")}
        rows.append({**common, "metric": f"{COST}{names}", "arm": "control", "unit": "ratio", **measured})
    return rows or [common]


def _schema() -> pa.Schema:
    import pyarrow as pa

    return pa.schema([(name, pa.type_for_alias(kind)) for name, kind in COLUMNS.items()])


def _complaint(path: Path) -> str | None:
    """Why the file is no history file, by its footer alone; None where it looks like one. Raises FileNotFoundError."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        schema = pq.read_schema(path)
    except FileNotFoundError:
        raise
    except (OSError, pa.ArrowException) as error:
        return str(error).splitlines()[0]
    wanted = _schema()
    missing = [name for name in wanted.names if name not in schema.names and name not in LATER]
    if missing:
        return f"no column {', '.join(missing)}"
    wrong = [
        f"{field.name} is {schema.field(field.name).type}"
        for field in wanted
        if field.name in schema.names and schema.field(field.name).type != field.type
    ]
    return f"column {', '.join(wrong)}" if wrong else None


def _load(connection: duckdb.DuckDBPyConnection, files: Sequence[Path]) -> Iterator[BrokenFile]:
    """Fills the table `history` from the files and yields the broken ones; raises FileNotFoundError when one vanished.

    Rows are distinct: a fold that was killed, or is at work now, shows a run in two files.
    """
    import duckdb

    sql_types = {"string": "VARCHAR", "int64": "BIGINT", "bool": "BOOLEAN", "double": "DOUBLE"}
    columns = ", ".join(COLUMNS)
    connection.execute(f"CREATE TABLE history ({', '.join(f'{name} {sql_types[kind]}' for name, kind in COLUMNS.items())})")
    # The first of the files gives every column its name; without it one of an earlier version would hide what the others have.
    connection.execute("CREATE VIEW none AS SELECT * FROM history WHERE false")
    insert = f"INSERT INTO history SELECT DISTINCT {columns} FROM (FROM none UNION ALL BY NAME FROM read_parquet($1, union_by_name = true))"
    sound = []
    for path in files:
        complaint = _complaint(path)
        if complaint is None:
            sound.append(path)
        else:
            yield BrokenFile(path, complaint)
    try:
        if sound:
            connection.execute(insert, [[glob.escape(str(path)) for path in sound]])
        return
    except duckdb.Error:
        pass  # a page inside one of them is damaged, or one vanished: each alone tells which
    for path in sound:
        try:
            connection.execute(f"{insert} EXCEPT SELECT * FROM history", [[glob.escape(str(path))]])
        except duckdb.Error as error:
            if not path.exists():
                raise FileNotFoundError(path) from error
            yield BrokenFile(path, str(error).splitlines()[0])


@contextmanager
def _only_one(path: Path) -> Iterator[bool]:
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("a")
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        yield True
