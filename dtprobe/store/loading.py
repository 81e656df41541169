"""Files of the history into a DuckDB table, whatever is damaged among them."""

from __future__ import annotations

import glob
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from dtprobe.store.rows import COLUMNS, LATER, schema

if TYPE_CHECKING:
    import duckdb

_SQL_TYPES = {"string": "VARCHAR", "int64": "BIGINT", "bool": "BOOLEAN", "double": "DOUBLE"}
_NAMES = ", ".join(COLUMNS)
_FULLNESS = " + ".join(f"({name} IS NOT NULL)::INTEGER" for name in COLUMNS)


def load(connection: duckdb.DuckDBPyConnection, files: Sequence[Path]) -> list[tuple[Path, str]]:
    """Makes the table `history` of the files and returns the broken ones, each with the reason.

    A run that is in several files counts once. Raises FileNotFoundError when a file has vanished.
    """
    columns = ", ".join(f"{name} {_SQL_TYPES[kind]}" for name, kind in COLUMNS.items())
    connection.execute(f"CREATE TABLE entered ({columns})")
    broken = list(_enter(connection, files))
    twice = connection.execute("SELECT 1 FROM entered GROUP BY run, metric, arm HAVING count(*) > 1 LIMIT 1").fetchone()
    if twice is None:  # nearly always, and then the search for the fullest would cost more than all the rest
        connection.execute("ALTER TABLE entered RENAME TO history")
    else:
        connection.execute(f"CREATE TABLE history AS {once('entered')}")
        connection.execute("DROP TABLE entered")
    return broken


def once(source: str) -> str:
    """The query for the rows of a table, of which one with the same run, metric and arm counts once: the fullest of them.

    Those that an earlier version entered lack columns. Where two are equally full the order of their values decides: always the same one.
    """
    return (
        f"SELECT {_NAMES} FROM {source} "
        f"QUALIFY row_number() OVER (PARTITION BY run, metric, arm ORDER BY {_FULLNESS} DESC, {_NAMES}) = 1"
    )


def _enter(connection: duckdb.DuckDBPyConnection, files: Sequence[Path]) -> Iterator[tuple[Path, str]]:
    import duckdb

    # The first of the files gives every column its name; without it one of an earlier version would hide what the others have.
    connection.execute("CREATE VIEW none AS SELECT * FROM entered WHERE false")
    insert = (
        f"INSERT INTO entered SELECT {_NAMES} FROM (FROM none UNION ALL BY NAME FROM read_parquet($1, union_by_name = true))"
    )
    sound = []
    for path in files:
        reason = complaint(path)
        if reason is None:
            sound.append(path)
        else:
            yield path, reason
    try:
        if sound:
            connection.execute(insert, [[glob.escape(str(path)) for path in sound]])
        return
    except duckdb.Error:
        connection.execute("DELETE FROM entered")  # a page of one is damaged, or one vanished: each alone tells which
    for path in sound:
        try:
            connection.execute(insert, [[glob.escape(str(path))]])
        except duckdb.Error as error:
            if not path.exists():
                raise FileNotFoundError(path) from error
            yield path, str(error).splitlines()[0].replace(str(path), path.name)


def complaint(path: Path) -> str | None:
    """Why the file is no history file, by its footer alone; None where it looks like one. Raises FileNotFoundError."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        found = pq.read_schema(path)
    except FileNotFoundError:
        raise
    except (OSError, pa.ArrowException) as error:
        return str(error).splitlines()[0].replace(str(path), path.name)
    wanted = schema()
    missing = [name for name in wanted.names if name not in found.names and name not in LATER]
    if missing:
        return f"no column {', '.join(missing)}"
    wrong = [
        f"{field.name} is {found.field(field.name).type}"
        for field in wanted
        if field.name in found.names and found.field(field.name).type != field.type
    ]
    return f"column {', '.join(wrong)}" if wrong else None
