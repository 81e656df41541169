"""Somebody's unmodified command under watch: a hang is found, named and bundled while the job lives; then left alone, or ended."""

from __future__ import annotations

import math
import os
import shutil
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from dtprobe import armrun, catalog, machine, report
from dtprobe.armrun import ArmPlan, ArmRecord, Workload
from dtprobe.clock import Clock, SystemClock
from dtprobe.confine import Confinement
from dtprobe.errors import UsageError
from dtprobe.inject.job import world_size_of
from dtprobe.interrupts import interruptible
from dtprobe.judging import gather
from dtprobe.launch.command import Command
from dtprobe.probes.echo import Echo
from dtprobe.probes.hang import Found, HangWatch, Watched
from dtprobe.probes.nccl_calls import NcclCalls
from dtprobe.probes.proc import Proc
from dtprobe.probes.pyspy import PySpy
from dtprobe.probes.stall import UNLIMITED_MS
from dtprobe.scenario import Probe
from dtprobe.store import RunFolder, Store
from dtprobe.store.files import write_json

SCENARIO = "watch"
"""The name under which run folders of watched commands lie."""

ARM = "control"
SCHEMA = "dtprobe.watch/1"


@dataclass(frozen=True)
class WatchResult:
    """What became of the command, and the hangs that were found."""

    folder: Path
    exit_code: int | None
    hang: bool
    json: Mapping[str, Any] = field(repr=False)

    @property
    def well(self) -> bool:
        """No hang, and the command ended by itself and well."""
        return not self.hang and self.exit_code == 0


class Teller(Protocol):
    """Is told while the watch goes on: `hang` when one is confirmed, `resumed` when its operation completes after all."""

    def hang(self, found: Found) -> None: ...

    def resumed(self, found: Found) -> None: ...


def check(argv: Sequence[str], suspect_s: float, environ: Mapping[str, str] = os.environ) -> None:
    """Raise UsageError for what cannot be watched."""
    if not argv:
        raise UsageError("no command to watch", "write it behind --: dtprobe watch -- torchrun --nproc-per-node=2 train.py")
    if shutil.which(argv[0], path=environ.get("PATH")) is None:
        raise UsageError(f"cannot execute {argv[0]}: no such program", "check the command behind --")
    if not (suspect_s > 0 and math.isfinite(suspect_s)):
        raise UsageError(
            f"--suspect-s {suspect_s:g}: a hang cannot be suspected after so long", "give a number of seconds above 0"
        )


def recorders(watched: Watched, suspect_s: float, environ: Mapping[str, str] = os.environ) -> tuple[Probe, ...]:
    """What a watch records with. The last one takes the bundle: it is told of a hang when the others have taken theirs.

    NCCL's calls are recorded where a libnccl is that the job may use.
    """
    calls = _nccl_calls(environ)
    return (Proc(hz=1), PySpy(), *((calls,) if calls else ()), HangWatch(watched=watched, suspect_s=suspect_s))


def _nccl_calls(environ: Mapping[str, str]) -> NcclCalls | None:
    injectors, _ = catalog.injectors()
    if "nccl" not in injectors:
        return None
    nccl = sys.modules[injectors["nccl"].make.__module__]
    return NcclCalls(library=nccl.build.shim(environ)) if nccl.libraries(environ) else None


def run(
    argv: Sequence[str],
    *,
    out: Path,
    suspect_s: float = 15.0,
    end: bool = False,
    timeout_s: float = math.inf,
    teller: Teller,
    echo: Echo | None = None,
    environ: Mapping[str, str] = os.environ,
    clock: Clock | None = None,
    said: Sequence[str] = (),
) -> WatchResult:
    """Run the command and watch it until it ends, or (`end`) until the evidence of a hang is taken; leave a run folder under `out`.

    `echo` passes its output on, which otherwise goes to the run folder only.
    Raises UsageError for a command that does not exist.
    """
    check(argv, suspect_s, environ)
    clock = clock or SystemClock()
    ended = threading.Event()
    workload = Workload(tuple(argv), Path.cwd(), timeout_s, world_size_of(argv))
    store = Store.open(out)
    watched = Watched(told=teller.hang, resumed=teller.resumed, bundled=lambda: None)
    probes = (*((echo,) if echo is not None else ()), *recorders(watched, suspect_s, environ))
    unavailable = {probe.name: reason for probe in probes if (reason := probe.probe())}
    git = machine.git_state(Path.cwd(), environ=environ)
    facts: dict[str, Any] = {
        "failure_mode": None,
        "seed": 0,
        "argv": machine.without_secrets(said or argv),
        "repeats": 1,
        "world_size": workload.world_size,
        "machine": machine.machine_facts(environ=environ).as_json(),
        "versions": machine.versions(),
        "git": {"commit": git.commit, "dirty": git.dirty} if git else None,
        "arms": {
            ARM: {
                "program": argv[0],
                "args": machine.without_secrets(list(argv[1:])),
                "env": {},
                "timeout_s": timeout_s if math.isfinite(timeout_s) else None,
            }
        },
        "probes": [{"name": probe.name, "heavy": probe.heavy, "config": repr(probe)} for probe in probes],
        "unavailable": {name: {"reason": reason.reason, "remedy": reason.remedy} for name, reason in unavailable.items()},
        "scenario_text": {
            "title": "a command under watch",
            "claim": "",
            "source": "",
            "layer": "c10d",
            "certifies_not": "A hang outside collectives (a store, a data loader, send and receive on gloo) is not looked for.",
            "no_cure_because": "",
        },
    }
    with store.create(SCENARIO, "", facts, started_ns=clock.now_ns()) as folder:
        try:
            with interruptible(), Confinement.open(folder.id) as box:
                if end:
                    watched.bundled = _ender(box, ended)
                record = armrun.execute(
                    box,
                    ArmPlan(ARM, workload, 0, traced=False, probed=True),
                    folder=folder.arm_folder(ARM, 0),
                    probes=[probe for probe in probes if probe.name not in unavailable],
                    launcher=Command(),
                    seed=0,
                    environ=environ,
                    clock=clock,
                )
            folder.update(arm_runs=[record.as_json()])
            evidence = gather(folder.path, workload.world_size, [record], unavailable, 0)
            for name, frame in evidence.frames.items():
                folder.write_frame(name, frame)
            blind = [f"{name}: {reason}" for name, reason in unavailable.items()] + _blind(record)
            return _concluded(store, folder, record, watched, blind, ended.is_set(), clock)
        except KeyboardInterrupt:
            store.interrupt(folder, now_ns=clock.now_ns)
            raise


