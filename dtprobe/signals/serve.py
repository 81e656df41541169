"""A night in progress over HTTP on loopback: a real Prometheus scrapes it, and its series go stale when the night ends.

These names differ from those of a night that ended (`metrics`): both may be scraped, and no query mixes them by accident.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable
from types import TracebackType
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from dtprobe.clock import Clock, SystemClock
from dtprobe.errors import UsageError
from dtprobe.signals.metrics import STATUSES, gauge, gauges

if TYPE_CHECKING:
    from dtprobe.suite import Follower, Ran

LOOPBACK = "127.0.0.1"
_NS = 1e9


class Exporter(Collector):
    """A follower of a suite that serves what it is told at `http://127.0.0.1:<port>/metrics`, and tells `then` the same.

    A context manager: the port is bound on entry (0 takes a free one), and freed on exit. Raises UsageError where it is taken.
    """

    def __init__(self, port: int, then: Follower, *, budget_s: float | None = None, clock: Clock | None = None) -> None:
        self._wanted = port
        self._then = then
        self._budget_s = budget_s
        self._clock = clock or SystemClock()
        self._lock = threading.Lock()
        self._began_s: float | None = None
        self._total = 0
        self._running: dict[str, float] = {}
        self._ended: Counter[str] = Counter()
        self._moved_s = 0.0
        self.port = 0

    def __enter__(self) -> Exporter:
        registry = CollectorRegistry(auto_describe=False)
        registry.register(self)
        try:
            self._server, self._thread = start_http_server(self._wanted, addr=LOOPBACK, registry=registry)
        except (OSError, OverflowError) as error:
            raise UsageError(
                f"--metrics-port {self._wanted}: {getattr(error, 'strerror', None) or error}", "name a free port, or 0 for any"
            ) from error
        self.port = self._server.server_port
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    @property
    def url(self) -> str:
        return f"http://{LOOPBACK}:{self.port}/metrics"

    def _now_s(self) -> float:
        return self._clock.now_ns() / _NS

    def begin(self, total: int) -> None:
        with self._lock:
            self._total = total
            self._began_s = self._moved_s = self._now_s()
        self._then.begin(total)

    def started(self, scenario: str) -> None:
        with self._lock:
            self._running.setdefault(scenario, self._now_s())
        self._then.started(scenario)

    def ended(self, row: Ran) -> None:
        from dtprobe.suite.plugin import item_name

        with self._lock:
            self._running.pop(item_name(row.scenario, row.number), None)
            self._ended[row.status] += 1
            self._moved_s = self._now_s()
        self._then.ended(row)

    def end(self) -> None:
        with self._lock:
            self._running.clear()
            self._began_s = None
        self._then.end()

    def collect(self) -> Iterable[Metric]:
        with self._lock:
            began_s, running, ended = self._began_s, dict(self._running), dict(self._ended)
            total, moved_s = self._total, self._moved_s
        yield gauge("dtprobe_night_running", "1 while a night runs.", float(began_s is not None))
        if began_s is None:
            return
        yield gauge("dtprobe_running_start_timestamp_seconds", "When the night that runs began.", began_s)
        yield gauge("dtprobe_running_progress_timestamp_seconds", "When a run ended last, or the night began.", moved_s)
        yield gauge(
            "dtprobe_running_planned_runs",
            "Runs of scenarios in the night that runs, with those that are repeated so far.",
            max(total, sum(ended.values()) + len(running)),
        )
        yield gauge("dtprobe_running_active_runs", "Scenarios that run now, or were handed to an engine.", len(running))
        yield gauges(
            "dtprobe_running_ended_runs",
            "Runs that ended, by what became of them.",
            ("status",),
            (((status,), ended.get(status, 0)) for status in (*STATUSES, *sorted(ended.keys() - set(STATUSES)))),
        )
        yield gauges(
            "dtprobe_running_scenario_start_timestamp_seconds",
            "When a scenario that runs now was started; `name#2` is its second run.",
            ("scenario",),
            (((name,), since) for name, since in running.items()),
        )
        if self._budget_s is not None:
            yield gauge("dtprobe_running_budget_seconds", "How long the night that runs may take.", self._budget_s)
