"""Each scenario's verdict comes from its fault, and its mitigation from its cure."""

from __future__ import annotations

from dataclasses import replace

import pandas as pd
import pytest

from dtprobe import catalog, doctor, runner
from dtprobe.evidence import OUTCOMES, Evidence
from dtprobe.scenario import Mitigation, VerdictKind

SCENARIOS = {scenario.id: scenario for scenario in catalog.load().scenarios}
QUICK = (
    "gloo-thread-leak",
    "collective-skipped",
)
"""Those that the default suite runs; the nightly one runs all."""
EACH = [name if name in QUICK else pytest.param(name, marks=pytest.mark.nightly) for name in SCENARIOS]
NOTHING_SHOWN = {"gloo-thread-leak": VerdictKind.REFUTED}
"""The verdict when the fault arm runs the healthy workload, where it is another one than not-reproduced."""


def found(name):
    """The scenario without recorders that slow it down: none of these verdicts may depend on them."""
    scenario = SCENARIOS[name]
    return replace(scenario, probes=tuple(probe for probe in scenario.probes if not probe.heavy))


def evidence(tmp_path, outcomes):
    return Evidence(
        folder=tmp_path,
        seed=0,
        world_size=2,
        outcomes=pd.DataFrame(outcomes, columns=list(OUTCOMES)).astype(OUTCOMES),
        frames={},
        unavailable={},
        suspicions=pd.DataFrame(columns=["arm", "repeat", "t_ns", "reason"]),
    )


def needed(name):
    """Skip, with doctor's reason, where this machine lacks what the scenario needs."""
    if unavailable := doctor.together(doctor.here().unmet(SCENARIOS[name].needs)):
        pytest.skip(str(unavailable))


@pytest.mark.alone
@pytest.mark.parametrize("name", EACH)
def test_without_the_fault_nothing_is_shown_and_without_the_cure_the_mitigation_fails(name, tmp_path):
    needed(name)
    scenario = found(name)
    taken_out = scenario.without_cure().without_fault()  # mitigated runs the fault's workload, fault the control's

    result = runner.run(taken_out, out=tmp_path, repeats=1, seed=1)

    assert result.verdict.control_healthy, result.verdict.because
    assert result.verdict.kind is NOTHING_SHOWN.get(name, VerdictKind.NOT_REPRODUCED), result.verdict.because
    wanted = Mitigation.FAILED if scenario.mitigated else Mitigation.NONE
    assert result.verdict.mitigation is wanted, result.verdict.because


@pytest.mark.nightly
@pytest.mark.alone
@pytest.mark.parametrize("name", SCENARIOS)
def test_as_it_is_the_verdict_is_the_pinned_one_and_the_cure_holds(name, tmp_path):
    needed(name)
    scenario = found(name)

    result = runner.run(scenario, out=tmp_path, repeats=2, seed=2)

    assert result.expected is not None
    assert result.verdict.kind == result.expected, result.verdict.because
    assert result.verdict.mitigation is (Mitigation.HELD if scenario.mitigated else Mitigation.NONE), result.verdict.because
    assert NOTHING_SHOWN.get(name, VerdictKind.NOT_REPRODUCED) != result.expected


@pytest.mark.parametrize("name", SCENARIOS)
def test_ranks_that_left_no_evidence_give_no_claim_about_the_world(name, tmp_path):
    crashed = [
        {"arm": arm, "repeat": 0, "traced": False, "rank": rank, "pid": 1, "exit_code": 1, "wall_s": 1.0, "timed_out": False}
        for arm in ("control", "fault", "mitigated")
        for rank in range(2)
    ]

    verdict = found(name).judgement(evidence(tmp_path, crashed))

    assert not verdict.control_healthy
    assert verdict.mitigation is not Mitigation.HELD


@pytest.mark.parametrize("name", SCENARIOS)
def test_pinned_for_the_oldest_supported_torch_on(name):
    from packaging.requirements import Requirement

    specs = [Requirement(spec).specifier for spec in SCENARIOS[name].expect]

    assert all(any(spec.contains(version) for spec in specs) for version in ("2.9.0", "2.13.0"))
