"""RAS's answers, each with its artifact."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from dtprobe.diagnose.case import Artifact, Line, Quote, Role
from dtprobe.diagnose.seen.places import Places
from dtprobe.readers import ras
from dtprobe.readers.artifact import Problems, read_text
from dtprobe.readers.ras import Peer, Report

MOST_BYTES = 32 << 20


@dataclass(frozen=True, kw_only=True)
class Answer:
    """One answer. `ranks` gives the job's rank of a rank in a communicator, by the communicator's id."""

    report: Report
    artifact: Artifact
    ranks: Mapping[tuple[str, int], int]

    def quote(self, peer: Peer, text: str, role: Role) -> Quote:
        """What it says of a rank."""
        return Quote(file=self.artifact.name, line=peer.line or self.report.line, text=text, role=role)


def take(artifacts: Sequence[Artifact], lines: Mapping[str, Sequence[Line]], problems: Problems) -> list[Answer]:
    """All answers, in the order of the artifacts; the text and the JSON form of one moment are two."""
    found: list[Answer] = []
    for one in artifacts:
        own = lines.get(one.name, ())
        reports: list[Report] = []
        if any(ras.is_text(line.text) for line in own):
            reports += ras.from_text((line.number, line.text) for line in own)
        if any('"communicators"' in line.text for line in own) or one.kind == "ras":
            reports += ras.from_json(read_text(one.path, MOST_BYTES, problems))
        found += [Answer(report=report, artifact=one, ranks={}) for report in reports]
    return found


def placed(answer: Answer, places: Places) -> Answer:
    """The same with the job's ranks. A communicator as large as the job has the job's ranks."""
    ranks: dict[tuple[str, int], int] = {}
    for comm in answer.report.communicators:
        for rank, peer in comm.peers.items():
            known = places.rank(peer.pid, peer.host)
            if known is None and (comm.size is None or comm.size == places.world_size):
                known = rank
            if known is not None:
                ranks[comm.id, rank] = known
    return replace(answer, ranks=ranks)
