"""The run folder: made whole, filled file by file, and honest about being unfinished at every instant in between."""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import shutil
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from dtprobe.errors import DtprobeError, UsageError
from dtprobe.scenario import ARMS
from dtprobe.store.files import read_json, sync_folder, write_json, write_parquet, write_text, writing

if TYPE_CHECKING:
    import pandas as pd

SCHEMA = "dtprobe.run/1"
BARE = "bare"
"""The arm name of control runs without any recorder, which the cost of the recorders is measured against."""
RUN_ID = re.compile(r"\d{8}T\d{6}Z-[0-9a-f]{8}")
SCENARIO = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")
POSTMORTEMS = "postmortem"
RESERVED = ("history", "suites", POSTMORTEMS)
HALF_MADE = ".new-"
_STALE_NS = 3600 * 10**9


def folder_name(scenario: str, variant: str = "") -> str:
    """The folder of a scenario's runs: `name` or `name.variant`."""
    for part in (scenario, variant) if variant else (scenario,):
        if not SCENARIO.fullmatch(part) or part in RESERVED:
            raise UsageError(
                f"{part!r} cannot name a scenario's runs", f"use letters, digits, - and _; {' and '.join(RESERVED)} are taken"
            )
    return f"{scenario}.{variant}" if variant else scenario


def run_id(started_ns: int, token: str) -> str:
    """`<utc second>-<8 hex>`: sorts by time of start, unique by the token."""
    return f"{datetime.fromtimestamp(started_ns // 10**9, UTC):%Y%m%dT%H%M%SZ}-{token}"


class RunFolder:
    """One run on disk. Made by `Store.create`, opened again by `RunFolder.open`.

    While the maker lives it holds a lock on the folder itself, which the kernel drops when the maker dies: that is how
    `running` tells a run in progress from one whose harness was killed; `run.json` says `unfinished` in both.
    """

    def __init__(self, path: Path, facts: dict[str, Any], lock: int | None = None) -> None:
        self.path = path
        self._facts = facts
        self._lock = lock

    @classmethod
    def create(cls, parent: Path, facts: Mapping[str, Any], *, started_ns: int, token: str | None = None) -> RunFolder:
        """A new folder in `parent` whose `run.json` holds `facts`, the id, the start and the state `unfinished`.

        `token` is the id's 8 hex digits (drawn when None). The folder appears under its name with `run.json` in it or not at all.
        """
        name = run_id(started_ns, token or secrets.token_hex(4))
        path = parent / name
        half_made = parent / f"{HALF_MADE}{name}"
        made = {"schema": SCHEMA, "id": name, "state": "unfinished", "started_ns": started_ns, "ended_ns": None, **facts}
        lock = None
        with writing(path):
            parent.mkdir(parents=True, exist_ok=True)
            sweep(parent, started_ns)
            try:
                half_made.mkdir()
                lock = _lock_of(half_made)
                write_json(half_made / "run.json", made)
                half_made.rename(path)
                sync_folder(parent)
            except BaseException:
                shutil.rmtree(half_made, ignore_errors=True)
                if lock is not None:
                    os.close(lock)
                raise
        return cls(path, made, lock)

    @classmethod
    def open(cls, path: Path) -> RunFolder:
        """The run in an existing folder; raises DtprobeError where `run.json` is absent, damaged or of another schema."""
        facts = read_json(path / "run.json")
        if facts.get("schema") != SCHEMA:
            raise DtprobeError(f"{path / 'run.json'}: schema {facts.get('schema')!r}, this version reads {SCHEMA!r}")
        return cls(path, facts)

    @property
    def id(self) -> str:
        return str(self._facts.get("id", self.path.name))

    @property
    def facts(self) -> Mapping[str, Any]:
        """What `run.json` holds, as this object last wrote or read it."""
        return self._facts

    @property
    def state(self) -> str:
        """`unfinished`, `interrupted` or `finished`."""
        return str(self._facts.get("state"))

    @property
    def scenario(self) -> str:
        """`name` or `name:variant`."""
        variant = self._facts.get("variant")
        return f"{self._facts.get('scenario')}:{variant}" if variant else str(self._facts.get("scenario"))

    def running(self) -> bool:
        """Whether the process that made this folder still works on it.

        False also on a file system that cannot lock a folder (NFS), where nobody can tell.
        """
        if self._lock is not None:
            return True
        try:
            handle = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        except OSError:
            return False
        try:
            fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:
            return False
        finally:
            os.close(handle)
        return False

    def update(self, **facts: Any) -> None:
        """Replaces top-level entries of `run.json`, atomically."""
        changed = {**self._facts, **facts}
        write_json(self.path / "run.json", changed)
        self._facts = changed

    def arm_folder(self, arm: str, repeat: int) -> Path:
        """`<run>/<arm>/<repeat>`, made. `arm` is control, fault, mitigated or bare."""
        if arm not in (*ARMS, BARE):
            raise ValueError(f"{arm!r} is not one of {', '.join((*ARMS, BARE))}")
        folder = self.path / arm / str(repeat)
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
        return folder

    def write_text(self, name: str, text: str) -> Path:
        """Writes a text file (`report.md`) of the run, atomically."""
        write_text(self.path / name, text)
        return self.path / name

    def write_frame(self, name: str, frame: pd.DataFrame) -> Path:
        """Writes `frames/<name>.parquet`, atomically; the index is not kept."""
        path = self.path / "frames" / f"{name}.parquet"
        with writing(path):
            path.parent.mkdir(exist_ok=True)
        write_parquet(path, frame)
        return path

    def frame_names(self) -> list[str]:
        return sorted(path.stem for path in (self.path / "frames").glob("*.parquet"))

    def frame(self, name: str) -> pd.DataFrame:
        """Reads `frames/<name>.parquet` with pandas' nullable dtypes; raises DtprobeError where it is absent or damaged."""
        import pandas as pd
        import pyarrow as pa

        path = self.path / "frames" / f"{name}.parquet"
        try:
            return pd.read_parquet(path, dtype_backend="numpy_nullable")
        except (OSError, pa.ArrowException) as error:
            raise DtprobeError(f"{path}: cannot be read: {error}") from error

    def write_verdict(self, verdict: Mapping[str, Any]) -> Path:
        """Writes `verdict.json`, atomically."""
        write_json(self.path / "verdict.json", verdict)
        return self.path / "verdict.json"

    def verdict(self) -> dict[str, Any] | None:
        """What `verdict.json` holds, None before there is one; raises DtprobeError where it is damaged."""
        path = self.path / "verdict.json"
        return read_json(path) if path.exists() else None

    def end(self, state: str, ended_ns: int) -> None:
        """Marks the run `finished` or `interrupted`; the last write to it, after which `running` is False."""
        self.update(state=state, ended_ns=ended_ns)
        self.close()

    def close(self) -> None:
        """Lets go of the folder without a word in it: what is unfinished stays so."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def _lock_of(folder: Path) -> int | None:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # NFS locks no folders: such a run cannot be seen to be running, and is otherwise the same
        os.close(handle)
        return None
    return handle


def sweep(parent: Path, now_ns: int) -> None:
    """Removes what makers killed between `mkdir` and `rename` left; an hour old, so that no live maker is met."""
    for folder in parent.glob(f"{HALF_MADE}*"):
        try:
            stale = now_ns - folder.stat().st_mtime_ns > _STALE_NS
        except FileNotFoundError:
            continue
        if stale:
            shutil.rmtree(folder, ignore_errors=True)
