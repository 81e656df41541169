"""The hosts of an arm run and how far their clocks are off: `hosts.json`, and frames put on the clock of one of them.

`{"schema": "dtprobe.hosts/1", "reference": host, "hosts": {name: {"node", "ranks", "address", "offset_ns", "uncertainty_ns",
"before", "after", "lost", "lost_ns"}}}`. An offset is what is added to a host's own stamps to put them on the reference's clock.
`before` and `after` are readings `{"t_ns", "offset_ns", "uncertainty_ns"}` at both ends of the run, `t_ns` by the host's clock; a host that
vanished has its last one as `after`. Raw artifacts keep the host's own stamps.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dtprobe.readers.artifact import ReaderError, as_int, as_text, load_json, read_bytes

if TYPE_CHECKING:
    import pandas as pd

SCHEMA = "dtprobe.hosts/1"
FILE = "hosts.json"
STAMPS = ("t_ns", "t_started_ns", "t_completed_ns", "start_ns", "end_ns")
"""Columns of frames that hold moments by the clock of the row's host."""

FASTEST_DRIFT = 1e-3
"""A clock that moved by more than this share of the time between two readings was stepped: NTP slews by 500 ppm at most (adjtimex(2))."""

_LARGEST = 4 << 20


@dataclass(frozen=True, kw_only=True)
class Reading:
    """How far a host's clock was off at `t_ns`, by its own clock."""

    t_ns: int
    offset_ns: int
    uncertainty_ns: int


@dataclass(frozen=True, kw_only=True)
class Host:
    """One host of an arm run. `lost` says why it was given up in mid-run, at `lost_ns` by the reference's clock; empty where it was not."""

    name: str
    node: int
    ranks: tuple[int, ...]
    address: str
    before: Reading
    after: Reading | None = None
    lost: str = ""
    lost_ns: int | None = None

    @property
    def stepped(self) -> bool:
        """Whether the clock was set in mid-run: it moved further than both readings' doubt and any drift allow."""
        if self.after is None:
            return False
        return self._moved_ns > self._doubt_ns + FASTEST_DRIFT * abs(self.after.t_ns - self.before.t_ns)

    @property
    def offset_ns(self) -> int:
        """The offset of the whole run: of the reading that is surer. A clock that drifts has another one at each moment (`corrected`)."""
        return self._surer.offset_ns

    @property
    def uncertainty_ns(self) -> int:
        """How far a corrected stamp may be off; of a clock that was stepped, by the whole step."""
        if self.after is None:
            return self.before.uncertainty_ns
        if self.stepped:
            return self._moved_ns + self._doubt_ns
        return max(self.before.uncertainty_ns, self.after.uncertainty_ns) if self._drifts else self._surer.uncertainty_ns

    def offset_at(self, t_ns: int) -> int:
        """What is added to a stamp of this host: one number, or, where the clock drifted by more than its readings' doubt, between them."""
        if self.after is None or not self._drifts or self.stepped:
            return self.offset_ns
        span = self.after.t_ns - self.before.t_ns
        share = min(1.0, max(0.0, (t_ns - self.before.t_ns) / span)) if span > 0 else 0.0
        return self.before.offset_ns + round(share * (self.after.offset_ns - self.before.offset_ns))

    def as_json(self) -> dict[str, Any]:
        """As it stands in `hosts.json` and `run.json`."""
        return {
            "node": self.node,
            "ranks": list(self.ranks),
            "address": self.address,
            "offset_ns": self.offset_ns,
            "uncertainty_ns": self.uncertainty_ns,
            "stepped": self.stepped,
            "before": asdict(self.before),
            "after": asdict(self.after) if self.after else None,
            "lost": self.lost or None,
            "lost_ns": self.lost_ns,
        }

    @property
    def _surer(self) -> Reading:
        if self.after is None or self.stepped or self.before.uncertainty_ns <= self.after.uncertainty_ns:
            return self.before
        return self.after

    @property
    def _moved_ns(self) -> int:
        return abs(self.after.offset_ns - self.before.offset_ns) if self.after else 0

    @property
    def _doubt_ns(self) -> int:
        return self.before.uncertainty_ns + (self.after.uncertainty_ns if self.after else 0)

    @property
    def _drifts(self) -> bool:
        return self._moved_ns > self._doubt_ns


