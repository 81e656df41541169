"""Answers of NCCL's RAS subsystem, text (`ncclras`, `VERBOSE STATUS`) or JSON (`SET FORMAT json`), one after another in a file.

RAS counts the calls of each kind of collective per communicator: it does not see send and receive, nor roots, and a communicator that no
collective was called on yet does not exist for it. One answer cannot tell a slow rank from one that hangs.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from dtprobe.readers.artifact import as_int, as_text
from dtprobe.readers.threads import Numbered


@dataclass(slots=True, kw_only=True)
class Peer:
    """A rank of a communicator as RAS sees it. `counts` are its calls by kind; `problem` is why there are none: unresponsive, dead or
    gone (its process answers, and knows nothing of the communicator)."""

    rank: int
    host: str | None = None
    pid: int | None = None
    gpu: int | None = None
    counts: dict[str, int] = field(default_factory=dict)
    problem: str | None = None
    init_state: int = 0
    async_error: int = 0
    aborted: bool = False
    line: int | None = None


@dataclass(slots=True, kw_only=True)
class Communicator:
    """`id` is as in NCCL's log (`commId`). `size` is None in the text form, which names only what is odd; `many` are the counts of the
    ranks that it does not list, by kind."""

    id: str
    size: int | None = None
    peers: dict[int, Peer] = field(default_factory=dict)
    many: dict[str, dict[int, int]] = field(default_factory=dict)

    def peer(self, rank: int) -> Peer:
        return self.peers.setdefault(rank, Peer(rank=rank))


@dataclass(slots=True, kw_only=True)
class Report:
    """One answer. `errors` are the words of the summary (OK, MISMATCH, INCOMPLETE, ...); `lost` the processes that RAS misses."""

    form: str
    version: str | None = None
    time: str | None = None
    communicators: list[Communicator] = field(default_factory=list)
    errors: set[str] = field(default_factory=set)
    lost: list[Peer] = field(default_factory=list)
    line: int = 1


_TEXT = re.compile(r"^NCCL version (?P<version>\S+) compiled with CUDA")
_GROUP = re.compile(r"^\s+\d+\s+\d+\s+\d+\s+[\d-]+\s+\d+\s+\d+\s+(?P<status>[A-Z]+)\s+(?P<errors>[A-Z,]+)\s*$")
_ABOUT = re.compile(r"^#\d+-\d+ \((?P<id>[0-9a-f]+)\) (?P<what>INCOMPLETE|MISMATCH|ERROR)")
_KIND = re.compile(r"^  Communicator ranks have different (?P<kind>\w+)(?: operation counts)?")
_RANKS = re.compile(
    r"^  (?P<ranks>\d+) ranks have (?:launched up to operation (?P<count>\d+)|(?P<none>not launched any operations)|status (?P<status>\w+))"
)
_RANK = re.compile(
    r"^  Rank (?P<rank>\d+)(?: has (?:launched up to operation (?P<count>\d+)|(?P<none>not launched any operations)|status (?P<status>\w+)|error (?P<error>.*?)))?"
    r" -- (?:GPU (?P<gpu>\d+)\S*(?: \(.*?\))? managed by process (?P<pid>\d+) on node (?P<host>\S+)|\[process information not found\])"
)
_PROCESS = re.compile(r"^  Process (?P<pid>\d+) on node (?P<host>\S+) managing GPU")
_KINDS = ("Broadcast", "Reduce", "AllGather", "ReduceScatter", "AllReduce")


def is_text(text: str) -> bool:
    """Whether a line begins an answer in the text form."""
    return _TEXT.match(text) is not None


def from_text(lines: Numbered) -> Iterator[Report]:
    """The answers among these lines."""
    report: Report | None = None
    about: Communicator | None = None
    what = kind = ""
    count: int | None = None
    for number, line in lines:
        if head := _TEXT.match(line):
            if report is not None:
                yield report
            report, about, what, kind, count = Report(form="text", version=head["version"], line=number), None, "", "", None
        elif report is None:
            continue
        elif group := _GROUP.match(line):
            report.errors |= set(group["errors"].split(","))
        elif head := _ABOUT.match(line):
            about = next((one for one in report.communicators if one.id == head["id"]), None)
            if about is None:
                about = Communicator(id=head["id"])
                report.communicators.append(about)
            what, kind, count = head["what"], "", None
        elif line in ("INCOMPLETE", "DEAD", "TIMEOUT"):
            about, what = None, line
        elif about is None:
            if (process := _PROCESS.match(line)) and what in ("INCOMPLETE", "DEAD"):
                problem = "dead" if what == "DEAD" else "unresponsive"
                report.lost.append(Peer(rank=-1, pid=int(process["pid"]), host=process["host"], problem=problem, line=number))
        elif head := _KIND.match(line):
            kind, count = head["kind"], None
        elif some := _RANKS.match(line):
            count = 0 if some["none"] else int(some["count"]) if some["count"] else None
            if count is not None:
                about.many.setdefault(kind, {})[count] = int(some["ranks"])
        elif one := _RANK.match(line):
            _listed(about.peer(int(one["rank"])), one, what, kind, count, number)
    if report is not None:
        yield report


def _listed(peer: Peer, match: re.Match[str], what: str, kind: str, count: int | None, number: int) -> None:
    peer.line = peer.line or number
    peer.pid = int(match["pid"]) if match["pid"] else peer.pid
    peer.host, peer.gpu = match["host"] or peer.host, int(match["gpu"]) if match["gpu"] else peer.gpu
    if what == "INCOMPLETE":
        peer.problem = "unresponsive"
    elif match["status"]:
        peer.problem = "gone" if match["status"] == "NOCOMM" else peer.problem
        peer.aborted = match["status"] == "ABORT"
    elif what == "MISMATCH" and kind and kind != "status":
        own = 0 if match["none"] else int(match["count"]) if match["count"] else count
        if own is not None:
            peer.counts[kind] = own


_COMMA = re.compile(r'(?<=[\d"el}\]])(\s*\n\s*)(?="[a-z_]+":)')
"""NCCL 2.28 leaves out the comma before a missing rank's "status"."""


