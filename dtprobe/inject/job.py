"""Faults into somebody's unmodified command: checked before anything starts, recorded, undone, and said how often each fired."""

from __future__ import annotations

import itertools
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dtprobe import armrun, catalog, machine, report
from dtprobe.armrun import ArmPlan, ArmRecord, Injected, Workload
from dtprobe.clock import Clock, SystemClock
from dtprobe.confine import Confinement
from dtprobe.doctor import Doctor
from dtprobe.errors import UsageError
from dtprobe.evidence import Evidence
from dtprobe.inject.spec import Fault, parse
from dtprobe.interrupts import interruptible
from dtprobe.judging import gather
from dtprobe.launch.command import Command
from dtprobe.runner import Progress, Silent, default_probes
from dtprobe.store import RunFolder, Store

SCENARIO = "inject"
"""The name under which run folders of injected commands lie."""

ARM = "fault"


@dataclass(frozen=True)
class InjectResult:
    """What became of the command, and of each fault."""

    folder: Path
    exit_code: int | None
    signal: int | None
    timed_out: bool
    injected: tuple[Injected, ...]
    json: Mapping[str, Any] = field(repr=False)

    @property
    def survived(self) -> bool:
        """The command ended by itself and well, and every fault really fired."""
        return self.exit_code == 0 and not self.timed_out and all(one.fired for one in self.injected)


def world_size_of(argv: Sequence[str]) -> int | None:
    """How many ranks a command line asks for, where it is plain: torchrun, mpirun, srun with a number; else None."""
    sizes: dict[str, int] = {}
    names = {
        "--nproc-per-node": "per_node",
        "--nproc_per_node": "per_node",
        "--nnodes": "nodes",
        "-n": "all",
        "-np": "all",
        "--np": "all",
        "--ntasks": "all",
    }
    launcher = Path(argv[0]).name if argv else ""
    module = any("torch.distributed.run" in word or Path(word).name == "torchrun" for word in argv[:4])
    if launcher not in ("mpirun", "mpiexec", "srun", "torchrun") and not module:
        return None
    for word, following in itertools.zip_longest(argv, argv[1:], fillvalue=""):
        name, equals, value = word.partition("=")
        if name in names and (value if equals else following).isdigit():
            sizes.setdefault(names[name], int(value if equals else following))
    if "all" in sizes:
        return sizes["all"] * sizes.get("per_node", 1)
    return sizes["per_node"] * sizes.get("nodes", 1) if "per_node" in sizes else None


def plan(
    texts: Sequence[str], argv: Sequence[str], *, extra: Sequence[Path] = (), environ: Mapping[str, str] = os.environ
) -> tuple[Fault, ...]:
    """The faults, parsed and checked against the command and against each other; nothing is started.

    Raises UsageError for a fault that does not exist or cannot be, a capability that is missing here, two faults that
    contradict each other, or a command that does not exist.
    """
    if not argv:
        raise UsageError(
            "no command to run", "write it behind --: dtprobe inject process:kill,rank=1,after_s=4 -- torchrun ..."
        )
    if shutil.which(argv[0], path=environ.get("PATH")) is None:
        raise UsageError(f"cannot execute {argv[0]}: no such program", "check the command behind --")
    known, broken = catalog.injectors(extra)
    for text in texts:
        name = text.partition(":")[0]
        for one in broken:
            if one.folder.name == name:
                raise UsageError(f"injector {name} is broken: {one.error}")
    faults = tuple(parse(text, known, world_size=world_size_of(argv)) for text in texts)
    for first, second in itertools.combinations(faults, 2):
        if _contradict(first, second):
            raise UsageError(f"faults {str(first)!r} and {str(second)!r} contradict each other", "keep one, or aim them apart")
    doctor = Doctor(environ=environ)
    for fault in faults:
        for need, unmet in doctor.unmet(fault.injector.needs).items():
            raise UsageError(f"fault {str(fault)!r} needs {need}: {unmet.reason}", unmet.remedy)
        if reason := fault.injector.probe():
            raise UsageError(f"fault {str(fault)!r} cannot be injected here: {reason.reason}", reason.remedy)
    return faults


def replayed(folder: Path, *, extra: Sequence[Path] = ()) -> tuple[Fault, ...]:
    """The faults of an earlier run bound to the very calls at which they fired: chance is replaced by what happened.

    Firings at counted calls are repeated call for call; a fault by time, or one that lasts, is repeated as it was written.
    Raises UsageError for a run that holds no injections.
    """
    facts = RunFolder.open(folder).facts
    runs = [one for one in facts.get("arm_runs", []) if one.get("injections")]
    if not runs:
        raise UsageError(f"{folder} holds no injections to replay", "name the run folder of a `dtprobe inject`")
    known, _ = catalog.injectors(extra)
    faults: list[Fault] = []
    for entry in runs[0]["injections"]:
        fault = parse(entry["fault"], known)
        calls: dict[int | None, list[int]] = {}
        for one in entry["fired"]:
            if one["nth"] is not None:
                calls.setdefault(one["rank"], []).append(one["nth"])
        if calls:
            faults += [fault.at(sorted(nth), rank) for rank, nth in sorted(calls.items(), key=lambda item: str(item[0]))]
        elif fault.target.probability is None:
            faults.append(fault)
    return tuple(faults)


