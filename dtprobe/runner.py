"""Arms x repeats -> evidence -> verdict -> run folder."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol
from zlib import crc32

from dtprobe import armrun, catalog, judging, launch, machine
from dtprobe.armrun import ArmPlan, ArmRecord, Workload
from dtprobe.clock import Clock, SystemClock
from dtprobe.confine import Confinement
from dtprobe.doctor import Doctor
from dtprobe.errors import Unavailable, UsageError
from dtprobe.inject.spec import Fault, parse
from dtprobe.interrupts import interruptible
from dtprobe.judging import RunResult
from dtprobe.probes.flight_recorder import FlightRecorder
from dtprobe.probes.logs import Logs
from dtprobe.probes.proc import Proc
from dtprobe.probes.pyspy import PySpy
from dtprobe.scenario import ARMS, Arm, Probe, Scenario
from dtprobe.store import Store

COST_PAIRS = 2
"""Bare runs of the control arm, each beside a probed one, from which the recorders' cost is estimated."""

BARE = "bare"


class Progress(Protocol):
    """Where a long run says how far it is."""

    def begin(self, title: str, steps: int) -> None: ...

    def step(self, what: str) -> None: ...

    def end(self) -> None: ...


class Silent:
    """Progress that nobody watches."""

    def begin(self, title: str, steps: int) -> None:
        pass

    def step(self, what: str) -> None:
        pass

    def end(self) -> None:
        pass


def run(
    scenario: Scenario,
    *,
    out: Path,
    repeats: int | None = None,
    seed: int = 0,
    arms: Sequence[str] | None = None,
    world_size: int | None = None,
    launcher: str | None = None,
    progress: Progress | None = None,
    cost_pairs: int = COST_PAIRS,
    environ: Mapping[str, str] = os.environ,
    clock: Clock | None = None,
    argv: Sequence[str] = (),
    belongs: Mapping[str, object] | None = None,
) -> RunResult:
    """Run a scenario's arms in turn, record them, judge them, and leave a run folder under `out` with its report.

    `arms` restricts what runs (the verdict is then `inconclusive`, since the rule of three arms cannot be met). A scenario
    whose needs are not met is not run: its verdict is `unsupported` with the reason. So it is where another `world_size` or
    `launcher` than its own would make another scenario of it.
    `belongs` are further entries of `run.json`: the night that the run is part of.
    Raises UsageError for arguments that cannot be, DtprobeError when the harness itself fails; KeyboardInterrupt passes
    through after everything has been ended and the folder marked as interrupted.
    """
    clock = clock or SystemClock()
    own, scenario = scenario, _adjusted(scenario, arms, repeats, world_size, launcher)
    misfits = misfit(own, scenario)
    chosen = tuple(arm for arm in scenario.arms if not arms or arm in arms)
    faults = {name: faults_of(scenario, arm) for name, arm in scenario.arms.items()} if not misfits else {}
    probes = probes_of(scenario)
    unavailable = {probe.name: reason for probe in probes if (reason := probe.probe())}
    usable = [probe for probe in probes if probe.name not in unavailable]
    plan = schedule(scenario, chosen, any(probe.heavy for probe in usable), faults, cost_pairs)
    unmet = {**misfits, **Doctor(environ=environ).unmet(scenario.needs)}
    store = Store.open(out)
    facts = run_facts(scenario, seed=seed, argv=argv, probes=probes, unavailable=unavailable, environ=environ)
    facts = {**facts, "launch": scenario.launch, **(belongs or {})}
    with store.create(scenario.name, scenario.variant, facts, started_ns=clock.now_ns()) as run_folder:
        if unmet:
            return judging.conclude(store, run_folder, scenario, judging.unsupported(unmet), seed=seed, clock=clock)
        progress = progress or Silent()
        records: list[ArmRecord] = []
        try:
            with interruptible(), Confinement.open(run_folder.id) as box:
                progress.begin(scenario.id, len(plan) + 1)
                for step in plan:
                    progress.step(step.label)
                    records.append(
                        armrun.execute(
                            box,
                            step,
                            folder=run_folder.arm_folder(step.arm_folder, step.repeat),
                            probes=[probe for probe in usable if step.probed and (step.traced or not probe.heavy)],
                            launcher=launch.named(scenario.launch),
                            seed=seed,
                            environ=environ,
                            clock=clock,
                        )
                    )
                    run_folder.update(arm_runs=[record.as_json() for record in records], **armrun.hosts_json(records))
            progress.step("evidence, verdict, report")
            evidence = judging.gather(run_folder.path, scenario.world_size, records, unavailable, seed)
            for name, frame in evidence.frames.items():
                run_folder.write_frame(name, frame)
            verdict = judging.verdict_of(scenario, evidence, chosen)
            overhead = judging.overhead(records, evidence)
            return judging.conclude(store, run_folder, scenario, verdict, overhead=overhead, seed=seed, clock=clock)
        except KeyboardInterrupt:
            store.interrupt(run_folder, now_ns=clock.now_ns)
            raise
        finally:
            progress.end()


