"""Lines of NCCL's own log: communicators being made, the calls on them (`NCCL_DEBUG_SUBSYS=COLL`), warnings, and where an error came up.

The wordings are those of NCCL 2.10 to 2.30 (its `init.cc`, `collectives.cc`, `enqueue.cc`, `debug.cc`).
"""

from __future__ import annotations

import re
from dataclasses import dataclass

DATATYPES = (
    "int8",
    "uint8",
    "int32",
    "uint32",
    "int64",
    "uint64",
    "float16",
    "float32",
    "float64",
    "bfloat16",
    "float8_e4m3",
    "float8_e5m2",
)
REDUCTIONS = ("sum", "prod", "max", "min", "avg")
ROOTED = frozenset({"Broadcast", "Bcast", "Reduce", "Gather", "Scatter"})
REDUCING = frozenset({"AllReduce", "Reduce", "ReduceScatter"})
P2P = frozenset({"Send", "Recv"})

_LINE = re.compile(
    r"(?P<host>[\w.-]+):(?P<pid>\d{1,9}):(?P<tid>\d{1,9}) (?:\[(?P<device>-?\d+)\] )?(?P<where>\S+:\d+ )?(?:\S+ )?NCCL (?P<level>INFO|WARN|TRACE|ERROR|VERSION) (?P<text>.*)$"
)
_INIT = re.compile(
    r"comm (?P<comm>0x[0-9a-f]+) rank (?P<rank>\d+) n[rR]anks (?P<nranks>\d+) cudaDev (?P<device>-?\d+)"
    r"(?: nvmlDev -?\d+)?(?: busId (?P<bus>[0-9a-f]+))?(?P<more>.*?)\s*-\s*(?P<phase>Init START|Init COMPLETE|Abort START|Abort COMPLETE|Destroy START|Destroy COMPLETE|Finalize START|Finalize COMPLETE)"
)
_COMM_ID = re.compile(r"commId (0x[0-9a-f]+)")
_PARENT = re.compile(r"parent (0x[0-9a-f]+)")
_CALL = re.compile(r"^(?P<name>[A-Z]\w+): opCount (?P<op_count>(?:0x)?[0-9a-f]+) (?P<rest>.*)$")
_FIELD = re.compile(r"\b(count|datatype|op|root|peer|comm) (-?(?:0x)?[0-9a-f]+|-?\d+)\b")
_NRANKS = re.compile(r"\[nranks=(\d+)\]")
_VERSION = re.compile(r"^NCCL version (?P<version>\d[\w.]*)")
_RETRY = re.compile(
    r"[Cc]onnect to (?P<address>\S+?)(?:<(?P<port>\d+)>)? (?:returned|failed)[ :]*(?P<why>.*?)(?:, retrying \((?P<tries>\d+)/|$)"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class NcclLine:
    """A line of NCCL's log. `where` is the file and line of NCCL that a warning names, `device` the GPU as the process counts them."""

    host: str
    pid: int
    tid: int
    level: str
    text: str
    where: str | None = None
    device: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Making:
    """A communicator begins or ends a `phase` of its life on one rank. `comm` is the address in that process, `comm_id` the same on all ranks.

    `rank` is the rank in the communicator. `bus` is the GPU's PCI id in NCCL's short notation.
    """

    phase: str
    comm: str
    rank: int
    nranks: int
    device: int
    bus: str | None
    comm_id: str | None
    parent: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A collective or point-to-point call as the program handed it to NCCL. `count` is in elements, `root` the peer of send and receive."""

    name: str
    op_count: int
    count: int
    datatype: int
    op: int
    root: int
    comm: str
    nranks: int

    def __str__(self) -> str:
        words = [self.name, f"count {self.count}", f"of {word(self.datatype, DATATYPES)}"]
        if self.name in REDUCING:
            words.append(word(self.op, REDUCTIONS))
        if self.name in ROOTED:
            words.append(f"root {self.root}")
        if self.name in P2P:
            words.append(f"peer {self.root}")
        return " ".join(words)


def word(number: int, words: tuple[str, ...]) -> str:
    """The name of a datatype or reduction; its number where it has none here (own reductions of a communicator)."""
    return words[number] if number < len(words) else f"#{number}"


def split(text: str) -> NcclLine | None:
    """A line as NCCL's, None if it is not."""
    if "NCCL " not in text:
        return None
    match = _LINE.search(text)
    if match is None:
        return None
    return NcclLine(
        host=match["host"],
        pid=int(match["pid"]),
        tid=int(match["tid"]),
        level=match["level"],
        text=match["text"],
        where=match["where"].strip() if match["where"] else None,
        device=int(match["device"]) if match["device"] else None,
    )


def making(text: str) -> Making | None:
    """What a line says of a communicator's life."""
    if " - " not in text and "- Init" not in text:
        return None
    match = _INIT.search(text)
    if match is None:
        return None
    comm_id, parent = _COMM_ID.search(match["more"]), _PARENT.search(match["more"])
    return Making(
        phase=match["phase"],
        comm=match["comm"],
        rank=int(match["rank"]),
        nranks=int(match["nranks"]),
        device=int(match["device"]),
        bus=match["bus"],
        comm_id=comm_id[1] if comm_id else None,
        parent=parent[1] if parent else None,
    )


def call(text: str) -> Call | None:
    """A call that a line tells of."""
    if "opCount" not in text:
        return None
    match = _CALL.match(text)
    if match is None:
        return None
    # releases add fields between the known ones (acc, comm's name): each is found by its word
    fields = {name: value for name, value in reversed(_FIELD.findall(match["rest"]))}
    nranks = _NRANKS.search(match["rest"])
    peer = fields.get("root", fields.get("peer"))
    try:
        return Call(
            name=match["name"],
            op_count=int(match["op_count"], 16),
            count=int(fields["count"]),
            datatype=int(fields["datatype"]),
            op=int(fields.get("op", "0")),
            root=int(peer) if peer is not None else 0,
            comm=fields["comm"],
            nranks=int(nranks[1]) if nranks else 0,
        )
    except (KeyError, ValueError):
        return None


def version(text: str) -> str | None:
    """The version that a line states, without the CUDA version that it was built for: `2.28.9`."""
    match = _VERSION.match(text)
    return match["version"].partition("+")[0] if match else None


def refused(text: str) -> tuple[str, str | None, str] | None:
    """Address, port and reason of a connection that NCCL could not make."""
    match = _RETRY.search(text) if "onnect to " in text else None
    return (match["address"], match["port"], match["why"]) if match else None
