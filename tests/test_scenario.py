"""What a scenario's types accept and refuse, and the order of verdicts."""

from __future__ import annotations

import pytest

from dtprobe import Arm, Scenario, UsageError, Verdict, VerdictKind

FIELDS = dict(
    name="leak",
    failure_mode="gloo-thread-leak",
    title="t",
    claim="c",
    source="s",
    layer="c10d",
    certifies_not="n",
    control=Arm("worker.py", ("--healthy",)),
    fault=Arm("worker.py", ("--broken",)),
    mitigated=Arm("worker.py", ("--cured",)),
)


def made(**changes):
    return Scenario(**{**FIELDS, **changes})


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"layer": "kernel"}, "layer 'kernel' is not one of"),
        ({"mitigated": None}, "no mitigated arm"),
        ({"repeats": 0}, "repeats=0"),
        ({"timeout_s": -1}, "timeout_s=-1"),
        ({"expect": {"torch>=2.13": "certain"}}, "'certain', not one of"),
    ],
)
def test_an_impossible_scenario_is_refused_with_its_value(changes, says):
    with pytest.raises(UsageError, match=says):
        made(**changes)


def test_a_scenario_without_cure_says_why():
    assert list(made(mitigated=None, no_cure_because="the hardware is gone").arms) == ["control", "fault"]


def test_taking_the_fault_out_leaves_the_healthy_workload_in_the_fault_arm():
    assert made().without_fault().fault == made().control


def test_taking_the_cure_out_leaves_the_fault_in_the_mitigated_arm():
    assert made().without_cure().mitigated == made().fault


def test_a_variant_has_a_name_and_a_judge_of_its_own():
    base = made()
    variant = base.with_variant("exception", fault=Arm("worker.py", ("--raise",)))
    variant.judge(lambda evidence: Verdict(kind=VerdictKind.REFUTED, control_healthy=True, because="b"))
    assert variant.id == "leak:exception"
    with pytest.raises(UsageError, match="no judge"):
        base.judgement(None)


def test_two_judges_are_one_too_many():
    scenario = made()
    scenario.judge(lambda evidence: None)
    with pytest.raises(UsageError, match="two judges"):
        scenario.judge(lambda evidence: None)


def test_a_suite_is_as_bad_as_its_worst_member():
    assert VerdictKind.worst([VerdictKind.REPRODUCED, VerdictKind.ERROR, VerdictKind.UNSUPPORTED]) is VerdictKind.ERROR
    assert VerdictKind.worst([]) is VerdictKind.UNSUPPORTED
