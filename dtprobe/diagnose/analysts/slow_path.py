"""A collective that works over a slower path than the machine has: what NCCL took, what stands there unused, and what it reached."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from dtprobe.diagnose.case import Case, Finding, Line, quote
from dtprobe.diagnose.facts.raised import raised
from dtprobe.diagnose.facts.timeouts import waits

ANALYST = "slow path"
SLOW, ONLY, UNSEEN = 0.84, 0.4, 0.66
PART = 0.3
"""Less than this part of the port's rate is slow."""
USUAL_GBPS = 5.0
_SOCKET = re.compile(r"NCCL INFO .*(?:Using network Socket\b|via NET/Socket/)|NCCL INFO NET/IB : No device found")
_SHARED = re.compile(r"NCCL INFO .*\bvia SHM/")
_FABRIC = re.compile(
    r"^\s*State:\s*Active\s*$|\bstate ACTIVE physical_state LINK_?UP\b|Link layer:\s*InfiniBand|\blink_layer:\s*InfiniBand|\bPORT_ACTIVE\b|Infiniband controller: |\bport \d+ ==> \S+ \(Up\)"
)
_NVLINK = re.compile(r"\bLink \d+: \d+(?:\.\d+)? GB/s|^GPU\d+\s.*\bNV\d+\b")
_DOWNGRADED = re.compile(r"LnkSta:\s.*\(downgraded\)")
_RATE = re.compile(r"^\s*Rate:\s*(?P<rate>\d+)\s*$|\brate:\s*(?P<other>\d+) Gb/sec")
_REACHED = re.compile(
    r"(?i)\b(?:bus|alg)[ _-]?(?:bw|bandwidth)\b\s*[:=]?\s*(?P<value>\d+(?:\.\d+)?)\s*(?:GB/s)?|^\s*\d{6,}\s+\d+\s+\w+\s+\w+\s+-?\d+\s+[\d.]+\s+[\d.]+\s+(?P<busbw>[\d.]+)\s"
)
_COMPARED = re.compile(
    r"(?i)\b\d+(?:\.\d+)?x slower\b|\b(?:slower than|expected|should be|instead of|used to be|before it was|single[- ]node|one node|baseline)\b[^\n]{0,40}\d"
)


def analyse(case: Case) -> Iterator[Finding]:
    """A finding where sockets or shared memory are used beside a fabric or NVLink, surer where a measured rate is low."""
    if waits(case).timeouts or raised(case):
        return
    taken, shared, downgraded = _taken(case)
    if not (taken or shared or downgraded):
        return
    present: list[Line] = []
    links: list[Line] = []
    reached: list[tuple[float, Line]] = []
    compared: list[Line] = []
    rates: list[float] = []
    for line in case.lines:
        text = line.text
        if "NCCL INFO" in line.raw:
            continue
        if _FABRIC.search(text):
            present.append(line)
        elif found := _RATE.search(text):
            rates.append(float(found["rate"] or found["other"]))
        elif found := _REACHED.search(text):
            reached.append((float(found["value"] or found["busbw"]), line))
            if _COMPARED.search(text):
                compared.append(line)
        elif _NVLINK.search(text):
            links.append(line)
        elif _COMPARED.search(text):
            compared.append(line)
    least = PART * max(rates) / 8 if rates else USUAL_GBPS
    low = [line for value, line in reached if 0 < value < least]
    several = len({line.host for line in taken if line.host}) > 1
    unseen = any("No device found" in line.raw for line in taken)
    if taken and present:
        yield _finding("NCCL takes sockets", taken, present, low, compared)
    elif taken and compared and (unseen or (several and low)):
        yield _finding("NCCL takes sockets between hosts", taken, [], low, compared, UNSEEN)
    elif shared and links:
        yield _finding("NCCL takes shared memory", shared, links, low, compared)
    elif downgraded and (low or compared):
        yield _finding("A PCIe link runs below its width or speed", downgraded, [], low, compared)


def _taken(case: Case) -> tuple[list[Line], list[Line], list[Line]]:
    """Lines that tell of sockets, of shared memory and of a PCIe link below its worth: without any of them there is nothing to ask."""
    taken: list[Line] = []
    shared: list[Line] = []
    downgraded: list[Line] = []
    for line in case.lines:
        if "NCCL INFO" in line.raw:
            if _SOCKET.search(line.raw):
                taken.append(line)
            elif _SHARED.search(line.raw):
                shared.append(line)
        elif "LnkSta:" in line.text and _DOWNGRADED.search(line.text):
            downgraded.append(line)
    return taken, shared, downgraded


def _finding(
    what: str,
    taken: Sequence[Line],
    present: Sequence[Line],
    low: Sequence[Line],
    compared: Sequence[Line],
    surely: float = SLOW,
) -> Finding:
    slow = [*low, *compared]
    sockets = [line for line in taken if "Using network" in line.raw] or list(taken)
    unseen = [line for line in taken if "No device found" in line.raw]
    sockets = [*sockets[:1], *unseen[:1], *sockets[1:2]]
    return Finding(
        mode="slow-collective-path",
        analyst=ANALYST,
        likelihood=surely if slow else ONLY,
        because=what
        + (", though a faster link is there" if present else "")
        + (", and what it reaches is far below it." if slow else "."),
        first="all",
        evidence=(
            *(quote(line, "cause") for line in sockets[:3]),
            *(quote(line, "cause") for line in present[:2]),
            *(quote(line, "confirm") for line in slow[:2]),
        ),
        not_proven="why the faster link was not taken" if slow else "that anything is slow",
    )
