"""The dashboard: Grafana's structure, and queries that give something where a real Prometheus holds our metrics."""

from __future__ import annotations

import functools
import itertools
import json
import re
import threading
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from dtprobe.signals import metrics
from dtprobe.signals.serve import Exporter
from dtprobe.suite import Ran

CHOSEN = {"$instance": ".*", "$scenario": ".*"}


class Silent:
    def begin(self, total): ...
    def started(self, scenario): ...
    def ended(self, row): ...
    def end(self): ...


@pytest.fixture
def dashboard(reports):
    (file,) = (reports / "dashboards").glob("*.json")
    return json.loads(file.read_text())


def expressions(dashboard):
    """What is asked, by panel, with the variables chosen as All."""
    found = [(panel["title"], target["expr"]) for panel in dashboard["panels"] for target in panel.get("targets", ())]
    for title, text in found:
        asked = functools.reduce(lambda asked, name: asked.replace(name, CHOSEN[name]), CHOSEN, text)
        assert "$" not in asked, asked
        yield title, asked


def test_panels_have_places_ids_and_the_chosen_data_source(dashboard):
    assert dashboard["schemaVersion"] >= 36 and dashboard["uid"] and dashboard["title"] and "id" not in dashboard
    panels = dashboard["panels"]
    assert len({one["id"] for one in panels}) == len(panels)
    for one, other in itertools.combinations([panel["gridPos"] for panel in panels], 2):
        apart = (
            one["x"] + one["w"] <= other["x"]
            or other["x"] + other["w"] <= one["x"]
            or one["y"] + one["h"] <= other["y"]
            or other["y"] + other["h"] <= one["y"]
        )
        assert apart, (one, other)
    for panel in panels:
        assert panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24 and panel["title"]
        if panel["type"] == "row":
            continue
        assert panel["description"] and panel["targets"] and panel["fieldConfig"]["defaults"]["unit"]
        assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"])
        for asked in (panel, *panel["targets"]):
            assert asked["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
    variables = {one["name"]: one for one in dashboard["templating"]["list"]}
    assert variables["datasource"]["type"] == "datasource" and variables["datasource"]["query"] == "prometheus"
    assert {name.removeprefix("$") for name in CHOSEN} | {"datasource"} == set(variables)


def test_it_asks_only_for_metrics_that_are_exported(dashboard, rich):
    exporter = Exporter(0, Silent(), budget_s=1.0)
    exporter.begin(1)
    exporter.started("a")
    exported = {sample.name for family in [*metrics.families(rich), *exporter.collect()] for sample in family.samples}
    asked = set(re.findall(r"\bdtprobe_\w+", json.dumps(dashboard)))
    assert asked and asked <= exported, asked - exported


@pytest.mark.nightly
@pytest.mark.needs("prometheus")
def test_every_query_gives_something_of_a_night_that_has_something_of_everything(dashboard, kit, rich, tmp_path):
    class Page(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.end_headers()
            self.wfile.write(metrics.exposition(metrics.families(rich)))

        def log_message(self, *_):
            pass

    with ExitStack() as stack:
        page = stack.enter_context(ThreadingHTTPServer(("127.0.0.1", 0), Page))
        threading.Thread(target=page.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        stack.callback(page.shutdown)
        exporter = stack.enter_context(Exporter(0, Silent(), budget_s=60))
        exporter.begin(2)
        exporter.started("a")
        exporter.ended(Ran(scenario="b", status="as-expected"))
        jobs = {"node": page.server_port, "dtprobe-night": exporter.port}
        server = stack.enter_context(kit.prometheus(tmp_path, jobs))
        kit.until(lambda: server.value("sum(up)") == 2, "both are scraped")
        empty = [(title, text) for title, text in expressions(dashboard) if not server.query(text)]
        assert not empty
        (status,) = [text for title, text in expressions(dashboard) if title == "Status of each scenario"]
        assert {labels["scenario"]: value for labels, value in server.query(status)} == {
            "as-expected-one": 0,
            "flaky-one": 2,
            "not-as-expected-one": 3,
            "broken-one": 3,
            "failed-one": 3,
        }
        for note in dashboard["annotations"]["list"]:
            server.query(note["expr"].replace("$instance", ".*"))
