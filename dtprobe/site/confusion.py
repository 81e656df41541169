"""The diagnosis held against the runs of a folder, kept as data for the page: diagnosing them takes minutes, showing it must not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dtprobe.catalog import failure_modes
from dtprobe.errors import DtprobeError
from dtprobe.store.files import read_json, write_json

FILE = "confusion.json"
SCHEMA = "dtprobe.confusion/1"


@dataclass(frozen=True, kw_only=True)
class Matrix:
    """What the page shows. `cells` counts arms by the group of their own mode and the group of the one that was said."""

    made_ns: int
    rows: tuple[Mapping[str, Any], ...]
    groups: tuple[str, ...]
    said: tuple[str, ...]
    cells: Mapping[tuple[str, str], int]

    @property
    def right(self) -> int:
        return sum(bool(row["right"]) for row in self.rows)


def diagnose(out: Path, now_ns: int) -> Path:
    """Diagnose the latest fault arm of every scenario in `out` and keep the answers in `<out>/confusion.json`."""
    from dtprobe.suite import confusion

    rows = [
        {
            "name": row.name,
            "truth": row.truth,
            "said": row.diagnosis.failure_mode,
            "outcome": str(row.outcome),
            "right": row.right,
            "open": row.open,
            "confidence": row.diagnosis.confidence,
            "because": row.diagnosis.because,
        }
        for row in confusion.rows([out])
    ]
    write_json(out / FILE, {"schema": SCHEMA, "made_ns": now_ns, "rows": rows})
    return out / FILE


def load(out: Path) -> Matrix | str | None:
    """What `diagnose` kept; None before it, a complaint where the file is damaged."""
    path = out / FILE
    if not path.is_file():
        return None
    try:
        data = read_json(path)
        if data.get("schema") != SCHEMA:
            return f"{path.name} has schema {data.get('schema')!r}, this version reads {SCHEMA!r}"
        return _matrix(int(data["made_ns"]), data["rows"])
    except DtprobeError as error:
        return error.message
    except (KeyError, TypeError, ValueError) as error:
        return f"{path.name} is damaged: {error!r}"


def _matrix(made_ns: int, rows: Sequence[Mapping[str, Any]]) -> Matrix:
    modes = failure_modes()

    def group(mode: str) -> str:
        return modes[mode].group if mode in modes else mode

    cells = Counter((group(row["truth"]), group(row["said"])) for row in rows)
    groups = sorted({truth for truth, _ in cells})
    said = [*groups, *sorted({said for _, said in cells} - set(groups))]
    order = sorted(rows, key=lambda row: (bool(row["right"]), bool(row["open"]), row["name"]))
    return Matrix(made_ns=made_ns, rows=tuple(order), groups=tuple(groups), said=tuple(said), cells=cells)
