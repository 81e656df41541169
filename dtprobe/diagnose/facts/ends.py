"""How each process ended, from whoever reports it: elastic's tables, launchers, shells, schedulers."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from dtprobe.diagnose.case import Case, Event, Line

TABLE_LINES = 6
"""Lines of one entry of elastic's failure table."""
_ONE_CODE = re.compile(r"(?i)(?:rank|worker|proc(?:ess)?|task|local_rank)[ _#-]*(?P<rank>\d+)\s*[=:]\s*(?P<code>-?\d+)")
_BARE_LIST = re.compile(r"-?\d+(?:, ?-?\d+)+")
_SHELL = {
    "Killed": signal.SIGKILL,
    "Segmentation fault": signal.SIGSEGV,
    "Bus error": signal.SIGBUS,
    "Aborted": signal.SIGABRT,
    "Terminated": signal.SIGTERM,
    "Out Of Memory": signal.SIGKILL,
    "Out of Memory": signal.SIGKILL,
    "Floating point exception": signal.SIGFPE,
    "Illegal instruction": signal.SIGILL,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """A process ended. `code` as Python gives it: negative for a signal. `forced`: its launcher killed it, for it did not stop."""

    line: Line
    code: int
    rank: int | None = None
    host: str | None = None
    pid: int | None = None
    local_rank: int | None = None
    source: str = ""
    forced: bool = False
    first_observed: bool = False

    @property
    def signal(self) -> int | None:
        """The signal that ended it, if one did."""
        return -self.code if self.code < 0 else None


@lru_cache(maxsize=2)
def ends(case: Case) -> tuple[End, ...]:
    """Every end that is reported, in the order read; a table's row before a shorter report of the same process."""
    forced = {int(event.fields["pid"]) for event in case.of("elastic-forced")}
    found = list(_table(case, forced))
    pids = {one.pid for one in found if one.pid is not None}
    for event in case.events:
        for one in _single(case, event, forced):
            if one.pid is None or one.pid not in pids:
                found.append(one)
    return tuple(found)


def signed(code: int) -> int:
    """The code with signals negative: a shell's 128 + n is signal n."""
    return -(code - 128) if 128 < code < 160 else code


def _table(case: Case, forced: set[int]) -> Iterator[End]:
    """Rows of elastic's table: rank, exit code and host stand on lines of their own."""
    rank: Event | None = None
    host: Event | None = None
    roots = [event.line for event in case.events if event.signature == "elastic-root-cause"]
    for event in case.of("elastic-table-rank", "elastic-table-code", "elastic-table-host"):
        if event.signature == "elastic-table-host":
            host = event
        elif event.signature == "elastic-table-rank":
            rank = event
        elif rank is not None and _near(rank.line, event.line):
            pid = int(event.fields["pid"])
            named = host if host is not None and _near(host.line, event.line) else None
            yield End(
                line=event.line,
                code=signed(int(event.fields["code"])),
                rank=int(rank.fields["rank"]),
                host=named.fields["host"] if named else None,
                pid=pid,
                local_rank=int(rank.fields["local"]),
                source="elastic",
                forced=pid in forced,
                first_observed=any(_near(line, event.line, 8) for line in roots),
            )


def _near(first: Line, then: Line, lines: int = TABLE_LINES) -> bool:
    return first.artifact.name == then.artifact.name and 0 <= then.number - first.number <= lines


def _single(case: Case, event: Event, forced: set[int]) -> Iterator[End]:
    fields, line = event.fields, event.line
    if event.signature == "exit-code-map":
        yield from _listed(event)
        return
    code = _code(event)
    if code is None:
        return
    match event.signature:
        case "elastic-child-failed":
            pid = int(fields["pid"])
            seat = case.who.at_pid(pid, line.host)
            yield End(
                line=line,
                code=code,
                rank=seat.rank if seat else _of_local(case, line, fields["local"]),
                pid=pid,
                local_rank=int(fields["local"]),
                source="elastic",
                forced=pid in forced,
            )
        case "launch-died" | "deepspeed-return-code":
            local = fields.get("local")
            yield End(
                line=line,
                code=code,
                local_rank=int(local) if local else None,
                rank=_of_local(case, line, local),
                source="launcher",
            )
        case "spawn-exited":
            yield End(line=line, code=code, rank=_of_local(case, line, fields["index"]), source="spawn")
        case "srun-task":
            for task in _tasks(fields["tasks"]):
                yield End(line=line, code=code, rank=task, host=fields["host"], source="srun")
        case "mpirun-signal":
            yield End(line=line, code=code, rank=int(fields["task"]), host=fields["host"], source="mpirun")
        case "shell-signal":
            told = int(fields["pid"]) if "pid" in fields else None
            seat = case.who.at_pid(told, line.host) if told is not None else None
            yield End(line=line, code=code, rank=seat.rank if seat else event.rank, pid=told, source="shell")
        case "exit-code-list":
            yield End(line=line, code=code, rank=int(fields["rank"]), source="list")
        case "fatal-python":
            yield End(line=line, code=code, rank=line.rank, pid=line.pid, source="faulthandler")


def _listed(event: Event) -> Iterator[End]:
    """Several codes on one line, each after its rank or worker; a bare list of them is in the order of the ranks."""
    if _BARE_LIST.fullmatch(event.fields["codes"]):
        for rank, code in enumerate(event.fields["codes"].split(",")):
            yield End(line=event.line, code=signed(int(code)), rank=rank, source="list")
    for found in _ONE_CODE.finditer(event.fields["codes"]):
        yield End(line=event.line, code=signed(int(found["code"])), rank=int(found["rank"]), source="list")


def _code(event: Event) -> int | None:
    fields = event.fields
    if (text := fields.get("code")) is not None:
        return signed(int(text))
    if (text := fields.get("signal")) is not None:
        if text.isdigit():
            return -int(text)
        return -int(getattr(signal, text, 0)) or None
    if (text := fields.get("how") or fields.get("alone")) is not None and text in _SHELL:
        return -int(_SHELL[text])
    return None


def _tasks(text: str) -> Iterator[int]:
    for part in text.split(","):
        low, _, high = part.partition("-")
        if low.isdigit():
            yield from range(int(low), min(int(high or low), int(low) + 65536) + 1)


def _of_local(case: Case, line: Line, local: str | None) -> int | None:
    """The rank of a local one: of the node that this artifact is of, of the only one that has it, or where one host is all there is."""
    if not local:
        return None
    if (rank := case.who.local_in(line.artifact.name, int(local))) is not None:
        return rank
    if seat := case.who.at_local(int(local), line.host):
        return seat.rank
    hosts = {one.host for one in case.who.seats if one.host}
    return int(local) if len(hosts) <= 1 and not case.who.several else None
