"""Watches for a hang: collectives that are open without progress, and whether the ranks that they wait for are at work.

It reads flight recorders as the `flight_recorder` recorder does, and NCCL's calls where they are recorded, judges who waits for whom (`waits`) and what the awaited
ranks do (`liveness`), looks a second time before it says anything, and then has the evidence taken while the job lives: the
records of every rank first, then /proc of every rank in `rank<k>/stalled.json`, then what the other recorders take at a suspicion.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import ClassVar

from dtprobe import doctor, processes
from dtprobe.clock import Clock
from dtprobe.errors import Unavailable
from dtprobe.probes import Where, bundle, nccl_calls, sockets, stall, worker_server
from dtprobe.probes.flight_recorder import FlightRecorder, FlightRecorderRecorder
from dtprobe.probes.liveness import Life, Pulse
from dtprobe.probes.procfs import condition
from dtprobe.probes.snapshot import snapshot
from dtprobe.probes.waits import Hang, Kind, judge, named
from dtprobe.readers.artifact import ReaderError
from dtprobe.readers.nccl_ring import read_nccl_ring, read_nccl_under_way

SHARE, LEAST_S, MOST_S = 0.1, 0.25, 1.5
"""Of the limit, and within so many seconds: between two looks at the records while nothing is suspected."""
LOOK_S = 1.0
"""Between two looks at the ranks' processes while an operation is open."""
QUIET = 0.75
"""Of the limit: a rank that is without progress for so long while others wait for it is stuck."""
PATIENCE, PATIENCE_S = 4.0, 60.0
"""A rank for which others wait may do nothing but sleep for so many limits, and at least for so long."""
GIL_EVERY_S = 5.0
GIL_TIMEOUT_S = 4.0


@dataclass(frozen=True)
class Found:
    """A confirmed hang: when, how long the operation had been open then, and how far apart the two looks were."""

    hang: Hang
    t_ns: int
    open_s: float
    confirmed_s: float


@dataclass
class Watched:
    """What a watch tells whoever started it, and asks from it. Called on the recorder's threads."""

    told: Callable[[Found], None]
    resumed: Callable[[Found], None]
    bundled: Callable[[], None]
    hangs: list[Found] = field(default_factory=list)
    waits: dict[str, str] = field(default_factory=dict)
    """Operations that were open for longer than the limit and were no hang, with the reason."""
    missing: dict[str, Unavailable] = field(default_factory=dict)
    """Sources of the bundle that gave nothing."""


@dataclass(frozen=True, kw_only=True)
class HangWatch:
    """A collective open for `suspect_s`, or half of its own timeout where that is shorter, is suspected; `confirm_s` later confirmed."""

    name: ClassVar[str] = "watch"
    heavy: ClassVar[bool] = False

    watched: Watched = field(repr=False)
    suspect_s: float = 15.0
    confirm_s: float = 2.0
    interval_s: float | None = None
    """Between two looks at the records: a share of `suspect_s` unless given, since a rank stands still while its recorder is read."""

    def probe(self) -> Unavailable | None:
        return doctor.capability("torch>=2.9")

    def recorder(self, where: Where) -> HangWatchRecorder:
        return HangWatchRecorder(self, where)


