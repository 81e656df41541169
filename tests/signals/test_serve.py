"""A night in progress over HTTP, as a real Prometheus sees it begin, move and end."""

from __future__ import annotations

import socket
from contextlib import ExitStack

import pytest

from dtprobe.errors import UsageError
from dtprobe.signals.night import Signals
from dtprobe.signals.serve import Exporter
from dtprobe.suite import Ran


class Heard:
    """A follower that keeps what it is told."""

    def __init__(self):
        self.heard = []

    def begin(self, total):
        self.heard.append(total)

    def started(self, scenario):
        self.heard.append(scenario)

    def ended(self, row):
        self.heard.append(row.status)

    def end(self):
        self.heard.append("end")


def test_the_follower_behind_it_hears_all_of_it(kit):
    heard = Heard()
    with Exporter(0, heard) as exporter:
        assert b"dtprobe_night_running 0.0" in kit.answer(exporter.url)
        exporter.begin(2)
        exporter.started("a")
        exporter.ended(Ran(scenario="a", status="flaky"))
        exporter.ended(Ran(scenario="b", status="of tomorrow"))
        text = kit.answer(exporter.url)
        exporter.started("a#2")
        exporter.ended(Ran(scenario="a", status="as-expected", number=1))
        assert b"running_scenario_start_timestamp_seconds{" not in kit.answer(exporter.url), "the second run of a ended"
        assert b"planned_runs 3.0" in kit.answer(exporter.url), "a run again is one more than planned"
        assert b'ended_runs{status="flaky"} 1.0' in text and b'ended_runs{status="of tomorrow"} 1.0' in text
        exporter.end()
        assert b"dtprobe_running_" not in kit.answer(exporter.url)
    assert heard.heard == [2, "a", "flaky", "of tomorrow", "a#2", "as-expected", "end"]


def test_only_loopback_is_bound_and_the_port_is_free_afterwards(kit):
    with Exporter(0, Heard()) as exporter:
        port = exporter.port
        with pytest.raises(OSError), socket.create_connection(("127.0.0.2", port), timeout=5):
            pass
    with Exporter(port, Heard()) as again:
        kit.answer(again.url)


def test_a_taken_port_is_one_line_and_no_port_is_asked_for_in_vain(kit):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UsageError, match=f"--metrics-port {port}: .*in use"), Signals(port=port).following(Heard()):
            pass
    for port in (-1, 65536):
        with pytest.raises(UsageError, match=f"--metrics-port {port}: no port"):
            Signals(port=port).check()


def test_nothing_is_served_where_no_port_is_asked_for():
    heard = Heard()
    with Signals().following(heard) as (follower, url):
        assert follower is heard and url == ""


@pytest.mark.needs("prometheus")
def test_a_real_prometheus_sees_the_night_move_and_its_series_go_stale_at_its_end(kit, tmp_path):
    with ExitStack() as stack:
        night = stack.enter_context(ExitStack())
        exporter = night.enter_context(Exporter(0, Heard(), budget_s=2400))
        server = stack.enter_context(kit.prometheus(tmp_path, {"dtprobe-night": exporter.port}))
        exporter.begin(3)
        exporter.started("a")
        exporter.started("b")
        kit.until(lambda: server.value("dtprobe_running_active_runs") == 2, "two run")
        since = server.query("dtprobe_running_scenario_start_timestamp_seconds <= bool time()")
        assert sorted((labels["scenario"], past) for labels, past in since) == [("a", 1.0), ("b", 1.0)]
        assert server.value("dtprobe_running_planned_runs") == 3 and server.value("dtprobe_running_budget_seconds") == 2400
        exporter.ended(Ran(scenario="a", status="as-expected"))
        kit.until(lambda: server.value('dtprobe_running_ended_runs{status="as-expected"}') == 1, "one ended")
        kit.until(
            lambda: (
                [labels for labels, _ in server.query("dtprobe_running_scenario_start_timestamp_seconds")]
                == [{"scenario": "b"}]
            ),
            "one runs",
        )
        night.close()
        kit.until(lambda: server.value("up") == 0, "Prometheus did not notice the end")
        # Without a mark of staleness the last value of each would stand for five minutes.
        assert server.query('{__name__=~"dtprobe_.+"}') == []