def run_facts(
    scenario: Scenario,
    *,
    seed: int,
    argv: Sequence[str],
    probes: Sequence[Probe],
    unavailable: Mapping[str, Unavailable],
    environ: Mapping[str, str],
) -> dict[str, object]:
    """What `run.json` says of a run before it starts."""
    git = machine.git_state(scenario.folder, environ=environ)
    return {
        "failure_mode": scenario.failure_mode,
        "seed": seed,
        "argv": machine.without_secrets(argv),
        "repeats": scenario.repeats,
        "world_size": scenario.world_size,
        "machine": machine.machine_facts(environ=environ).as_json(),
        "versions": machine.versions(),
        "git": {"commit": git.commit, "dirty": git.dirty} if git else None,
        "scenario_text": {
            name: getattr(scenario, name) for name in ("title", "claim", "source", "layer", "certifies_not", "no_cure_because")
        },
        "arms": {
            name: {
                "program": arm.program,
                "args": list(arm.args),
                "env": dict(arm.env),
                "timeout_s": arm.timeout_s or scenario.timeout_s,
                "faults": list(arm.faults),
            }
            for name, arm in scenario.arms.items()
        },
        "probes": [{"name": probe.name, "heavy": probe.heavy, "config": repr(probe)} for probe in probes],
        "unavailable": {name: {"reason": reason.reason, "remedy": reason.remedy} for name, reason in unavailable.items()},
    }


def default_probes() -> tuple[Probe, ...]:
    """The light recorders that every run has."""
    return (Logs(), Proc(), FlightRecorder(), PySpy())


def probes_of(scenario: Scenario) -> tuple[Probe, ...]:
    """The recorders of a run: the default ones, each replaced by the scenario's own of that name, and the scenario's others."""
    own = {probe.name: probe for probe in scenario.probes}
    kept = [probe for probe in default_probes() if probe.name not in own]
    return (*kept, *own.values())


def faults_of(scenario: Scenario, arm: Arm) -> tuple[Fault, ...]:
    """The arm's injections, parsed; raises UsageError for one that does not exist or cannot be."""
    if not arm.faults:
        return ()
    known, _ = catalog.injectors()
    return tuple(parse(text, known, world_size=scenario.world_size) for text in arm.faults)


