"""torch's flight recorder of every rank, read while the job runs, and the suspicion of a hang that comes from it.

A hook in the rank serves the records on a unix socket (see `dtprobe/hook`); the worker itself is unmodified. The recorder
asks for them, without stack traces, and when a collective has been open for `suspect_s` writes what every rank recorded and
says which ranks are behind. `rank<k>/fr-<n>.json`, oldest first, are in torch's own JSON form: those at suspicions, and the
last known or the one at the rank's own end. On gloo the ones before the timeout count: afterwards a failed operation looks
like a completed one.

A dump costs the rank 12 to 24 us of processor time for each of up to 2000 entries, on one of the worker server's threads (torch
2.13 CPU). So a rank that computes is asked within a budget, every 5 to 10 s when its records are full, and one that does next
to nothing, as in a collective that hangs, at every look or two.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import dtprobe
from dtprobe import doctor
from dtprobe.clock import Clock, SystemClock
from dtprobe.errors import Unavailable
from dtprobe.probes import RankProcess, Recorded, Recorder, Where, stall, worker_server
from dtprobe.probes.pacing import Sampler
from dtprobe.probes.procfs import condition, thread_seconds, threads_named, wanted_seconds

HOOK = Path(dtprobe.__file__).resolve().parent / "hook"
"""The folder that goes on the ranks' PYTHONPATH."""

SHARE = 0.005
"""At most this much of a core in each rank while it works, and of one core in the harness."""
SHARE_IDLE = 0.05
IDLE = 0.1
"""A rank that wants less of a core than this waits for something, perhaps in vain, and loses nothing by being asked often."""
SERVER_THREADS = "pt_workerserver"
SERVER_S_PER_BYTE = 50e-9
"""Processor time in the rank for a byte of its answer (an entry has 470), where its threads' own time cannot be read."""
ANSWER_S = 0.5
LONGEST_SOCKET = 107
"""sockaddr_un holds so many bytes of path (unix(7))."""


@dataclass(frozen=True, kw_only=True)
class FlightRecorder:
    """Looks every `interval_s`; asks a rank that computes less often where that would cost it more than half a percent of a core.

    A collective open for `suspect_s`, or half of its own timeout where that is shorter, is a suspected hang: once each.
    Long compute is none, as long as nobody waits for it in a collective.
    """

    name: ClassVar[str] = "flight_recorder"
    heavy: ClassVar[bool] = False

    interval_s: float = 0.5
    suspect_s: float = 3.0

    def probe(self) -> Unavailable | None:
        return doctor.capability("torch>=2.9")

    def recorder(self, where: Where) -> FlightRecorderRecorder:
        return FlightRecorderRecorder(self, where)


@dataclass
class _Rank:
    """What is known of one rank's recorder."""

    process: RankProcess
    handlers: tuple[str, ...] | None = None
    text: dict[str, bytes] = field(default_factory=dict)
    """The last answer of each handler."""
    open_text: dict[str, bytes] = field(default_factory=dict)
    """The last answers that showed an operation open for longer than the interval, until they are written."""
    written: set[bytes] = field(default_factory=set)
    files: int = 0
    fresh: set[str] = field(default_factory=set)
    """The handlers that answered at the last look, with records in it."""
    silent: str = ""
    """Why it did not answer the last time; empty where it did."""
    due: float = 0.0
    """When it may be asked again while it works, and, earlier, `due_idle` while it does not."""
    due_idle: float = 0.0
    idle: bool = False
    used: tuple[float, float] | None = None

    servers: list[int] | None = None
    served_s: float = 0.0

    def spent(self, size: int) -> float:
        """Processor time that the server's threads have used since this was last asked, estimated by the size where unknown."""
        if self.servers is None and size:
            self.servers = threads_named(self.process.pid, SERVER_THREADS)
        before_s, now_s = self.served_s, thread_seconds(self.process.pid, self.servers or ())
        if not self.servers or now_s is None:
            return size * SERVER_S_PER_BYTE
        self.served_s = now_s
        return now_s - before_s

    def look_at_work(self, now: float) -> None:
        """Set `idle`: whether it wanted next to no processor time since the last look."""
        wanted_s = wanted_seconds(self.process.pid)
        if wanted_s is None:
            self.idle = False
            return
        if self.used is not None:
            self.idle = wanted_s - self.used[1] <= IDLE * (now - self.used[0])
        self.used = now, wanted_s


