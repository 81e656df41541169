"""The doctor: each question asked once, scenarios measured against it, and a report that is data."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass

import pytest

from dtprobe import doctor as face
from dtprobe.doctor import Doctor, Machine, Missing, together
from dtprobe.doctor.capabilities import TABLE
from dtprobe.errors import Unavailable, UsageError
from dtprobe.scenario import Arm, Scenario


@dataclass(frozen=True)
class Recorder:
    """A probe's configuration that says whether it can record."""

    name: str
    why: Unavailable | None = None
    heavy: bool = False

    def probe(self) -> Unavailable | None:
        return self.why

    def recorder(self, where: object) -> None:
        raise AssertionError("the doctor starts no recorder")


def scenario(name: str, needs: Iterable[str], *probes: Recorder) -> Scenario:
    return Scenario(
        name=name,
        failure_mode="gloo-thread-leak",
        title="t",
        claim="c",
        source="s",
        layer="c10d",
        certifies_not="n",
        needs=tuple(needs),
        probes=probes,
        control=Arm("worker.py"),
        fault=Arm("worker.py"),
        no_cure_because="none",
    )


def test_each_capability_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    class Counting(Machine):
        def which(self, command: str):  # type: ignore[no-untyped-def]
            asked.append(command)
            return super().which(command)

    doctor = Doctor(Counting())
    for _ in range(3):
        doctor.capability("command:no-such-program")
    assert asked == ["no-such-program"]


def test_a_scenario_runs_when_all_its_needs_are_met_and_says_what_it_would_lack() -> None:
    good = scenario("good", ("linux", "torch"), Recorder("perf", Unavailable("no perf", "install it")), Recorder("proc"))
    bad = scenario("bad", ("linux", "cuda:999", "package:no-such-package"))
    typo = scenario("typo", ("linus",))
    report = Doctor().report([good, bad, typo])
    first, second, third = report.scenarios
    assert first.runnable
    assert dict(first.without) == {"perf": Unavailable("no perf", "install it")}
    assert not second.runnable
    assert [(one.name, one.remediable) for one in second.unmet] == [("cuda:999", False), ("package:no-such-package", True)]
    assert not third.runnable
    assert "no capability is called 'linus'" in str(third.unmet[0].unavailable)
    assert [one.name for one in report.capabilities] == [row.name for row in TABLE]


def test_a_report_is_plain_data() -> None:
    report = Doctor().report([scenario("bad", ("cuda:999",))])
    data = json.loads(json.dumps(report.as_json()))
    assert data["schema"] == "dtprobe.doctor/1"
    (only,) = data["scenarios"]
    assert (only["scenario"], only["runnable"]) == ("bad", False)
    assert "GPUs visible, 999 needed" in only["unmet"][0]["reason"]
    linux = next(one for one in data["capabilities"] if one["name"] == "linux")
    assert (linux["available"], linux["reason"], linux["remediable"]) == (True, "", False)


def test_whether_a_scenario_can_run_is_one_answer_with_all_reasons() -> None:
    doctor = Doctor()
    assert doctor.runnable(scenario("good", ("linux",))) is None
    both = doctor.runnable(scenario("bad", ("cuda:999", "package:no-such-package")))
    assert not isinstance(both, Missing)
    assert both is not None
    assert "cuda:999: " in both.reason
    assert "package:no-such-package: " in both.reason
    only = doctor.runnable(scenario("bad", ("package:no-such-a", "package:no-such-b")))
    assert isinstance(only, Missing)
    assert only.remedy == "pip install no-such-a no-such-b"
    with pytest.raises(UsageError):
        doctor.runnable(scenario("typo", ("linus",)))


def test_nothing_unmet_is_nothing() -> None:
    assert together({}) is None


def test_the_environment_is_the_one_that_was_given() -> None:
    assert Doctor(environ={"PATH": "/nowhere"}).capability("command:sh") is not None
    assert Doctor().capability("command:sh") is None


def test_the_face_asks_one_doctor_of_this_machine() -> None:
    assert face.capability("linux") is None
    assert face.here() is face.here()
    with pytest.raises(UsageError):
        face.capability("linus")
