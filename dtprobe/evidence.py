"""The frames of all arms and repeats of one run: what a judge sees."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from dtprobe.errors import Unavailable
from dtprobe.readers.folder import SCHEMAS

OUTCOMES = {
    "arm": "string",
    "repeat": "Int64",
    "traced": "boolean",
    "rank": "Int64",
    "pid": "Int64",
    "exit_code": "Int64",
    "signal": "Int64",
    "wall_s": "Float64",
    "cpu_s": "Float64",
    "timed_out": "boolean",
    "started_ns": "Int64",
}
"""Columns of `Evidence.outcomes`: one row a rank of each arm run. `exit_code` is null for a rank ended by a signal."""


@dataclass(frozen=True)
class Evidence:
    """What the arms left.

    `outcomes` has one row a rank (columns `OUTCOMES`); `unavailable` says which recorders could not record, and why;
    `folder` is the run folder, for artifacts that no frame holds.
    """

    folder: Path
    seed: int
    world_size: int | None
    outcomes: pd.DataFrame
    frames: Mapping[str, pd.DataFrame]
    unavailable: Mapping[str, Unavailable]
    suspicions: pd.DataFrame
    """Hang suspicions of the recorders: columns arm, repeat, t_ns, reason."""

    def frame(self, name: str, arm: str | None = None) -> pd.DataFrame:
        """All rows of one kind of frame, or of one arm; empty with the declared columns where nothing was recorded.

        Every frame has the columns `arm` (string) and `repeat` (Int64) beside its schema's. Raises KeyError for a frame
        that no reader makes.
        """
        frame = self.frames.get(name)
        if frame is None:
            frame = SCHEMAS[name].empty().assign(arm=pd.array([], dtype="string"), repeat=pd.array([], dtype="Int64"))
        return frame if arm is None else frame[frame["arm"] == arm]

    def events(self, kind: str, arm: str | None = None) -> pd.DataFrame:
        """The worker's own observations of one kind, their fields as columns beside arm, repeat, rank and t_ns."""
        import json

        rows = self.frame("events", arm)
        rows = rows[rows["kind"] == kind]
        fields = pd.DataFrame([json.loads(text) if isinstance(text, str) else {} for text in rows["fields"]], index=rows.index)
        keep = [name for name in ("arm", "repeat", "rank", "pid", "t_ns") if name not in fields.columns]
        return pd.concat([rows[keep], fields], axis=1)

    def ran(self, arm: str) -> bool:
        """Whether the arm was run at all in this run."""
        return bool((self.outcomes["arm"] == arm).any())