def _ender(box: Confinement, ended: threading.Event) -> Callable[[], None]:
    def finish() -> None:
        ended.set()
        box.problems += box.kill_all()

    return finish


def _blind(record: ArmRecord) -> list[str]:
    """What a watch could not see of the job, in words."""
    ranks = sorted(record.folder.glob("rank*/process.json"))
    if not ranks:
        return [
            "no rank was found: the command started no Python with RANK (or an MPI launcher's variable) set, so no collective "
            "could be watched"
        ]
    if not any(record.folder.glob("rank*/fr-*.json")) and not any(record.folder.glob("rank*/nccl-*.ring")):
        return ["no rank recorded a collective: nothing could be watched"]
    return []


def _concluded(
    store: Store, folder: RunFolder, record: ArmRecord, watched: Watched, blind: Sequence[str], ended: bool, clock: Clock
) -> WatchResult:
    command = record.exits[0]
    hangs = [_as_json(one) for one in watched.hangs]
    how = (
        "was ended when the evidence had been taken"
        if ended
        else f"was still running after {record.plan.workload.timeout_s:g} s and was ended"
        if command.timed_out
        else f"was ended by signal {command.signal}"
        if command.signal is not None
        else f"ended with exit code {command.exit_code}"
    )
    count = f"{len(hangs)} hang{'s' * (len(hangs) > 1)} suspected" if hangs else "no hang suspected"
    because = f"{count}; the command {how} after {command.wall_s:.1f} s"
    first = hangs[0] if hangs else {}
    data: dict[str, Any] = {
        "schema": SCHEMA,
        "hang": bool(hangs),
        "suspects": first.get("suspects", []),
        "reason": first.get("reason", ""),
        "hangs": hangs,
        "waits": dict(watched.waits),
        "blind": list(blind),
        "unavailable": {name: {"reason": one.reason, "remedy": one.remedy} for name, one in watched.missing.items()},
        "exit_code": command.exit_code,
        "signal": command.signal,
        "timed_out": command.timed_out,
        "ended_by_watch": ended,
        "wall_s": command.wall_s,
        "because": because,
        "run": folder.id,
    }
    write_json(folder.path / "watch.json", data)
    result = WatchResult(folder.path, command.exit_code, bool(hangs), data)
    folder.write_verdict(
        {
            "schema": "dtprobe.verdict/1",
            "scenario": SCENARIO,
            "failure_mode": None,
            "verdict": "hang" if hangs else "ended-well" if result.well else "failed",
            "mitigation": "none",
            "expected": None,
            "as_expected": result.well,
            "metrics": {},
            "because": "; ".join([because, *(f"{one['collective']['text']}: {one['reason']}" for one in hangs)]),
            "overhead": {},
            "torch": machine.versions().get("torch"),
            "run": folder.id,
        }
    )
    folder.update(ended_ns=clock.now_ns())
    report.write(folder.path)
    store.finish(folder, now_ns=clock.now_ns)
    return result


def _as_json(found: Found) -> dict[str, Any]:
    hang = found.hang
    return {
        "kind": str(hang.kind),
        "suspects": "all" if hang.suspects is None else list(hang.suspects),
        "reason": hang.because,
        "collective": {
            "text": str(hang.operation),
            "name": hang.operation.name,
            "group": hang.operation.group_desc or hang.operation.group,
            "seq": hang.operation.seq,
            "sizes": hang.operation.sizes,
            "timeout_ms": hang.operation.timeout_ms if hang.operation.timeout_ms < UNLIMITED_MS else None,
        },
        "waiting": list(hang.waiting),
        "ranks": {str(rank): text for rank, text in hang.ranks.items()},
        "t_ns": found.t_ns,
        "open_s": round(found.open_s, 3),
        "confirmed_after_s": round(found.confirmed_s, 3),
    }
