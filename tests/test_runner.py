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