def run(
    faults: Sequence[Fault],
    argv: Sequence[str],
    *,
    out: Path,
    seed: int = 0,
    timeout_s: float = 3600,
    progress: Progress | None = None,
    environ: Mapping[str, str] = os.environ,
    clock: Clock | None = None,
    said: Sequence[str] = (),
) -> InjectResult:
    """Run the command under the faults with the default recorders; leave a run folder with its report under `out`."""
    clock = clock or SystemClock()
    progress = progress or Silent()
    workload = Workload(tuple(argv), Path.cwd(), timeout_s, world_size_of(argv))
    step = ArmPlan(ARM, workload, 0, traced=False, probed=True, faults=tuple(faults))
    probes = default_probes()
    unavailable = {probe.name: reason for probe in probes if (reason := probe.probe())}
    store = Store.open(out)
    git = machine.git_state(Path.cwd(), environ=environ)
    facts = {
        "failure_mode": None,
        "seed": seed,
        "argv": machine.without_secrets(said or argv),
        "repeats": 1,
        "world_size": workload.world_size,
        "machine": machine.machine_facts(environ=environ).as_json(),
        "versions": machine.versions(),
        "git": {"commit": git.commit, "dirty": git.dirty} if git else None,
        "arms": {ARM: {"program": argv[0], "args": machine.without_secrets(list(argv[1:])), "env": {}, "timeout_s": timeout_s}},
        "probes": [{"name": probe.name, "heavy": probe.heavy, "config": repr(probe)} for probe in probes],
        "unavailable": {name: {"reason": reason.reason, "remedy": reason.remedy} for name, reason in unavailable.items()},
        "scenario_text": {
            "title": "faults injected into a command",
            "claim": "",
            "source": "",
            "layer": ", ".join(dict.fromkeys(fault.injector.layer for fault in faults)),
            "certifies_not": " ".join(dict.fromkeys(fault.injector.certifies_not for fault in faults)),
            "no_cure_because": "",
        },
    }
    with store.create(SCENARIO, "", facts, started_ns=clock.now_ns()) as folder:
        try:
            with interruptible(), Confinement.open(folder.id) as box:
                progress.begin("inject", 2)
                progress.step(" ".join(argv)[:60])
                record = armrun.execute(
                    box,
                    step,
                    folder=folder.arm_folder(ARM, 0),
                    probes=[probe for probe in probes if probe.name not in unavailable],
                    launcher=Command(),
                    seed=seed,
                    environ=environ,
                    clock=clock,
                )
            progress.step("report")
            folder.update(arm_runs=[record.as_json()])
            evidence = gather(folder.path, workload.world_size, [record], unavailable, seed)
            return _concluded(store, folder, record, evidence, clock)
        except KeyboardInterrupt:
            store.interrupt(folder, now_ns=clock.now_ns)
            raise
        finally:
            progress.end()


def _concluded(store: Store, folder: RunFolder, record: ArmRecord, evidence: Evidence, clock: Clock) -> InjectResult:
    for name, frame in evidence.frames.items():
        folder.write_frame(name, frame)
    command = record.exits[0]
    never = [one.fault for one in record.injected if not one.fired]
    how = (
        f"was still running after {record.plan.workload.timeout_s:g} s and was ended"
        if command.timed_out
        else f"was ended by signal {command.signal}"
        if command.signal is not None
        else f"ended with exit code {command.exit_code}"
    )
    result = InjectResult(folder.path, command.exit_code, command.signal, command.timed_out, record.injected, {})
    because = f"the command {how} after {command.wall_s:.1f} s" + (f"; never fired: {', '.join(never)}" if never else "")
    data: dict[str, Any] = {
        "schema": "dtprobe.injection/1",
        "scenario": SCENARIO,
        "failure_mode": None,
        "verdict": "survived" if result.survived else "not-survived" if not never else "not-fired",
        "mitigation": "none",
        "expected": None,
        "as_expected": result.survived,
        "exit_code": command.exit_code,
        "signal": command.signal,
        "timed_out": command.timed_out,
        "wall_s": command.wall_s,
        "started_ns": record.started_ns,
        "faults": [{**one.as_json(), "count": len(one.fired)} for one in record.injected],
        "suspected": [{"t_ns": t_ns, "reason": reason} for t_ns, reason in record.suspected],
        "metrics": {},
        "because": because,
        "overhead": {},
        "torch": machine.versions().get("torch"),
        "run": folder.id,
    }
    folder.write_verdict(data)
    folder.update(ended_ns=clock.now_ns())
    report.write(folder.path)
    store.finish(folder, now_ns=clock.now_ns)
    return InjectResult(folder.path, command.exit_code, command.signal, command.timed_out, record.injected, data)


def _contradict(first: Fault, second: Fault) -> bool:
    """Whether both would act at the very same place and time, but differently or twice."""
    same_place = (
        first.injector.name == second.injector.name
        and first.target.op == second.target.op
        and first.target.group == second.target.group
        and all(getattr(first.config, key, None) == getattr(second.config, key, None) for key in ("call", "comm"))
        and (first.target.nth, first.target.after_s, first.target.every)
        == (second.target.nth, second.target.after_s, second.target.every)
        and first.target.probability is None
        and second.target.probability is None
    )
    ranks = [fault.target.rank for fault in (first, second)]
    meet = None in ranks or bool(set(ranks[0] or ()) & set(ranks[1] or ()))
    return same_place and meet and (first.action == second.action or first.injector.exclusive)