@dataclass(frozen=True, kw_only=True)
class Hosts:
    """The hosts of one arm run. `reference` is the host whose clock all stamps are put on: the one that started the run."""

    reference: str
    hosts: tuple[Host, ...]

    def of_rank(self, rank: int) -> Host | None:
        """The host of a rank; None for one that none of them has."""
        return next((host for host in self.hosts if rank in host.ranks), None)

    def as_json(self) -> dict[str, Any]:
        return {"schema": SCHEMA, "reference": self.reference, "hosts": {host.name: host.as_json() for host in self.hosts}}

    def write(self, folder: Path) -> None:
        """Write `hosts.json` at one stroke."""
        temporary = folder / f".{FILE}"
        temporary.write_text(json.dumps(self.as_json(), indent=1), encoding="utf-8")
        temporary.replace(folder / FILE)


def read_hosts(path: Path) -> Hosts:
    """A `hosts.json`. Raises ReaderError for a file that is none."""
    try:
        said = load_json(read_bytes(path, _LARGEST))
        if said["schema"] != SCHEMA:
            raise ReaderError(
                f"{path}: schema {said['schema']!r}, this version reads {SCHEMA!r}", "read it with its own version"
            )
        hosts = tuple(_host(name, one) for name, one in said["hosts"].items())
        return Hosts(reference=str(said["reference"]), hosts=hosts)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ReaderError(
            f"{path} is no {FILE} of a run: {type(error).__name__}: {error}", "give the folder of an arm run"
        ) from error


def _host(name: str, said: Mapping[str, Any]) -> Host:
    after = said.get("after")
    return Host(
        name=name,
        node=int(said["node"]),
        ranks=tuple(int(rank) for rank in said["ranks"]),
        address=as_text(said.get("address")) or "",
        before=_reading(said["before"]),
        after=_reading(after) if after is not None else None,
        lost=as_text(said.get("lost")) or "",
        lost_ns=as_int(said.get("lost_ns")),
    )


def _reading(said: Mapping[str, Any]) -> Reading:
    numbers = {name: as_int(said[name]) for name in ("t_ns", "offset_ns", "uncertainty_ns")}
    if None in numbers.values():
        raise ValueError(f"no reading of a clock: {dict(said)}")
    return Reading(**numbers)  # type: ignore[arg-type]


def on_one_clock(frames: Mapping[str, pd.DataFrame], hosts: Hosts) -> dict[str, pd.DataFrame]:
    """The frames with each rank's stamps put on the reference's clock, and `host` filled in where it is null.

    Rows without a rank are left alone. What was added is in `hosts`, so the raw stamp is known; the artifacts keep it.
    """
    return {name: _corrected(frame, hosts) for name, frame in frames.items()}


def _corrected(frame: pd.DataFrame, hosts: Hosts) -> pd.DataFrame:
    import pandas as pd  # a postmortem reads hosts and makes no frame

    if not len(frame):
        return frame
    found = frame.copy()
    for host in hosts.hosts:
        own = found["rank"].isin(host.ranks).fillna(False).astype(bool)
        if not own.any():
            continue
        found.loc[own & found["host"].isna(), "host"] = host.name
        for column in STAMPS:
            if column not in found:
                continue
            stamped = own & found[column].notna()
            stamps = found.loc[stamped, column]
            if host.after is not None and host.offset_at(host.before.t_ns) != host.offset_at(host.after.t_ns):
                added = pd.array([host.offset_at(int(one)) for one in stamps], dtype="Int64")
                found.loc[stamped, column] = stamps + added
            else:
                found.loc[stamped, column] = stamps + host.offset_ns
    return found
