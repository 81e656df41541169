"""dtprobe: reproduce, inject, explain and cure failures of distributed PyTorch jobs.

The public face. Names are loaded when they are first used, so that `import dtprobe` costs next to nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dtprobe.errors import DtprobeError, Unavailable, UsageError
    from dtprobe.evidence import Evidence
    from dtprobe.probes.bpf import Bpf as bpf
    from dtprobe.probes.flight_recorder import FlightRecorder as flight_recorder
    from dtprobe.probes.inotify import Inotify as inotify
    from dtprobe.probes.logs import Logs as logs
    from dtprobe.probes.nsys import Nsys as nsys
    from dtprobe.probes.perf import Perf as perf
    from dtprobe.probes.proc import Proc as proc
    from dtprobe.probes.pyspy import PySpy as pyspy
    from dtprobe.probes.strace import Strace as strace
    from dtprobe.scenario import Arm, Estimate, Metric, Mitigation, Scenario, Verdict, VerdictKind
    from dtprobe.worker import attempt, record

__version__ = "0.1.0"

pytest_plugins = ("dtprobe.suite.plugin",)
"""What `pytest -p dtprobe` loads: pytest reads this name of a plugin (its documentation, "Requiring/Loading plugins")."""

_HOMES = {
    "DtprobeError": "errors",
    "Unavailable": "errors",
    "UsageError": "errors",
    "Evidence": "evidence",
    "Arm": "scenario",
    "Estimate": "scenario",
    "Metric": "scenario",
    "Mitigation": "scenario",
    "Scenario": "scenario",
    "Verdict": "scenario",
    "VerdictKind": "scenario",
    "bpf": "probes.bpf:Bpf",
    "flight_recorder": "probes.flight_recorder:FlightRecorder",
    "inotify": "probes.inotify:Inotify",
    "logs": "probes.logs:Logs",
    "nsys": "probes.nsys:Nsys",
    "perf": "probes.perf:Perf",
    "proc": "probes.proc:Proc",
    "pyspy": "probes.pyspy:PySpy",
    "strace": "probes.strace:Strace",
    "attempt": "worker",
    "record": "worker",
}

__all__ = [
    "Arm",
    "DtprobeError",
    "Estimate",
    "Evidence",
    "Metric",
    "Mitigation",
    "Scenario",
    "Unavailable",
    "UsageError",
    "Verdict",
    "VerdictKind",
    "attempt",
    "bpf",
    "flight_recorder",
    "inotify",
    "logs",
    "nsys",
    "perf",
    "proc",
    "pyspy",
    "record",
    "strace",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'dtprobe' has no attribute {name!r}")
    module, _, attribute = home.partition(":")
    return getattr(import_module(f"dtprobe.{module}"), attribute or name)
