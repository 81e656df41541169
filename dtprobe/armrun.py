"""One run of one arm: ranks started under their recorders, waited for until the deadline, ended for certain."""

from __future__ import annotations

import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from dtprobe.clock import Clock
from dtprobe.confine import Confinement
from dtprobe.errors import UsageError
from dtprobe.inject import Firing, Injection, Site, firing_json
from dtprobe.inject.inrank import HOOK
from dtprobe.inject.spec import Fault
from dtprobe.launch import Job, JobSpec, Launcher, RankExit, Spread
from dtprobe.probes import Recorded, Recorder, Where
from dtprobe.readers.hosts import Hosts
from dtprobe.scenario import Arm, Probe, Scenario

JOINED = ("PYTHONPATH", "LD_PRELOAD", "DTPROBE_HOOKS")
"""Variables that are lists of paths: what several parties bring is joined."""


@dataclass(frozen=True)
class Workload:
    """What is run: `argv` in `cwd` with the variables `env` added, on `world_size` ranks (None: a foreign command says itself).

    `hooks` are plug-ins, files in `dtprobe/hook/plugins`, that all its Python processes have in every run, with recorders or without.
    """

    argv: tuple[str, ...]
    cwd: Path
    timeout_s: float
    world_size: int | None
    env: Mapping[str, str] = field(default_factory=dict)
    hooks: tuple[str, ...] = ()

    @classmethod
    def of(cls, scenario: Scenario, arm: Arm) -> Workload:
        """An arm's: a Python program runs under this interpreter, anything else as it is. Its ranks import torch quickly."""
        program = str(scenario.folder / arm.program)
        argv = (sys.executable, program, *arm.args) if program.endswith(".py") else (program, *arm.args)
        limit_s = arm.timeout_s or scenario.timeout_s
        return cls(argv, scenario.folder, limit_s, scenario.world_size, arm.env, hooks=("quick_import.py",))

    def environ(self, rank: int | None) -> Mapping[str, str]:
        """What brings the hooks into a rank."""
        plugins = [str(HOOK / "plugins" / name) for name in self.hooks]
        return {"PYTHONPATH": str(HOOK), "DTPROBE_HOOKS_EVERYWHERE": ":".join(plugins)} if plugins else {}


@dataclass(frozen=True)
class ArmPlan:
    """A step of a run: which arm, which repeat, with heavy recorders (`traced`), or with none at all (`probed` false)."""

    name: str
    workload: Workload
    repeat: int
    traced: bool
    probed: bool
    faults: tuple[Fault, ...] = ()

    @property
    def arm_folder(self) -> str:
        return self.name if self.probed else "bare"

    @property
    def label(self) -> str:
        return f"{self.name} {self.repeat + 1}" + (", traced" if self.traced else "") + ("" if self.probed else ", no probes")


@dataclass(frozen=True)
class Injected:
    """A fault in the grammar: when and where it really fired, and why it did not where it did not."""

    fault: str
    fired: tuple[Firing, ...]
    problems: tuple[str, ...]

    def as_json(self) -> dict[str, object]:
        return {"fault": self.fault, "fired": [firing_json(one) for one in self.fired], "problems": list(self.problems)}


@dataclass(frozen=True)
class ArmRecord:
    """What happened in one arm run."""

    plan: ArmPlan
    folder: Path
    started_ns: int
    ended_ns: int
    exits: tuple[RankExit, ...]
    recorded: Mapping[str, Recorded] = field(default_factory=dict)
    suspected: tuple[tuple[int, str], ...] = ()
    injected: tuple[Injected, ...] = ()
    hosts: Hosts | None = None
    """Where the ranks ran and how far the clocks there were off, of an arm run on several nodes."""

    @property
    def timed_out(self) -> bool:
        return any(one.timed_out for one in self.exits)

    def as_json(self) -> dict[str, object]:
        return {
            "arm": self.plan.name,
            "repeat": self.plan.repeat,
            "traced": self.plan.traced,
            "probed": self.plan.probed,
            "folder": f"{self.plan.arm_folder}/{self.plan.repeat}",
            "started_ns": self.started_ns,
            "ended_ns": self.ended_ns,
            "timed_out": self.timed_out,
            "ranks": [
                {
                    "rank": one.rank,
                    "pid": one.pid,
                    "exit_code": one.exit_code,
                    "signal": one.signal,
                    "wall_s": one.wall_s,
                    "cpu_s": one.cpu_s,
                }
                for one in self.exits
            ],
            "recorders": {
                name: {
                    "cpu_s": one.cpu_s,
                    "stopped_s": one.stopped_s,
                    "problems": list(one.problems),
                    "files": [str(file.relative_to(self.folder)) for file in one.files if file.is_relative_to(self.folder)],
                    "facts": dict(one.facts),
                }
                for name, one in self.recorded.items()
            },
            "suspected": [{"t_ns": t_ns, "reason": reason} for t_ns, reason in self.suspected],
            "injections": [one.as_json() for one in self.injected],
            "hosts": self.hosts.as_json() if self.hosts else None,
        }


