"""What stands beside a job's own logs: kills that somebody typed, clocks that disagree, hosts that went with the store on them."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Sequence

from dtprobe.diagnose.case import Case, Event, Finding, quote
from dtprobe.diagnose.facts.ends import End, ends
from dtprobe.diagnose.who import same_host

ANALYST = "transcripts"
KILLED, STOPPED = 0.85, 0.85
CLOCK, CLOCK_ALONE = 0.84, 0.4
STORE = 0.93
SHOWN = 3
_STOPS = frozenset({"STOP", "SIGSTOP", "19", "TSTP", "SIGTSTP", "20"})
_CONT = frozenset({"CONT", "SIGCONT", "18", "0", "USR1", "USR2", "SIGUSR1", "SIGUSR2", "10", "12", "HUP", "SIGHUP", "1"})


def analyse(case: Case) -> Iterator[Finding]:
    """One finding for each of them."""
    yield from _kills(case)
    yield from _clocks(case)
    yield from _store_host(case)


def _kills(case: Case) -> Iterator[Finding]:
    """A kill whose process is a rank's."""
    for event in case.of("kill-typed", "kill-sent"):
        name = event.fields.get("sig", "9")
        if name in _CONT:
            continue
        for pid in (event.fields.get("pids") or event.fields.get("pid") or "").split():
            rank, end = _owner(case, int(pid), event)
            if rank is None:
                continue
            stopped = name in _STOPS
            number = _number(name)
            if not stopped and end is not None and end.signal is not None and number not in (None, end.signal):
                continue
            yield Finding(
                mode="rank-stopped" if stopped else "rank-killed",
                analyst=ANALYST,
                likelihood=STOPPED if stopped else KILLED,
                because=f"Process {pid}, rank {rank}, was {'stopped' if stopped else 'killed'} by a command that somebody ran.",
                first=rank,
                suspects=(rank,),
                host=event.host or (end.host if end else None),
                at_ns=event.t_ns,
                evidence=(quote(event.line, "cause"), *((quote(end.line, "confirm"),) if end is not None else ())),
                not_proven="who ran it, and why",
            )
            return


def _owner(case: Case, pid: int, event: Event) -> tuple[int | None, End | None]:
    end = next((one for one in ends(case) if one.pid == pid and one.rank is not None), None)
    if end is not None:
        return end.rank, end
    seat = case.who.at_pid(pid, event.host) or case.who.at_pid(pid)
    return (seat.rank if seat is not None else None), None


def _number(name: str) -> int | None:
    if name.isdigit():
        return int(name)
    known = getattr(signal, name if name.startswith("SIG") else f"SIG{name}", None)
    return int(known) if known is not None else None


def _clocks(case: Case) -> Iterator[Finding]:
    """A clock that is off by seconds, where something that compares times of hosts failed."""
    off = case.of("clock-off")
    if not off:
        return
    aged = case.of("heartbeat-aged")
    free = case.of("clock-free")
    worst = max(off, key=lambda event: float(event.fields["seconds"]))
    yield Finding(
        mode="clock-skew",
        analyst=ANALYST,
        likelihood=CLOCK if aged else CLOCK_ALONE,
        because=f"A host's clock is off by {float(worst.fields['seconds']):.0f} s"
        + (", and what the hosts tell each other of their heartbeats is judged by their clocks." if aged else "."),
        host=worst.host,
        evidence=(
            quote(worst.line, "cause"),
            *(quote(event.line, "confirm") for event in free[:1]),
            *(quote(event.line, "effect") for event in aged[:SHOWN]),
        ),
        not_proven="that the clock was off already when the job failed",
    )


def _store_host(case: Case) -> Iterator[Finding]:
    """The host that the peers' broken connections to the store lead to is one that went."""
    gone = case.of("node-went")
    peers = case.of("store-peer")
    if not gone or not peers:
        return
    nodes = {name: event.fields["node"] for event in case.of("pod-on-node") for name in _names(event)}
    for lost in gone:
        host = lost.fields["host"]
        met = [event for event in peers if _is(event.fields["remote"], host, nodes)]
        if not met:
            continue
        evidence = (quote(met[0].line, "cause"), quote(lost.line, "cause"))
        because = f"Host {host}, which the store was served from, went: the connections of the other ranks lead to it."
        for mode in _modes(case, gone):
            yield Finding(
                mode=mode,
                analyst=ANALYST,
                likelihood=STORE,
                because=because,
                first=0,
                suspects=(0,),
                host=host,
                evidence=evidence,
                not_proven="why the host went",
            )
        return


def _modes(case: Case, gone: Sequence[Event]) -> tuple[str, ...]:
    """The store's loss; and where the cluster's own words are read as an eviction, that it struck this rank."""
    places = {(event.line.artifact.name, event.line.number) for event in gone}
    evicted = any((event.line.artifact.name, event.line.number) in places for event in case.of("k8s-evicted"))
    return ("store-host-lost", "k8s-pod-evicted") if evicted else ("store-host-lost",)


def _names(event: Event) -> tuple[str, ...]:
    return tuple(name for name in (event.fields["pod"], event.fields["address"]) if name != "<none>")


def _is(remote: str, host: str, nodes: dict[str, str]) -> bool:
    """Whether a store's address is this host, or a pod on it."""
    if same_host(remote, host):
        return True
    pod = next((node for name, node in nodes.items() if remote == name or remote.startswith(f"{name}.")), None)
    return pod is not None and same_host(pod, host)
