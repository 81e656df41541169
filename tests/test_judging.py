"""The seam between a judge and its verdict: what is not allowed does not pass."""

from __future__ import annotations

import math

import pandas as pd
import pytest

from dtprobe import Arm, Estimate, Evidence, Metric, Mitigation, Scenario, UsageError, Verdict, VerdictKind
from dtprobe.evidence import OUTCOMES
from dtprobe.judging import expected, verdict_of

ARMS = ("control", "fault", "mitigated")


def estimate(value):
    return Estimate(value=value, low=value, high=value, n=3, method="range")


GOOD = {"m": Metric(control=estimate(0.0), fault=estimate(5.0), mitigated=estimate(0.0), unit="s")}


def scenario(**changes):
    fields = dict(
        name="made-up",
        failure_mode="straggler",
        title="t",
        claim="c",
        source="s",
        layer="code",
        certifies_not="n",
        control=Arm("w.py"),
        fault=Arm("w.py"),
        mitigated=Arm("w.py"),
    )
    return Scenario(**{**fields, **changes})


@pytest.fixture
def evidence(tmp_path):
    return Evidence(
        folder=tmp_path,
        seed=0,
        world_size=2,
        outcomes=pd.DataFrame({name: pd.array([], dtype=dtype) for name, dtype in OUTCOMES.items()}),
        frames={},
        unavailable={},
        suspicions=pd.DataFrame(columns=["arm", "repeat", "t_ns", "reason"]),
    )


def judged(verdict, evidence, arms=ARMS, **changes):
    made = scenario(**changes)
    made.judge(lambda _: verdict)
    return verdict_of(made, evidence, arms)


def verdict(**changes):
    return Verdict(
        **{
            "kind": VerdictKind.REPRODUCED,
            "mitigation": Mitigation.HELD,
            "control_healthy": True,
            "metrics": GOOD,
            "because": "b",
            **changes,
        }
    )


def test_a_verdict_that_keeps_the_rules_passes_as_it_is(evidence):
    assert judged(verdict(), evidence) == verdict()


@pytest.mark.parametrize("kind", ["reproduced", "partly", "refuted", "not-reproduced"])
def test_no_claim_stands_on_an_unhealthy_control(evidence, kind):
    found = judged(verdict(kind=VerdictKind(kind), control_healthy=False), evidence)
    assert found.kind is VerdictKind.INCONCLUSIVE
    assert "control is not healthy" in found.because


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"metrics": {}}, "without a metric of both control and fault"),
        ({"metrics": {"m": Metric(fault=estimate(1.0), unit="s")}}, "without a metric of both"),
        ({"metrics": {"m": Metric(control=estimate(0.0), fault=estimate(math.nan), unit="s")}}, "not finite"),
        ({"because": "  "}, "gives no reason"),
    ],
)
def test_a_claim_without_numbers_or_reason_is_an_error(evidence, changes, says):
    found = judged(verdict(**changes), evidence)
    assert found.kind is VerdictKind.ERROR
    assert says in found.because


def test_a_mitigation_without_a_mitigated_arm_is_an_error(evidence):
    found = judged(verdict(), evidence, arms=("control", "fault"), mitigated=None, no_cure_because="none")
    assert found.kind is VerdictKind.ERROR


def test_a_judge_that_returns_something_else_is_an_error(evidence):
    assert judged("reproduced", evidence).kind is VerdictKind.ERROR


def test_without_an_arm_the_judge_is_not_even_asked(evidence):
    found = judged(verdict(), evidence, arms=("control", "fault"))
    assert (found.kind, found.because) == (
        VerdictKind.INCONCLUSIVE,
        "only control, fault ran; without mitigated nothing can be compared",
    )


@pytest.mark.parametrize(
    ("torch", "pinned"),
    [("2.13.0+cpu", "partly"), ("2.14.0.dev20261101", "partly"), ("2.9.1", "reproduced"), ("1.13", None), (None, None)],
)
def test_the_first_pin_that_admits_this_torch_counts(torch, pinned):
    assert expected(scenario(expect={"torch>=2.13": "partly", "torch>=2.9": "reproduced"}), torch) == pinned


def test_a_malformed_pin_is_a_usage_error():
    with pytest.raises(UsageError, match="is no requirement"):
        expected(scenario(expect={"torch at least 2": "partly"}), "2.13")
