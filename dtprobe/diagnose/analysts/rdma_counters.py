"""Hardware counters of RDMA ports (`/sys/class/infiniband/*/ports/*/hw_counters/*`), read before and after: what rose between.

Requests out of sequence are packets that a queue on the way dropped, and sent again; retries that run out are a peer or a link that is gone.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import PurePosixPath

from dtprobe.diagnose.case import Case, Finding, Line, quote

ANALYST = "rdma counters"
CONTENDED, LOST, GONE = 0.7, 0.6, 0.6
FEWEST = 10
"""So many packets out of sequence are more than a stray loss."""
_COUNTER = re.compile(r"/infiniband/(?P<port>\w+/ports/\d+)/hw_counters/(?P<name>\w+):\s*(?P<value>\d{1,18})$")
_DROPPED = ("out_of_seq_request", "out_of_sequence", "packet_seq_err")
_EXCEEDED = ("retry_exceeded_err", "req_transport_retries_exceeded", "local_ack_timeout_err")
_OTHER_FLOW = re.compile(r'"(?:sum_received|sum_sent|tcp_mss_default)"')


def analyse(case: Case) -> Iterator[Finding]:
    """At most one finding; the folder in which most packets were dropped shows it."""
    gains = [(folder, gained) for folder, gained in _gains(case).items() if gained]
    dropped = max(gains, key=lambda one: _sum(one[1], _DROPPED), default=None)
    if dropped is not None and _sum(dropped[1], _DROPPED) >= FEWEST:
        folder, gained = dropped
        beside = next((line for line in case.lines if _folder(line) == folder and _OTHER_FLOW.search(line.text)), None)
        lines = [line for (_port, name), (_count, line) in gained.items() if name in _DROPPED]
        yield Finding(
            mode="rdma-contention" if beside is not None else "packet-loss",
            analyst=ANALYST,
            likelihood=CONTENDED if beside is not None else LOST,
            because=f"{_sum(gained, _DROPPED)} RDMA requests came out of sequence, for packets before them were dropped on the way"
            + (", while another flow used the link" if beside is not None else ""),
            first="all",
            evidence=(
                *(quote(line, "cause") for line in lines[:3]),
                *((quote(beside, "confirm"),) if beside is not None else ()),
            ),
            not_proven="in which queue they were dropped: counters of the switch's port tell",
        )
        return
    exceeded = max(gains, key=lambda one: _sum(one[1], _EXCEEDED), default=None)
    if exceeded is not None and _sum(exceeded[1], _EXCEEDED):
        lines = [line for (_port, name), (_count, line) in exceeded[1].items() if name in _EXCEEDED]
        yield Finding(
            mode="rank-lost",
            analyst=ANALYST,
            likelihood=GONE,
            because=f"{_sum(exceeded[1], _EXCEEDED)} times the retries of an RDMA request ran out, and nothing came out of sequence: nobody answered",
            evidence=tuple(quote(line, "cause") for line in lines[:3]),
            not_proven="whether the peer is gone or the link to it",
        )


Gained = Mapping[tuple[str, str], tuple[int, Line]]


def _gains(case: Case) -> Mapping[str, Gained]:
    """By folder, what each counter rose by from the earlier reading to the later; counters only rise, so the sums tell which is which."""
    readings: dict[str, dict[str, dict[tuple[str, str], tuple[int, Line]]]] = {}
    for line in case.lines:
        if "/hw_counters/" in line.text and (found := _COUNTER.search(line.text)):
            of_file = readings.setdefault(_folder(line), {}).setdefault(line.artifact.name, {})
            of_file[found["port"], found["name"]] = int(found["value"]), line
    gained: dict[str, Gained] = {}
    for folder, files in readings.items():
        if len(files) == 2:
            before, after = sorted(files.values(), key=lambda one: sum(value for value, _ in one.values()))
            rose = {key: (value - before.get(key, (0, line))[0], line) for key, (value, line) in after.items()}
            gained[folder] = {key: one for key, one in rose.items() if one[0] > 0}
    return gained


def _folder(line: Line) -> str:
    return str(PurePosixPath(line.artifact.name).parent)


def _sum(gained: Gained, names: tuple[str, ...]) -> int:
    return sum(count for (_port, name), (count, _line) in gained.items() if name in names)
