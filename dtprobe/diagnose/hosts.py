"""Hosts whose clocks the run itself compared (`hosts.json`): whose artifact is whose, and what is added to its stamps.

What was measured goes before what can be guessed from the lines (`clock.one_clock`): every line, observation and recorded call of such a
rank stands on the clock of the machine that started the run, from the first moment on at which it is read.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePosixPath

from dtprobe.diagnose.case import Artifact, First
from dtprobe.readers.artifact import Problem, Problems, ReaderError
from dtprobe.readers.hosts import FILE, Host, Hosts, read_hosts

WORTH_SAYING_NS = 100_000_000
"""A clock that was off by less changes no order that people see in logs."""


@dataclass(frozen=True)
class Measured:
    """The hosts of each arm run by the folder that `hosts.json` lies in."""

    by_folder: tuple[tuple[PurePosixPath, Hosts], ...] = ()

    def of(self, artifact: Artifact) -> Host | None:
        """The host on which an artifact's rank ran; None for an artifact of no rank, or outside these runs."""
        if artifact.rank is None:
            return None
        path = PurePosixPath(artifact.name)
        inside = [(folder, hosts) for folder, hosts in self.by_folder if path.is_relative_to(folder)]
        nearest = max(inside, key=lambda one: len(one[0].parts), default=None)
        return nearest[1].of_rank(artifact.rank) if nearest else None

    def placed(self, artifacts: Sequence[Artifact]) -> tuple[Artifact, ...]:
        """The artifacts with their hosts, so far as they are known here."""
        found = []
        for one in artifacts:
            host = self.of(one)
            found.append(one if host is None else replace(one, host=one.host or host.name, measured=host))
        return tuple(found)

    def missing(self) -> Iterator[str]:
        """Nodes that vanished in mid-run, with their ranks, and clocks that were wrong, in words."""
        for _, hosts in self.by_folder:
            for host in hosts.hosts:
                ranks = f"rank{'s' * (len(host.ranks) != 1)} {', '.join(map(str, host.ranks))}"
                if host.lost:
                    yield f"{ranks}: {host.name} was lost in mid-run: {host.lost}"
                if abs(host.offset_ns) >= WORTH_SAYING_NS:
                    way = "ahead" if host.offset_ns < 0 else "behind"
                    yield (
                        f"{ranks}: the clock of {host.name} was {abs(host.offset_ns) / 1e9:.3f} s {way} of {hosts.reference}'s, within "
                        f"{host.uncertainty_ns / 1e9:.6f} s as measured: its stamps are corrected by that here, in its artifacts they are not"
                    )
                if host.stepped:
                    yield f"{ranks}: the clock of {host.name} was set in mid-run: its stamps are uncertain by the whole step"


def home(artifacts: Sequence[Artifact], rank: First) -> str | None:
    """The host on which a rank ran, as the run itself tells it; None where it does not, or where several runs differ."""
    names = {one.measured.name for one in artifacts if one.measured is not None and one.rank == rank}
    return names.pop() if len(names) == 1 else None


def measured(artifacts: Sequence[Artifact], problems: Problems) -> Measured:
    """What the `hosts.json` among the artifacts tell; one that cannot be read is a problem."""
    found = []
    for one in artifacts:
        path = PurePosixPath(one.name)
        if path.name != FILE:
            continue
        try:
            found.append((path.parent, read_hosts(one.path)))
        except ReaderError as error:
            problems.append(Problem(one.name, "unreadable", error.message.replace(str(one.path), one.name)))
    return Measured(tuple(found))
