"""Declared schemas: what a reader's frame holds, and the one place that makes a frame conform or says why it cannot."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa

COMMON: Mapping[str, str] = {
    "t_ns": "Int64",
    "host": "string",
    "rank": "Int64",
    "pid": "Int64",
    "tid": "Int64",
    "source": "string",
    "kind": "string",
}
"""Columns of every event-like frame: `t_ns` is UTC in nanoseconds, `source` the artifact's path; missing is null."""

DTYPES = ("Int64", "Float64", "boolean", "string")
_ARROW = {"Int64": pa.int64(), "Float64": pa.float64(), "boolean": pa.bool_(), "string": pa.large_string()}
_PART = 65_536


class SchemaError(ValueError):
    """A frame does not conform: a column is missing, or holds values that its dtype cannot."""


@dataclass(frozen=True)
class Schema:
    """The columns of one kind of frame, after the common ones. dtypes are pandas' nullable Int64, Float64, boolean, string.

    Strings are kept in Arrow's memory (`string[pyarrow]`, null is `pd.NA`) under pandas 2 and 3 alike.
    """

    name: str
    own: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        odd = sorted(set(self.own.values()) - set(DTYPES))
        if odd:
            raise SchemaError(f"{self.name}: dtypes {odd} are not among {DTYPES}")

    @property
    def columns(self) -> dict[str, str]:
        """Column name -> dtype, common ones first."""
        return {**COMMON, **self.own}

    def empty(self) -> pd.DataFrame:
        """A frame without rows."""
        return self.frame({})

    def frame(self, columns: Mapping[str, Any]) -> pd.DataFrame:
        """A conforming frame from columns: sequences, numpy, Arrow or polars ones, or one scalar for all rows; absent is null.

        Raises SchemaError for a column the schema does not know, values its dtype cannot hold, or columns of several lengths.
        """
        unknown = sorted(set(columns) - set(self.columns))
        if unknown:
            raise SchemaError(f"{self.name}: unknown columns {unknown}")
        lengths = {
            name: len(value) for name, value in columns.items() if hasattr(value, "__len__") and not isinstance(value, str)
        }
        if len(set(lengths.values())) > 1:
            raise SchemaError(f"{self.name}: columns of several lengths {lengths}")
        rows = next(iter(lengths.values()), 0)
        made = {}
        for name, dtype in self.columns.items():
            value = columns.get(name)
            try:
                arrow = _arrow(value, dtype, rows) if name in lengths else _repeated(value, dtype, rows)
                made[name] = _series(arrow, dtype)
            except (TypeError, ValueError, OverflowError, pa.ArrowException) as error:
                raise SchemaError(f"{self.name}.{name}: not {dtype}: {error}") from error
        return pd.DataFrame(made, copy=False)

    def check(self, frame: pd.DataFrame, *extra: str) -> pd.DataFrame:
        """The frame unchanged, or SchemaError naming what differs. `extra` columns (arm, repeat) may be present too."""
        missing = [name for name in self.columns if name not in frame.columns]
        surplus = [name for name in frame.columns if name not in self.columns and name not in extra]
        wrong = [
            f"{name} is {frame[name].dtype}, not {dtype}"
            for name, dtype in self.columns.items()
            if name in frame.columns and str(frame[name].dtype) not in (dtype, "str" if dtype == "string" else dtype)
        ]
        if missing or surplus or wrong:
            raise SchemaError(f"{self.name}: missing {missing}, unknown {surplus}, wrong {wrong}")
        return frame


def _repeated(value: Any, dtype: str, rows: int) -> pa.ChunkedArray:
    """One value for all rows. The chunks share their memory: a path of 40 letters costs nothing over a million rows."""
    part = pa.repeat(pa.scalar(_text(value) if dtype == "string" else value, type=_ARROW[dtype]), min(rows, _PART))
    whole, rest = divmod(rows, _PART)
    return pa.chunked_array([part] * whole + ([part.slice(0, rest)] if rest else []), type=_ARROW[dtype])


def _arrow(value: Any, dtype: str, rows: int) -> pa.Array | pa.ChunkedArray:
    target = _ARROW[dtype]
    if hasattr(value, "to_arrow"):
        value = value.to_arrow()
    if not isinstance(value, pa.Array | pa.ChunkedArray):
        # pandas' own nullable arrays and plain sequences; a float NaN in a sequence is a value, not a missing one
        if isinstance(value, pd.Series | pd.api.extensions.ExtensionArray | pd.Index):
            return pa.array(value, type=target, from_pandas=True)
        if isinstance(value, np.ndarray):
            return pa.array(value).cast(target) if value.dtype != object else pa.array(value.tolist(), type=target)
        try:
            return pa.array(value, type=target)
        except UnicodeEncodeError:  # lone surrogates, legal in JSON and in a path, have no UTF-8 form
            return pa.array([_text(one) for one in value], type=target)
    return value if value.type == target else value.cast(target)


def _text(value: Any) -> Any:
    return value.encode("utf-8", "backslashreplace").decode() if isinstance(value, str) else value


def _series(arrow: pa.Array | pa.ChunkedArray, dtype: str) -> pd.Series:
    if dtype == "string":
        chunked = arrow if isinstance(arrow, pa.ChunkedArray) else pa.chunked_array([arrow])
        return pd.Series(pd.array(chunked, dtype=pd.StringDtype("pyarrow")), copy=False)
    mask = np.asarray(arrow.is_null())
    if dtype == "boolean":
        values = np.asarray(arrow.fill_null(False), dtype=bool)
        return pd.Series(pd.arrays.BooleanArray(values.copy(), mask.copy()), copy=False)
    if dtype == "Int64":
        values = np.asarray(arrow.fill_null(0), dtype=np.int64)
        return pd.Series(pd.arrays.IntegerArray(_writable(values), _writable(mask)), copy=False)
    values = np.asarray(arrow.fill_null(0.0), dtype=np.float64)
    return pd.Series(pd.arrays.FloatingArray(_writable(values), _writable(mask)), copy=False)


def _writable(values: np.ndarray) -> np.ndarray:
    return values if values.flags.writeable else values.copy()
