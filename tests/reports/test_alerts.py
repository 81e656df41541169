"""The alert rules: checked and unit-tested by promtool, over metrics that exist, each rule held by a test."""

from __future__ import annotations

import re
import shutil
import subprocess

import pytest
import yaml

from dtprobe.signals import metrics
from dtprobe.signals.serve import Exporter


class Silent:
    def begin(self, total): ...
    def started(self, scenario): ...
    def ended(self, row): ...
    def end(self): ...


@pytest.fixture
def alerts(reports):
    (group,) = yaml.safe_load((reports / "alerts" / "dtprobe.yml").read_text())["groups"]
    return group["rules"]


def promtool(*words, cwd):
    return subprocess.run(["promtool", *words], cwd=cwd, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.needs("prometheus")
def test_promtool_accepts_the_rules_and_their_unit_tests(reports):
    folder = reports / "alerts"
    for words in (("check", "rules", "dtprobe.yml"), ("test", "rules", "dtprobe_test.yml")):
        done = promtool(*words, cwd=folder)
        assert done.returncode == 0 and "SUCCESS" in done.stdout, done.stdout + done.stderr


@pytest.mark.nightly
@pytest.mark.needs("prometheus")
def test_each_rule_is_held_by_a_unit_test(reports, alerts, tmp_path):
    shutil.copy(reports / "alerts" / "dtprobe_test.yml", tmp_path)
    unheld = []
    for rule in alerts:
        dead = [{**one, "expr": "vector(0) > 1"} if one is rule else one for one in alerts]
        (tmp_path / "dtprobe.yml").write_text(yaml.safe_dump({"groups": [{"name": "dtprobe", "rules": dead}]}))
        if promtool("test", "rules", "dtprobe_test.yml", cwd=tmp_path).returncode == 0:
            unheld.append(rule["alert"])
    assert not unheld


def test_rules_say_what_is_wrong_and_what_to_do_about_metrics_that_exist(alerts, rich):
    exporter = Exporter(0, Silent(), budget_s=1.0)
    exporter.begin(1)
    exporter.started("a")
    exported = {sample.name for family in [*metrics.families(rich), *exporter.collect()] for sample in family.samples}
    for rule in alerts:
        assert rule["alert"].startswith("Dtprobe") and rule["labels"]["severity"] in ("info", "warning", "critical")
        assert all(rule["annotations"][key] for key in ("summary", "description", "runbook")), rule["alert"]
        told = " ".join((rule["expr"], *rule["annotations"].values()))
        asked = set(re.findall(r"\bdtprobe_\w+", told))
        assert asked and asked <= exported, asked - exported
        said = set(re.findall(r'status=~?"([^"]+)"', rule["expr"]))
        assert {word for one in said for word in one.split("|")} <= set(metrics.STATUSES)
