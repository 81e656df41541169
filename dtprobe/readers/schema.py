"""Declared schemas: what a reader's frame holds, and the one place that makes a frame conform or says why it cannot."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pandas as pd

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


class SchemaError(ValueError):
    """A frame does not conform: a column is missing, or holds values that its dtype cannot."""


@dataclass(frozen=True)
class Schema:
    """The columns of one kind of frame, after the common ones. dtypes are pandas' nullable Int64, Float64, boolean, string."""

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
        return pd.DataFrame({name: pd.array([], dtype=dtype) for name, dtype in self.columns.items()})

    def frame(self, columns: Mapping[str, Any]) -> pd.DataFrame:
        """A conforming frame from columns (lists, arrays or one scalar for all rows); absent ones become null.

        Raises SchemaError for a column the schema does not know, or values its dtype cannot hold.
        """
        unknown = sorted(set(columns) - set(self.columns))
        if unknown:
            raise SchemaError(f"{self.name}: unknown columns {unknown}")
        lengths = [len(value) for value in columns.values() if hasattr(value, "__len__") and not isinstance(value, str)]
        rows = max(lengths, default=0)
        made = {}
        for name, dtype in self.columns.items():
            value = columns.get(name)
            if value is None or isinstance(value, str | int | float | bool):
                made[name] = pd.Series([value] * rows, dtype=dtype)
                continue
            try:
                made[name] = pd.Series(value, dtype=dtype).reset_index(drop=True)
            except (TypeError, ValueError, OverflowError) as error:
                raise SchemaError(f"{self.name}.{name}: not {dtype}: {error}") from error
        return pd.DataFrame(made)

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
