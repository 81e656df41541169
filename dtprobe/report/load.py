"""A run folder as it lies on disk, read with bounds: whatever is missing, cut or too large becomes a problem, said in the page."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

from dtprobe.errors import DtprobeError
from dtprobe.report import words
from dtprobe.scenario import ARMS

ROWS = 2_000_000
"""Rows read of one frame at most; a report needs no more, and a frame of a billion rows must not take the machine down."""

JSON_BYTES = 32 << 20


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a piece of evidence lies: a path in the run folder (`href` is None where the file is gone), and its line."""

    text: str
    href: str | None
    line: int | None = None


@dataclass(frozen=True)
class RunFolder:
    """What a report is made of: `run.json`, `verdict.json` where the run came so far, and the frames.

    `problems` collects what could not be read; it grows while frames are read.
    """

    path: Path
    run: Mapping[str, Any]
    verdict: Mapping[str, Any] | None
    problems: list[str] = field(default_factory=list)

    def frame(self, name: str, *columns: str, where: Any = None, rows: int = ROWS) -> pd.DataFrame:
        """The named columns, and `arm`, `repeat`, of `frames/<name>.parquet`; no rows where it does not exist.

        `where` is a pyarrow expression that filters while reading. A column the file lacks is null throughout.
        """
        import pyarrow as pa
        import pyarrow.dataset as ds

        wanted = ["arm", "repeat", *columns]
        path = self.path / "frames" / f"{name}.parquet"
        if not path.is_file():
            return pd.DataFrame({column: pd.Series(dtype=object) for column in wanted})
        try:
            dataset = ds.dataset(path, format="parquet")
            present = [column for column in wanted if column in dataset.schema.names]
            table = dataset.head(rows + 1, columns=present, filter=where)
        except (pa.ArrowException, OSError) as error:
            self.problem(f"{path.relative_to(self.path)} cannot be read: {_line(error)}")
            return pd.DataFrame({column: pd.Series(dtype=object) for column in wanted})
        if table.num_rows > rows:
            self.problem(f"{path.relative_to(self.path)}: the first {rows:,} rows are shown, there are more")
            table = table.slice(0, rows)
        frame = table.to_pandas(types_mapper=_nullable, ignore_metadata=True)
        return frame.reindex(columns=wanted)

    def has_frame(self, name: str) -> bool:
        return (self.path / "frames" / f"{name}.parquet").is_file()

    def problem(self, text: str) -> None:
        """Note what could not be read, once."""
        if text not in self.problems:
            self.problems.append(text)

    @property
    def done(self) -> bool:
        """Whether the run came to its end. The runner marks it finished only after the report: a verdict and an end count too."""
        return self.run.get("state") == "finished" or (self.verdict is not None and self.run.get("ended_ns") is not None)

    @property
    def arm_runs(self) -> list[Mapping[str, Any]]:
        """The recorded runs of single arms in their order, without the bare ones, which only the recorders' cost needs."""
        found = [item for item in self.run.get("arm_runs") or [] if isinstance(item, dict)]
        return [item for item in found if item.get("arm") in ARMS and item.get("probed") is not False]

    @property
    def arms(self) -> list[str]:
        """The arms this run was to have, in the order control, fault, mitigated."""
        declared = self.run.get("arms") or {}
        ran = {item["arm"] for item in self.arm_runs}
        return [arm for arm in ARMS if arm in declared or arm in ran]

    def traced_repeat(self, arm: str) -> int | None:
        """The repeat that the heavy recorders watched, else the last one that ran; None where the arm did not run."""
        ran = [item for item in self.arm_runs if item.get("arm") == arm]
        chosen = [item for item in ran if item.get("traced")] or ran
        return chosen[-1].get("repeat") if chosen else None

    def arm_run(self, arm: str, repeat: int | None) -> Mapping[str, Any] | None:
        found = [item for item in self.arm_runs if item.get("arm") == arm and item.get("repeat") == repeat]
        return found[-1] if found else None

    def relative(self, source: str, arm: Any = None, repeat: Any = None) -> str:
        """A frame's `source` as it reads from the run folder, whether or not the file still lies there."""
        if isinstance(arm, str) and not pd.isna(repeat):
            marker = f"/{arm}/{int(repeat)}/"
            _, found, rest = source.rpartition(marker)
            if found:
                return (marker + rest).lstrip("/")
        return source.removeprefix(f"{self.path}/")

    def place(self, source: Any, arm: Any, repeat: Any, line: Any = None) -> Place:
        """The place in the run folder that a frame's `source` names."""
        found = self.artifact(source, arm, repeat)
        named = self.relative(source, arm, repeat) if isinstance(source, str) else "no artifact"
        return Place(
            text=str(found) if found is not None else words.clip(named, 120),
            href=str(found) if found is not None else None,
            line=None if pd.isna(line) else int(line),
        )

    def artifact(self, source: Any, arm: Any = None, repeat: Any = None) -> Path | None:
        """The artifact that a frame's `source` names, as a path inside the run folder; None where there is no such file.

        Sources are absolute at the time of recording and the folder may have moved since: then the part from
        `<arm>/<repeat>/` on counts. Whatever would lead out of the run folder is no artifact of it.
        """
        if not isinstance(source, str) or not source or "\0" in source:
            return None
        candidates = [self.path / self.relative(source, arm, repeat)]
        if isinstance(arm, str) and not pd.isna(repeat):
            candidates.append(self.path / arm / str(int(repeat)) / source)
        root = self.path.resolve()
        for candidate in candidates:
            try:
                resolved = candidate.resolve()
                if resolved.is_relative_to(root) and resolved.is_file():
                    return resolved.relative_to(root)
            except OSError:
                continue
        return None


def load(path: Path) -> RunFolder:
    """Read a run folder; raises DtprobeError where it holds no readable `run.json`, everything else is tolerated."""
    file = path / "run.json"
    if not file.is_file():
        raise DtprobeError(f"{path} holds no run.json", "name a run folder: `dtprobe show` lists them")
    try:
        run = _json(file)
    except (OSError, ValueError) as error:
        raise DtprobeError(
            f"{file} cannot be read: {_line(error)}", "the run was cut off before it began; run it again"
        ) from error
    problems: list[str] = []
    verdict = None
    try:
        verdict = _json(path / "verdict.json") if (path / "verdict.json").is_file() else None
    except (OSError, ValueError) as error:
        problems.append(f"verdict.json cannot be read: {_line(error)}")
    return RunFolder(path=path, run=run, verdict=verdict, problems=problems)


def _json(path: Path) -> dict[str, Any]:
    size = path.stat().st_size
    if size > JSON_BYTES:
        raise ValueError(f"{size:,} bytes, more than the {JSON_BYTES:,} that are read")
    value = json.loads(path.read_text(encoding="utf-8", errors="replace"))
    if not isinstance(value, dict):
        raise ValueError(f"a JSON {type(value).__name__}, not an object")
    return value


def _line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]


def _nullable(dtype: Any) -> Any:
    import pyarrow as pa

    if pa.types.is_integer(dtype):
        return pd.Int64Dtype()
    if pa.types.is_floating(dtype):
        return pd.Float64Dtype()
    if pa.types.is_boolean(dtype):
        return pd.BooleanDtype()
    if pa.types.is_string(dtype) or pa.types.is_large_string(dtype):
        return pd.StringDtype("python")
    return None