class HangWatchRecorder(FlightRecorderRecorder):
    def __init__(self, config: HangWatch, where: Where, clock: Clock | None = None) -> None:
        interval_s = config.interval_s or min(MOST_S, max(LEAST_S, config.suspect_s * SHARE))
        super().__init__(FlightRecorder(interval_s=interval_s, suspect_s=config.suspect_s), where, clock)
        self._watch = config
        self._begun_s = self._clock.monotonic()
        self._pulses: dict[int, Pulse] = {}
        self._gil: dict[int, tuple[float, int | None]] = {}
        self._looked_at = 0.0
        self._first: tuple[float, Hang] | None = None
        self._open_hangs: list[Found] = []
        self._bundles = 0
        self._since: dict[int, tuple[float, bool]] = {}
        """Of each rank: since when its oldest open operation is open, and whether one was open for too long."""
        self._judge_at = 0.0
        self._world: int | None = where.world_size

    def suspected(self, reason: str) -> None:
        """The last to be told (see `watch`): what the others took at a suspicion lies there now."""
        number = self._bundles
        self._bundles += 1
        folder = self._where.folder / f"hang-{number}"
        self._watch.watched.missing.update(bundle.take(folder, self._where.environ, self._begun_s))
        self._files += sorted(folder.iterdir())
        self._watch.watched.bundled()

    def _looked(self, open_s: Mapping[int, tuple[float, bool]], now_ns: int) -> float:
        now = self._clock.monotonic()
        # Of a rank that was not asked this time, what was open still is, as far as anybody knows.
        self._since |= {rank: (now - age_s, overdue) for rank, (age_s, overdue) in open_s.items()}
        self._since = {
            one.process.rank: self._since[one.process.rank] for one in self._current() if one.process.rank in self._since
        }
        ages = self._inside_nccl(now_ns).values()
        since = [*self._since.values(), *((now - age_s, age_s >= self._watch.suspect_s) for age_s in ages)]
        overdue = any(late for _, late in since)
        if self._open_hangs and not overdue:
            self._see_whether_it_goes_on()
        if now - min((begun for begun, _ in since), default=now) < min(LOOK_S, self._watch.suspect_s / 2):
            self._pulses.clear()  # of an earlier wait: how long a rank was quiet then means nothing now
            self._first = None
            return 0.0
        pause_s = min(LOOK_S, self._watch.suspect_s / 4)
        if now - self._looked_at >= pause_s * 0.9:
            self._looked_at = now
            self._look_at_processes(now)
        if overdue and now >= self._judge_at:
            if self._first is not None:
                self._look_at_processes(now)
            self._ask([one for one in self._current() if worker_server.NCCL in one.text or not self._works(one.process.rank)])
            self._judge(self._clock.now_ns())
            self._judge_at = now + (self._confirm_s() if self._first is not None else 2 * pause_s)
        elif not overdue:
            self._first = None
        due_s = self._judge_at - self._clock.monotonic() if self._first is not None else pause_s
        self._sampler.soon(min(pause_s, max(0.05, due_s)))
        return 0.0

    def _works(self, rank: int | None) -> bool:
        """Then it need not be asked, whatever it recorded: who waits for it waits for work. One that waits for a GPU may spin."""
        pulse = self._pulses.get(rank) if rank is not None else None
        return pulse is not None and pulse.finding is not None and pulse.finding.life is Life.WORKS

    def _confirm_s(self) -> float:
        return min(self._watch.confirm_s, self._watch.suspect_s / 2)

    def _look_at_processes(self, now: float) -> None:
        for one in self._current():
            rank, pid = one.process.rank, one.process.pid
            if rank is None:
                continue
            if rank not in self._pulses or self._pulses[rank].pid != pid:
                self._pulses[rank] = Pulse(pid)
            self._pulses[rank].look(now)

    def _judge(self, now_ns: int) -> None:
        now = self._clock.monotonic()
        blocked = [one for one in self._pulses.values() if one.finding is not None and one.finding.life is Life.BLOCKED]
        if blocked:
            moved = sockets.moved(self._where.environ)
            if isinstance(moved, Unavailable):
                self._problems[f"progress over TCP is not seen: {moved}"] = None
            else:
                for pulse in blocked:
                    pulse.sockets(moved, now)
        self._see_whether_it_goes_on()
        found = self._hang(now, now_ns)
        if found is None or any(found.key == one.hang.key or found.suspects == one.hang.suspects for one in self._open_hangs):
            self._first = None
            return
        if found.kind is not Kind.TIMEOUT and (self._first is None or not self._first[1].same(found)):
            self._first = now, found
            return
        confirmed_s, self._first = now - self._first[0] if self._first is not None else 0.0, None
        self._confirmed(Found(found, now_ns, (now_ns - found.operation.created_ns) / 1e9, confirmed_s))

    def _hang(self, now: float, now_ns: int) -> Hang | None:
        """The first stall that is a hang; reasons why the others are none are kept."""
        hangs: list[Hang] = []
        findings = {rank: pulse.finding for rank, pulse in self._pulses.items() if pulse.finding is not None}
        inside = self._inside_nccl(now_ns)
        for records, fresh in self._sources():
            for one in stall.find(records, now_ns, self._watch.suspect_s, self._world_size(), fresh):
                limit_s = min(self._watch.suspect_s, one.operation.timeout_ms / 2e3)
                gil = self._holders(now, limit_s)
                answer = judge(
                    one,
                    records,
                    findings,
                    gil,
                    fresh=fresh,
                    world_size=self._world_size(),
                    quiet_s=QUIET * limit_s,
                    patience_s=max(PATIENCE_S, PATIENCE * limit_s),
                    now_ns=now_ns,
                    inside=inside,
                )
                if isinstance(answer, Hang):
                    hangs.append(answer)
                elif answer.settled:
                    self._watch.watched.waits[named(answer.operation)] = answer.because
        earliest = min(hangs, key=lambda one: one.operation.created_ns, default=None)
        return self._by_arguments(earliest) if earliest is not None and earliest.suspects is None else earliest

    def _by_arguments(self, hang: Hang) -> Hang:
        """A hang in which nobody is behind: where NCCL was called with other arguments, that is why, and who is odd is named."""
        try:
            found = nccl_calls.differing({rank: read_nccl_ring(path) for rank, path in self._rings().items()})
        except ReaderError as error:
            self._problems[str(error)] = None
            return hang
        return hang if found is None else replace(hang, kind=Kind.MISMATCH, suspects=found.odd or None, because=str(found))

    def _sources(self) -> Iterator[tuple[dict[int, stall.Records], list[int]]]:
        """Each kind of records, by rank, and the ranks whose records are of now."""
        for handler in worker_server.HANDLERS:
            texts = {rank: known.text[handler] for rank, known in self._ranks.items() if handler in known.text}
            try:
                records = {rank: stall.parse(text) for rank, text in texts.items()}
            except (ValueError, KeyError, TypeError, IndexError) as error:
                self._problems[f"{handler}: not a flight recorder of a known form: {type(error).__name__}: {error}"] = None
                continue
            yield records, [rank for rank, known in self._ranks.items() if handler in known.fresh]
        rings = self._rings()
        if rings:
            try:
                yield nccl_calls.records(rings, self._world_size()), [*rings]
            except ReaderError as error:
                self._problems[str(error)] = None

    def _rings(self) -> dict[int, Path]:
        """The rings of NCCL's calls that living ranks record into."""
        found = {}
        for one in self._current():
            pid = one.process.pid
            path = nccl_calls.ring(self._where.folder, pid)
            if one.process.rank is not None and path is not None and condition(pid) is not None:
                found[one.process.rank] = path
        return found

    def _inside_nccl(self, now_ns: int) -> dict[int, float]:
        """Ranks whose host is in a call to NCCL, and for how many seconds: the longest where threads are in several."""
        found = {}
        for rank, path in self._rings().items():
            try:
                begun_ns = min(read_nccl_under_way(path), default=None)
            except ReaderError as error:
                self._problems[str(error)] = None
                continue
            if begun_ns is not None:
                found[rank] = (now_ns - begun_ns) / 1e9
        return found

    def _world_size(self) -> int:
        if self._world is None:
            for one in self._current():
                told = processes.environ_of(one.process.pid).get("WORLD_SIZE", "")
                if told.isdigit():
                    self._world = int(told)
                    break
        return self._world or max(self._ranks, default=-1) + 1

    def _holders(self, now: float, limit_s: float) -> dict[int, str]:
        """Ranks of which a thread holds the interpreter's lock while the rank does nothing."""
        found = {}
        for rank, pulse in self._pulses.items():
            finding = pulse.finding
            if finding is None or not (finding.life is Life.BLOCKED or (finding.life is Life.SLEEPS and finding.native_sleep)):
                self._gil.pop(rank, None)
                continue
            looked_at, owner = self._gil.get(rank, (-GIL_EVERY_S, None))
            if now - looked_at >= (GIL_EVERY_S if self._first is None else self._confirm_s() / 2):
                owner = _holder(pulse.pid, self._where.environ)
                self._gil[rank] = now, owner
            # It cannot have taken the lock without running: so it has held it for all that time.
            held_s = pulse.thread_quiet_s(owner, now) if owner is not None else 0.0
            if held_s >= QUIET * limit_s:
                found[rank] = f"thread {owner} has held the GIL for {held_s:.0f} s and does nothing"
        return found

    def _confirmed(self, found: Found) -> None:
        self._open_hangs.append(found)
        self._watch.watched.hangs.append(found)
        self._watch.watched.told(found)
        for rank, known in self._ranks.items():
            self._write(rank, known, known.text)
            path = known.process.folder / "stalled.json"
            path.write_text(json.dumps(snapshot(known.process.pid), indent=1), encoding="utf-8")
            self._files.append(path)
        self._where.suspect(f"{found.hang.kind}: {found.hang.because}")

    def _see_whether_it_goes_on(self) -> None:
        """A rank that was let go again is said too."""
        if not self._open_hangs:
            return
        sources = list(self._sources())
        for found in list(self._open_hangs):
            for rank in found.hang.waiting:
                known = self._ranks.get(rank)
                if known is None or condition(known.process.pid) is None:
                    continue
                calls = (records[rank].at(*found.hang.key) for records, fresh in sources if rank in fresh)
                if any(one and one.created_ns == found.hang.operation.created_ns and not one.open for one in calls):
                    self._open_hangs.remove(found)
                    self._watch.watched.resumed(found)
                    break


def _holder(pid: int, environ: Mapping[str, str]) -> int | None:
    """The thread that holds the interpreter's lock, by py-spy; None where none does or nobody can tell."""
    program = doctor.here().machine.which("py-spy")
    if program is None:
        return None
    try:
        done = subprocess.run(
            [str(program), "dump", "--json", "--nonblocking", "--pid", str(pid)],
            env=environ,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=GIL_TIMEOUT_S,
            check=False,
        )
        threads = json.loads(done.stdout) if done.returncode == 0 else []
    except (subprocess.TimeoutExpired, ValueError):
        return None
    return next((int(one["os_thread_id"]) for one in threads if one.get("owns_gil") and one.get("os_thread_id")), None)