def hosts_json(records: Sequence[ArmRecord]) -> dict[str, object]:
    """The entry `hosts` of `run.json`, where arms ran on several nodes: of each host the run in which its clock was most off, and which that was."""
    found: dict[str, dict[str, object]] = {}
    worst: dict[str, int] = {}
    for record in records:
        for host in record.hosts.hosts if record.hosts else ():
            if host.name not in worst or abs(host.offset_ns) > worst[host.name]:
                worst[host.name] = abs(host.offset_ns)
                found[host.name] = {**host.as_json(), "arm_run": f"{record.plan.arm_folder}/{record.plan.repeat}"}
    return {"hosts": found} if found else {}


class _Suspicions:
    """Tells every recorder of an arm run that a hang is suspected, off the caller's thread."""

    def __init__(self, clock: Clock) -> None:
        self.recorders: dict[str, Recorder] = {}
        self.told: list[tuple[int, str]] = []
        self.problems: list[str] = []
        self._clock = clock
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []

    def suspect(self, reason: str) -> None:
        with self._lock:
            self.told.append((self._clock.now_ns(), reason))
            thread = threading.Thread(target=self._tell, args=(reason,), name="dtprobe-suspect", daemon=True)
            self._threads.append(thread)
        thread.start()

    def settle(self, timeout_s: float) -> None:
        """Wait for what recorders are still taking, so that ranks are not ended under their hands."""
        deadline = self._clock.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, deadline - self._clock.monotonic()))

    def _tell(self, reason: str) -> None:
        for name, recorder in self.recorders.items():
            try:
                recorder.suspected(reason)
            except Exception as error:  # noqa: BLE001  one recorder's fault is said, and must not silence the others
                self.problems.append(f"{name}: {type(error).__name__}: {error}")


