"""What a run does, in which order."""

from __future__ import annotations

import pytest

from dtprobe import Arm, Scenario
from dtprobe.runner import schedule

SCENARIO = dict(
    name="late",
    failure_mode="straggler",
    title="t",
    claim="c",
    source="s",
    layer="code",
    certifies_not="n",
    repeats=2,
    control=Arm("worker.py"),
    fault=Arm("worker.py", ("--slow",)),
    mitigated=Arm("worker.py", ("--cured",)),
)


@pytest.mark.parametrize(("asked", "bare"), [(True, 2), (False, 0)])
def test_control_runs_without_recorders_beside_its_probed_repeats_where_their_cost_is_asked_for(asked, bare):
    plan = schedule(Scenario(**SCENARIO, measures_cost=asked), ("control", "fault", "mitigated"), heavy=False, faults={})

    assert [step.name for step in plan if step.probed] == ["control", "fault", "mitigated"] * 2
    assert [step.name for step in plan if not step.probed] == ["control"] * bare


def test_one_pair_a_scenario_puts_the_bare_run_first_in_some_and_last_in_others():
    first = []
    for name in "abcdefgh":
        plan = schedule(Scenario(**{**SCENARIO, "name": name}), ("control", "fault"), heavy=False, faults={}, cost_pairs=1)
        bare = [step for step in plan if not step.probed]
        assert [step.repeat for step in bare] == [0]
        first.append(plan[0] is bare[0])
        assert {plan[0].name, plan[1].name} == {"control"}
    assert set(first) == {True, False}