def schedule(
    scenario: Scenario,
    arms: Sequence[str],
    heavy: bool,
    faults: Mapping[str, tuple[Fault, ...]],
    cost_pairs: int = COST_PAIRS,
) -> list[ArmPlan]:
    """What runs, in order: repeats outermost, so that slow drift of the machine touches all arms alike.

    The last repeat is the traced one when a heavy recorder is there. Bare control runs, `cost_pairs` of them at most, stand
    right beside probed ones, before and after in turn; which comes first differs between scenarios, so that one pair of each shows no order.
    """
    before = crc32(scenario.id.encode()) % 2
    plan: list[ArmPlan] = []
    for repeat in range(scenario.repeats):
        traced = heavy and repeat == scenario.repeats - 1
        probed = [
            ArmPlan(
                arm, Workload.of(scenario, scenario.arms[arm]), repeat, traced=traced, probed=True, faults=faults.get(arm, ())
            )
            for arm in ARMS
            if arm in arms
        ]
        if "control" in arms and scenario.measures_cost and repeat < cost_pairs and not traced:
            bare = ArmPlan(
                "control",
                Workload.of(scenario, scenario.control),
                repeat,
                traced=False,
                probed=False,
                faults=faults.get("control", ()),
            )
            probed.insert((repeat + before) % 2, bare)
        plan.extend(probed)
    return plan


def world_size_limit(cores: int, available_bytes: int) -> int:
    """The most ranks this machine is asked to hold: 16 a core, and half a gigabyte of free memory for each.

    A rank that imports torch takes about 250 MB of its own (measured: `ps` of an idle gloo rank, torch 2.13 CPU).
    """
    return max(2, min(16 * cores, available_bytes // (512 << 20)))


def misfit(own: Scenario, adjusted: Scenario) -> dict[str, Unavailable]:
    """Why a scenario cannot have another world size or launcher than its own, by what it would need; empty where it can.

    A scenario that runs `local` says nothing of launchers, so that its ranks may be started by another one; any other was chosen by
    its author as part of the failure. A scenario of one rank starts its processes itself.
    """
    found = {}
    if adjusted.launch != own.launch:
        needs = f"launcher {adjusted.launch}"
        missing = launch.named(adjusted.launch).probe()
        if own.launch != "local":
            found[needs] = Unavailable(f"{own.id} is about launcher {own.launch}", "leave --launcher out for it")
        elif not own.control.program.endswith(".py"):
            found[needs] = Unavailable(
                f"{own.id} runs {own.control.program}, which starts ranks itself", "leave --launcher out for it"
            )
        elif own.world_size == 1:
            found[needs] = Unavailable(f"{own.id} is one process that starts others itself", "leave --launcher out for it")
        elif missing is not None:
            found[needs] = missing
    if adjusted.world_size != own.world_size:
        needs = f"world size {adjusted.world_size}"
        if own.world_size == 1:
            found[needs] = Unavailable(f"{own.id} is one process that starts others itself", "leave --world-size out for it")
        else:
            try:
                for arm in adjusted.arms.values():
                    faults_of(adjusted, arm)
            except UsageError as error:
                found[needs] = Unavailable(error.message, f"give {own.world_size} or more")
    return found


def _adjusted(
    scenario: Scenario, arms: Sequence[str] | None, repeats: int | None, world_size: int | None, launcher: str | None
) -> Scenario:
    for arm in arms or ():
        if arm not in scenario.arms:
            raise UsageError(f"scenario {scenario.id} has no arm {arm!r}", f"its arms are {', '.join(scenario.arms)}")
    if repeats is not None and not 1 <= repeats <= 1000:
        raise UsageError(f"--repeats {repeats} is out of range", "use 1 to 1000")
    size = scenario.world_size if world_size is None else world_size
    import psutil

    limit = world_size_limit(os.cpu_count() or 1, psutil.virtual_memory().available)
    if not 1 <= size <= limit:
        raise UsageError(
            f"world size {size} is out of range for {scenario.id}",
            f"this machine ({os.cpu_count()} cores, {psutil.virtual_memory().available >> 30} GiB free) holds 1 to {limit}",
        )
    if launcher is not None:
        launch.named(launcher)
    return replace(scenario, repeats=repeats or scenario.repeats, world_size=size, launch=launcher or scenario.launch)
