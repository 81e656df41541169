"""The cluster as a job would find it: every rank of the user's own launcher joins, measures and compares; rank 0 reports.

`run` is what `dtprobe doctor --cluster` calls on each rank. Importing this package imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping

from dtprobe.doctor.cluster.verdict import SCHEMA, ClusterReport, Problem
from dtprobe.errors import UsageError

__all__ = ["SCHEMA", "ClusterReport", "Problem", "run"]


def run(*, environ: MutableMapping[str, str], deadline_s: float, show: Callable[[ClusterReport], None]) -> int:
    """`worker.run` in this process's environment; raises UsageError where torch cannot do it. Call it before torch is imported.

    torch's C++ layer prints a backtrace for each lost connection, on every rank. The report says the same in one line, so
    its warnings are switched off, unless `environ` says what is wanted.
    """
    left_by_launcher = dict(environ)
    environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    from dtprobe.framework import bootstrap

    unavailable = bootstrap.probe()
    if unavailable is not None:
        raise UsageError(unavailable.reason, unavailable.remedy)
    from dtprobe.doctor.cluster import worker

    return worker.run(environ=left_by_launcher, deadline_s=deadline_s, show=show)