def execute(
    box: Confinement,
    plan: ArmPlan,
    *,
    folder: Path,
    probes: Sequence[Probe],
    launcher: Launcher | Spread,
    seed: int,
    environ: Mapping[str, str],
    clock: Clock,
    elsewhere: frozenset[int] = frozenset(),
) -> ArmRecord:
    """Run the arm once; returns when every process of it has ended. `elsewhere` are ranks that run on other nodes, where this is one of several.

    Recorders and injections start while the ranks are held before their program, and stop before what is left of the ranks
    is ended. A recorder that fails is a problem in the record, never the end of the run; a fault that cannot reach its
    target ends it before anything has been started (UsageError).
    """
    if isinstance(launcher, Spread):
        return launcher.conduct(box, plan, folder=folder, probes=probes, seed=seed, environ=environ, clock=clock)
    for fault in plan.faults:
        if fault.target.node is not None:
            raise UsageError(f"fault {str(fault)!r} names a node: the {launcher.name} launcher has none", "aim by rank instead")
    work = plan.workload
    folder = folder.absolute()  # the warden and the ranks have working folders of their own
    suspicions = _Suspicions(clock)
    job: Job | None = None

    def processes() -> Sequence:
        return job.processes() if job else ()

    where = Where(
        folder=folder,
        scratch=box.scratch,
        world_size=work.world_size,
        processes=processes,
        suspect=suspicions.suspect,
        environ={**environ, **box.marker},
        elsewhere=elsewhere,
    )
    recorders: dict[str, Recorder] = {probe.name: probe.recorder(where) for probe in probes}
    suspicions.recorders = recorders
    recorded: dict[str, Recorded] = {}
    injections = [
        fault.injector.make(
            fault,
            Site(
                folder=folder,
                scratch=box.scratch,
                box=box,
                world_size=work.world_size,
                seed=seed + plan.repeat,
                index=index,
                clock=clock,
                processes=processes,
            ),
        )
        for index, fault in enumerate(plan.faults)
    ]
    for fault, injection in zip(plan.faults, injections, strict=True):
        if reason := injection.check():
            raise UsageError(f"fault {str(fault)!r} cannot reach its target here: {reason.reason}", reason.remedy)
    injected: tuple[Injected, ...] = ()
    spec = JobSpec(
        argv=work.argv,
        env={
            **environ,
            **work.env,
            "DTPROBE_SEED": str(seed + plan.repeat),
            "DTPROBE_ARM": plan.name,
            "DTPROBE_SCRATCH": str(box.scratch),
            "PYTHONPATH": _python_path(environ),
        },
        world_size=work.world_size or 0,
        folder=folder,
        cwd=work.cwd,
        wrap=lambda rank, argv: wrapped([*injections, *recorders.values()], rank, argv),
        environ=lambda rank: joined([work, *injections, *recorders.values()], rank, {**environ, **work.env}),
    )
    started_ns = clock.now_ns()
    failures: dict[str, str] = {}
    try:
        for injection in injections:
            injection.prepare()
        job = launcher.start(box, spec)
        for injection in injections:
            injection.start(job.processes())
        for name, recorder in recorders.items():
            try:
                recorder.start(job.processes())
            except Exception as error:  # noqa: BLE001  said in the record
                failures[name] = f"did not start: {type(error).__name__}: {error}"
        job.release()
        exits = job.wait(work.timeout_s)
        suspicions.settle(timeout_s=10)
    except BaseException:
        # Interrupted, or nothing to record any more: with the ranks gone no recorder has anything left to wait for.
        if job is not None:
            job.end()
        raise
    finally:
        injected = tuple(ended(str(fault), injection) for fault, injection in zip(plan.faults, injections, strict=True))
        for name, recorder in reversed(recorders.items()):
            recorded[name] = _stopped(recorder, failures.get(name))
        if job is not None:
            exits = job.end()
    ended_ns = clock.now_ns()
    for problem in suspicions.problems:
        name, _, text = problem.partition(": ")
        one = recorded[name]
        recorded[name] = Recorded(
            files=one.files, cpu_s=one.cpu_s, stopped_s=one.stopped_s, problems=(*one.problems, text), facts=one.facts
        )
    return ArmRecord(plan, folder, started_ns, ended_ns, tuple(exits), recorded, tuple(suspicions.told), injected)


def _python_path(environ: Mapping[str, str]) -> str:
    root = str(Path(__file__).resolve().parent.parent)
    old = environ.get("PYTHONPATH")
    return f"{root}:{old}" if old else root


def wrapped(attached: Sequence[Recorder | Injection], rank: int | None, argv: tuple[str, ...]) -> tuple[str, ...]:
    """The command with what recorders and injections put in front of it, the first one innermost."""
    for one in attached:
        argv = one.wrap(rank, argv)
    return argv


def joined(attached: Sequence[Recorder | Injection | Workload], rank: int | None, own: Mapping[str, str]) -> dict[str, str]:
    """All variables; lists of paths are joined, since several recorders and injections bring one, and the user has his `own`."""
    found: dict[str, list[str]] = {}
    for one in attached:
        for name, value in one.environ(rank).items():
            found[name] = [*found.get(name, ()), *value.split(":")] if name in JOINED else [value]
    for name in JOINED:
        if name in found and own.get(name):
            found[name] += own[name].split(":")
    return {name: ":".join(dict.fromkeys(parts)) for name, parts in found.items()}


def ended(fault: str, injection: Injection) -> Injected:
    """Stop an injection; what it did, or why that cannot be said."""
    try:
        fired = injection.stop()
        return Injected(fault, fired, injection.problems())
    except Exception as error:  # noqa: BLE001  said in the record; the other faults must be undone too
        return Injected(fault, (), (f"did not stop: {type(error).__name__}: {error}",))


def _stopped(recorder: Recorder, failure: str | None) -> Recorded:
    try:
        one = recorder.stop()
    except Exception as error:  # noqa: BLE001  said in the record
        one = Recorded(problems=(f"did not stop: {type(error).__name__}: {error}",))
    if failure is None:
        return one
    return Recorded(
        files=one.files, cpu_s=one.cpu_s, stopped_s=one.stopped_s, problems=(failure, *one.problems), facts=one.facts
    )
