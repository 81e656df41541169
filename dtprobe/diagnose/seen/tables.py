"""Rows of `ps`, `top` and the like in a transcript: which state each process was in, what it used, where it slept in the kernel."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from dtprobe.diagnose.case import Line
from dtprobe.diagnose.seen.places import Places

_ASKED = re.compile(r"\bps\b.*?\s-?\w*o[ =]?(?P<columns>[a-z%]+(?::\d+)?(?:,[a-z%]+(?::\d+)?)+)")
_NAMES = {
    "STAT": "state",
    "S": "state",
    "STATE": "state",
    "PID": "pid",
    "%CPU": "cpu",
    "PCPU": "cpu",
    "CPU%": "cpu",
    "WCHAN": "wchan",
    "CMD": "command",
    "COMMAND": "command",
    "ARGS": "command",
    "COMM": "command",
    "Command": "command",
}
ONE_HOST = 16
"""A host has no more ranks than this."""
_STATE = re.compile(r"^[RSDTtZXIPW][<NLsl+]*$")
_SLEEPS = re.compile(
    r"^\s*(?:\S+\s+)?(?P<pid>\d{2,8})\s+(?:.*?\s)?(?P<state>[Tt][<NLsl+]*)\s+(?P<wchan>do_signal_stop|ptrace_stop|get_signal)\b"
)
_RANK = re.compile(r"(?<![\w-])(?:--)?(?P<local>local[-_])?rank[= ](?P<rank>\d{1,5})\b", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A process at one moment. `state` is the kernel's letter, `cpu` its share of a core in percent."""

    pid: int
    rank: int | None
    state: str | None
    cpu: float | None
    wchan: str | None
    command: str
    line: Line


def rows(lines: Sequence[Line], places: Places) -> Iterator[Row]:
    """The rows of all tables in these lines of one artifact. A head, or the columns asked for, tells what stands where."""
    columns: list[str] = []
    for line in lines:
        text = line.text
        if "ps " in text and (asked := _ASKED.search(text)):
            columns = [_NAMES.get(one.partition(":")[0].upper(), "") for one in asked["columns"].split(",")]
            continue
        if "PID" in text:
            head = [_NAMES.get(one, "") for one in text.split()]
            if "pid" in head and {"state", "cpu", "wchan"} & set(head):
                columns = head
                continue
        found = _row(line, text.split(), columns, places) if columns else None
        if found is None and ("_stop" in text or "get_signal" in text) and (alone := _SLEEPS.match(text)):
            pid = int(alone["pid"])
            found = Row(
                pid=pid,
                rank=_rank(line, pid, text, places),
                state=alone["state"][0],
                cpu=None,
                wchan=alone["wchan"],
                command=text.strip(),
                line=line,
            )
        if found is not None:
            yield found


def _row(line: Line, words: Sequence[str], columns: Sequence[str], places: Places) -> Row | None:
    if len(words) < len(columns) or "pid" not in columns:
        return None
    values = dict(zip(columns, words, strict=False))
    pid, state, cpu = values["pid"], values.get("state"), values.get("cpu")
    if not pid.isdigit() or (state is not None and not _STATE.match(state)):
        return None
    command = " ".join(words[len(columns) - 1 :])
    return Row(
        pid=int(pid),
        rank=_rank(line, int(pid), command, places),
        state=state[0] if state else None,
        cpu=float(cpu) if cpu and re.fullmatch(r"\d+(?:\.\d+)?", cpu) else None,
        wchan=values.get("wchan"),
        command=command,
        line=line,
    )


def _rank(line: Line, pid: int, command: str, places: Places) -> int | None:
    """By the process's number, else by what its command line says."""
    known = places.rank(pid, line.host)
    return told_rank(command, line.host, places) if known is None else known


def told_rank(command: str, host: str | None, places: Places) -> int | None:
    """The rank that a command line gives; a local rank only where nothing tells of a second host."""
    told = _RANK.search(command)
    if told is None:
        return None
    rank = int(told["rank"])
    if not told["local"]:
        return rank
    who = places.who
    seat = who.at_local(rank, host)
    if seat is not None:
        return seat.rank
    few = len({one.host for one in who.seats if one.host}) <= 1 and (places.world_size or max(who.seen, default=0)) <= ONE_HOST
    return rank if few else None