def from_json(text: str) -> Iterator[Report]:
    """The answers in a text that holds JSON objects, also between other lines (the protocol's `OK`)."""
    decoder = json.JSONDecoder()
    at = 0
    while (at := text.find("{", at)) >= 0:
        value, end = _decoded(decoder, text, at)
        if isinstance(value, dict) and isinstance(value.get("communicators"), list):
            yield _report(value, text.count("\n", 0, at) + 1)
        at = end


def _decoded(decoder: json.JSONDecoder, text: str, at: int) -> tuple[Any, int]:
    try:
        return decoder.raw_decode(text, at)
    except (ValueError, RecursionError):
        pass
    end = re.compile(r"^\}", re.MULTILINE).search(text, at)
    stop = end.end() if end else len(text)
    try:
        return json.loads(_COMMA.sub(r",\1", text[at:stop])), stop
    except (ValueError, RecursionError):
        return None, at + 1


def _report(value: Mapping[str, Any], line: int) -> Report:
    report = Report(form="json", version=as_text(value.get("nccl_version")), time=as_text(value.get("timestamp")), line=line)
    for entry in value["communicators"]:
        if not isinstance(entry, dict):
            continue
        made = Communicator(id=(as_text(entry.get("hash")) or "?").removeprefix("0x"), size=as_int(entry.get("size")))
        for one in _dicts(entry.get("ranks")):
            rank = as_int(one.get("rank"))
            if rank is None:
                continue
            peer = _peer(made, rank, one)
            counts = one.get("collective_counts")
            peer.counts = {
                kind: number
                for kind, value in (counts.items() if isinstance(counts, dict) else ())
                if (number := as_int(value)) is not None
            }
            status = _dict(one.get("status"))
            peer.init_state, peer.async_error = as_int(status.get("init_state")) or 0, as_int(status.get("async_error")) or 0
            peer.aborted = status.get("abort_flag") is True
        for one in _dicts(entry.get("missing_ranks")):
            rank = as_int(one.get("rank"))
            if rank is None:
                continue
            status = _dict(one.get("status"))
            peer = _peer(made, rank, one)
            peer.problem = "dead" if status.get("considered_dead") is True else "unresponsive"
            if status and status.get("unresponsive") is False and status.get("considered_dead") is False:
                peer.problem = "gone"
        kinds = {kind for peer in made.peers.values() for kind in peer.counts}
        if any(len({peer.counts.get(kind, 0) for peer in made.peers.values() if peer.counts}) > 1 for kind in kinds):
            report.errors.add("MISMATCH")
        if any(peer.problem for peer in made.peers.values()):
            report.errors.add("INCOMPLETE")
        report.communicators.append(made)
    return report


def _peer(made: Communicator, rank: int, entry: Mapping[str, Any]) -> Peer:
    peer = made.peer(rank)
    peer.host, peer.pid, peer.gpu = as_text(entry.get("host")), as_int(entry.get("pid")), as_int(entry.get("cuda_dev"))
    return peer


def _dicts(value: Any) -> list[dict[str, Any]]:
    return [one for one in value if isinstance(one, dict)] if isinstance(value, list) else []


def _dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}