class FlightRecorderRecorder(Recorder):
    def __init__(self, config: FlightRecorder, where: Where, clock: Clock | None = None) -> None:
        self._config = config
        self._where = where
        self._clock = clock or SystemClock()
        self._ranks: dict[int, _Rank] = {}
        self._told: set[tuple[str, int]] = set()
        self._files: list[Path] = []
        self._problems: dict[str, None] = {}
        self._sampler = Sampler("flight-recorder", self._look, interval_s=config.interval_s, share=SHARE, clock=self._clock)
        longest = len(str(self._socket(2**22)))
        self._reachable = longest <= LONGEST_SOCKET
        if not self._reachable:
            self._problems[
                f"{where.scratch} is too long a path for a socket ({longest} bytes, {LONGEST_SOCKET} are possible): "
                "the flight recorder is written at exit only; set TMPDIR to a shorter one"
            ] = None

    def environ(self, rank: int | None) -> Mapping[str, str]:
        found = {"PYTHONPATH": str(HOOK), "DTPROBE_HOOKS": str(HOOK / "plugins" / "flight_recorder.py")}
        return found | ({"DTPROBE_FR_SOCKETS": str(self._where.scratch)} if self._reachable else {})

    def start(self, processes: Sequence[RankProcess]) -> None:
        if self._reachable:
            self._sampler.start()

    def stop(self) -> Recorded:
        if self._sampler.stop():
            self._ask(self._current())
        else:
            self._problems["the last look did not end in time"] = None
        facts = {"looks": f"{self._sampler.looks}, {self._sampler.rate_hz:.2f} a second reached"}
        for process in self._where.processes():
            if process.rank is not None:
                self._ranks.setdefault(process.rank, _Rank(process))
        for rank, known in sorted(self._ranks.items()):
            self._write(rank, known, known.open_text)
            if not self._take_exit_files(known):
                self._write(rank, known, known.text)
            said = known.process.folder / "hook.log"
            if said.exists():
                lines = said.read_text(encoding="utf-8", errors="replace").splitlines()
                self._problems.update((f"rank {rank}: {line}", None) for line in lines)
            elif not known.files:
                facts[f"rank {rank}"] = "recorded no collective, or torch.distributed was not imported under the hook"
        return Recorded(
            files=tuple(self._files),
            cpu_s=self._sampler.cpu_s,
            problems=(*self._problems, *self._sampler.problems),
            facts=facts,
        )

    def _socket(self, pid: int) -> Path:
        return self._where.scratch / f"fr-{pid}.sock"

    def _look(self) -> float:
        now, now_ns = self._clock.monotonic(), self._clock.now_ns()
        known = self._current()
        for one in known:
            one.look_at_work(now)
        self._ask([one for one in known if now >= (one.due_idle if one.idle else one.due)])
        open_s: dict[int, tuple[float, bool]] = {}
        for one in known:
            oldest_s, overdue = 0.0, False
            for handler in one.fresh:
                for age_s, timeout_s in stall.open_ages(one.text[handler], now_ns):
                    oldest_s = max(oldest_s, age_s)
                    left_s = min(self._config.suspect_s, timeout_s / 2) - age_s
                    overdue = overdue or left_s <= 0
                    if age_s > self._config.interval_s / 2:
                        one.open_text[handler] = one.text[handler]
                        # Looked at in time even where the budget alone would have it later.
                        one.due = min(one.due, now + max(left_s, self._config.interval_s))
            if one.fresh and one.process.rank is not None:
                open_s[one.process.rank] = oldest_s, overdue
        return self._looked(open_s, now_ns)

    def _looked(self, open_s: Mapping[int, tuple[float, bool]], now_ns: int) -> float:
        """What follows from a look, which may cost something elsewhere: the answer.

        `open_s` has of each rank that answered for how long its oldest open operation is open, and whether that is too long for
        any of them.
        """
        if any(overdue for _, overdue in open_s.values()):
            self._ask_the_others()
            self._judge(now_ns)
        return 0.0

    def _ask_the_others(self) -> None:
        """Those that were not asked at this look, so that all records are of now."""
        self._ask([one for one in self._current() if not one.fresh], keep=True)

    def _current(self) -> list[_Rank]:
        return [self._known(one.rank, one) for one in self._where.processes() if one.rank is not None]

    def _ask(self, ranks: Sequence[_Rank], keep: bool = False) -> None:
        """Ask the ranks, all at once; those of the others that answered before are fresh no more, unless `keep`."""
        if not keep:
            for one in self._ranks.values():
                one.fresh.clear()
        asked = {
            (number, handler): (self._socket(one.process.pid), handler)
            for number, one in enumerate(ranks)
            for handler in self._handlers(one)
        }
        now = self._clock.monotonic()
        sizes = [0] * len(ranks)
        for (number, handler), text in worker_server.ask_all(asked, ANSWER_S, self._clock.monotonic).items():
            known = ranks[number]
            if text is None:
                known.silent = f"does not answer ({condition(known.process.pid) or 'ended'})"
                continue
            known.silent = ""
            sizes[number] += len(text)
            if b'"entries"' in text:
                known.text[handler] = text
                known.fresh.add(handler)
        for known, size in zip(ranks, sizes, strict=True):
            spent_s = known.spent(size)
            known.due, known.due_idle = now + spent_s / SHARE, now + spent_s / SHARE_IDLE

    def _known(self, rank: int, process: RankProcess) -> _Rank:
        known = self._ranks.get(rank)
        if known is not None and known.process.pid == process.pid:
            return known
        self._ranks[rank] = _Rank(process)
        if known is not None:
            # Started again under the same rank: what is known of the old one is written, and its groups count from one again.
            self._write(rank, known, known.text)
            self._ranks[rank].files = known.files
            self._told.clear()
        return self._ranks[rank]

    def _handlers(self, known: _Rank) -> tuple[str, ...]:
        """What may be asked of a rank now: nothing where it has ended, is stopped, or does not serve (yet)."""
        pid = known.process.pid
        found = condition(pid)
        if found is None or found.ended:
            known.silent = "has ended"
            return ()
        if found.stopped:
            known.silent = f"is stopped ({found})"
            return ()
        if known.handlers is None and self._socket(pid).exists():
            known.handlers = worker_server.handlers(self._socket(pid), ANSWER_S)
            if known.handlers == ():
                self._problems[
                    "this torch's worker server has no flight recorder (2.10 and later do): written at exit only"
                ] = None
        return known.handlers or ()

    def _judge(self, now_ns: int) -> None:
        """Suspect what is open for too long and was not told yet."""
        # A foreign command does not say how many ranks there will be: then those that were seen.
        world_size = self._where.world_size or max(self._ranks) + 1
        for handler in worker_server.HANDLERS:
            try:
                records = {
                    rank: stall.parse(known.text[handler]) for rank, known in self._ranks.items() if handler in known.text
                }
            except (ValueError, KeyError, TypeError, IndexError) as error:
                self._problems[f"{handler}: not a flight recorder of a known form: {type(error).__name__}: {error}"] = None
                continue
            fresh = [rank for rank, known in self._ranks.items() if handler in known.fresh]
            world_size = self._where.world_size or max(self._ranks, default=-1) + 1
            for found in stall.find(records, now_ns, self._config.suspect_s, world_size, fresh):
                if found.key in self._told:
                    continue
                self._told.add(found.key)
                for rank, known in self._ranks.items():
                    self._write(rank, known, known.text)
                self._where.suspect(self._reason(found, records, now_ns))

    def _reason(self, found: stall.Stall, records: Mapping[int, stall.Records], now_ns: int) -> str:
        open_s = (now_ns - found.operation.created_ns) / 1e9
        waiting = ", ".join(str(rank) for rank in found.waiting)
        parts = [f"{found.operation} open for {open_s:.1f} s on rank{'s' * (len(found.waiting) > 1)} {waiting}"]
        parts += [f"rank {rank} called {other} there" for rank, other in found.others.items()]
        away = [rank for rank in found.behind if rank in self._where.elsewhere]
        behind = [rank for rank in found.behind if rank not in away]
        parts += [f"rank {rank} is behind: {self._behind(rank, found, records.get(rank))}" for rank in behind]
        if away:
            parts.append(f"rank{'s' * (len(away) > 1)} {', '.join(map(str, away))} cannot be seen from this host")
        parts += [
            f"rank {rank} {known.silent}" for rank, known in self._ranks.items() if known.silent and rank not in found.behind
        ]
        if not found.behind and not found.others:
            parts.append("all ranks of the group entered it and none leaves")
        return "; ".join(parts)

    def _behind(self, rank: int, found: stall.Stall, records: stall.Records | None) -> str:
        known = self._ranks.get(rank)
        if known is None:
            return "no such process is known"
        last = records.last(found.operation.group) if records else None
        elsewhere = next((one for one in records.operations if one.open), None) if records else None
        parts = [f"last called {last}" if last else "recorded nothing in this group"]
        if elsewhere is not None and elsewhere.group != found.operation.group:
            parts.append(f"waits in {elsewhere}")
        parts.append(known.silent or f"{condition(known.process.pid) or 'ended'}")
        return ", ".join(parts)

    def _write(self, rank: int, known: _Rank, texts: dict[str, bytes]) -> None:
        """Write what was not written yet, at one stroke each."""
        for text in texts.values():
            if text in known.written:
                continue
            known.written.add(text)
            path = self._next(known)
            temporary = path.with_name(f".{path.name}")
            temporary.write_bytes(text)
            temporary.replace(path)
        if texts is not known.text:
            texts.clear()

    def _take_exit_files(self, known: _Rank) -> bool:
        """Number what the hook left at the rank's own end; whether there was any."""
        left = sorted(known.process.folder.glob("fr-exit*.json"))
        for file in left:
            file.replace(self._next(known))
        return bool(left)

    def _next(self, known: _Rank) -> Path:
        known.process.folder.mkdir(parents=True, exist_ok=True)
        path = known.process.folder / f"fr-{known.files}.json"
        known.files += 1
        self._files.append(path)
        return path
