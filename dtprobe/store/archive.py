"""The history of runs: one small Parquet file a run, folded into blocks now and then, queried by DuckDB.

It lies in a folder or at any URL that fsspec knows (`places`). A file is named by its content and never changed, so any number of
writers lose nothing, without rename and without lock. A file is removed only by whoever has written a block with its rows and read it
back: folding beside another who folds leaves rows in two files at worst, which `read` counts once. Opening a Parquet file costs about
a millisecond: folding keeps the number of files, and so the time of an overview, bounded however many runs there are.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dtprobe.errors import DtprobeError
from dtprobe.store.loading import load, once
from dtprobe.store.places import SUFFIX, place
from dtprobe.store.rows import COLUMNS, COST, LATER, rows_of, schema, table_of

if TYPE_CHECKING:
    import duckdb
    import pandas as pd
    import pyarrow as pa

__all__ = ["COLUMNS", "COST", "FOLD_AT", "LATER", "BrokenFile", "History", "Reading", "rows_of"]

FOLD_AT = 100
BLOCK_ROWS = 200_000
_BLOCK = "block-"
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
    """A history file that could not be read, by its path or URL, and why; its rows are missing from the answer."""

    path: str
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

    def table(self) -> pa.Table:
        """`frame` as an Arrow table."""
        answer = self._connection.sql("SELECT * FROM history ORDER BY started_ns, run, metric, arm").to_arrow_table()
        return answer.cast(schema())

    def overview(self) -> pd.DataFrame:
        """One row a scenario, variant and torch version: number of runs, how many were as expected, and the last one's verdict."""
        return self.sql(OVERVIEW)

    def lacks(self, table: pa.Table) -> pa.Table:
        """Those rows of a table with COLUMNS that this history has not, or not as fully."""
        self._connection.register("coming", table)
        try:
            found = self._connection.sql(
                f"WITH both_of AS (FROM history UNION ALL FROM coming), best AS ({once('both_of')}) "
                "FROM best EXCEPT FROM history ORDER BY started_ns, run, metric, arm"
            ).to_arrow_table()
        finally:
            self._connection.unregister("coming")
        return found.cast(schema())

    def close(self) -> None:
        self._connection.close()


class History:
    """The history in a folder (`<out>/history`) or at a URL, which need not exist before the first `append`.

    At `fold_at` single-run files folding is due; a block with `block_rows` rows is full and left alone. Raises UsageError for a URL that
    cannot be one; the methods raise DtprobeError where it does not answer or refuses.
    """

    def __init__(self, where: Path | str, *, fold_at: int = FOLD_AT, block_rows: int = BLOCK_ROWS) -> None:
        self._place = place(where)
        self._fold_at = fold_at
        self._block_rows = block_rows

    @property
    def where(self) -> str:
        """The folder or URL, without credentials."""
        return self._place.where

    def append(self, rows: Sequence[Mapping[str, Any]]) -> str:
        """Adds the rows of one finished run as a file of their own and returns its name; the same rows again change nothing."""
        runs = {row["run"] for row in rows}
        if len(runs) != 1:
            raise ValueError(f"rows of {len(runs)} runs, one expected")
        table = table_of(rows)
        name = f"{runs.pop()}.{_digest(json.dumps(table.to_pylist(), sort_keys=True), 8)}{SUFFIX}"
        self._place.write(name, table)
        return name

    def add(self, table: pa.Table) -> list[str]:
        """Adds those rows of a table with COLUMNS that the history lacks, in one file; the ids of the runs that they are of."""
        reading = self.read()
        try:
            new = reading.lacks(table)
        finally:
            reading.close()
        runs = sorted(set(new.column("run").to_pylist()))
        if runs:
            self._write_block(new, json.dumps(new.to_pylist(), sort_keys=True))
        return runs

    def files(self) -> list[str]:
        """Names of the files: blocks first, then the single runs."""
        return sorted(self._place.names(), key=lambda name: not name.startswith(_BLOCK))

    def read(self) -> Reading:
        """The whole history now. A file that is damaged or no history is named in `broken`, and the rest is read."""
        import duckdb

        for _ in range(_ATTEMPTS):
            connection, names = duckdb.connect(), self.files()
            try:
                with self._place.copies(names) as paths:
                    named = dict(zip(paths, names, strict=True))
                    broken = [BrokenFile(self._place.address(named[path]), why) for path, why in load(connection, paths)]
                return Reading(connection, tuple(broken))
            except FileNotFoundError:  # folded into a block since it was listed: list again
                connection.close()
            except BaseException:
                connection.close()
                raise
        raise DtprobeError(
            f"{self.where}: files vanish as fast as they are listed", "wait until whoever removes them has ended"
        )

    def fold_if_due(self, now_ns: Callable[[], int]) -> None:
        """`fold` when `fold_at` single-run files have gathered. Called after each finished run."""
        if sum(1 for name in self._place.names() if not name.startswith(_BLOCK)) >= self._fold_at:
            self.fold(now_ns)

    def fold(self, now_ns: Callable[[], int]) -> str | None:
        """Folds single-run files and small blocks into one block and removes them; the block's name, None where there was nothing to do
        or another process is folding.

        The block is in place before anything is removed: a kill in between leaves rows twice, which `read` counts once. Damaged
        files stay where they are. Also removes temporary files that writers killed an hour ago or earlier left.
        """
        with self._place.alone() as alone:
            if not alone:
                return None
            self._place.sweep(now_ns())
            try:
                return self._fold()
            except FileNotFoundError:  # without a lock: somebody else folds, and what is due is done by them
                return None

    def _fold(self) -> str | None:
        import duckdb
        import pyarrow.parquet as pq

        names = self.files()
        with duckdb.connect() as connection, self._place.copies(names) as paths:
            small = [(name, path) for name, path in zip(names, paths, strict=True) if not self._is_full(name, path)]
            broken = {path for path, _ in load(connection, [path for _, path in small])}
            folded = [name for name, path in small if path not in broken]
            if len(folded) < 2:
                return None
            table = Reading(connection, ()).table()
        block = self._write_block(table, "\n".join(folded))
        with self._place.copies([block]) as (written,):
            if pq.read_metadata(written).num_rows != table.num_rows:
                raise DtprobeError(
                    f"{self._place.address(block)}: {table.num_rows} rows written, not all came back",
                    "nothing was removed; check the disk",
                )
        self._place.remove(folded)
        return block

    def _write_block(self, table: pa.Table, means: str) -> str:
        name = f"{_BLOCK}{_digest(means, 16)}{SUFFIX}"
        self._place.write(name, table)
        return name

    def _is_full(self, name: str, path: Path) -> bool:
        import pyarrow as pa
        import pyarrow.parquet as pq

        try:
            return name.startswith(_BLOCK) and pq.read_metadata(path).num_rows >= self._block_rows
        except FileNotFoundError:
            raise
        except (OSError, pa.ArrowException):
            return False  # damaged: loading names it


def _digest(text: str, digits: int) -> str:
    return sha256(text.encode()).hexdigest()[:digits]
