"""Batches of varying length on healthy ranks: steps vary, ranks wait for each other, and no alarm may be raised."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from dtprobe import Arm, Scenario, Verdict, VerdictKind, flight_recorder
from dtprobe.authoring import symptoms
from dtprobe.catalog import load_module

if TYPE_CHECKING:
    from dtprobe import Evidence

late = load_module(Path(__file__).resolve().parents[1] / "straggler" / "late.py", "_dtprobe_scenario_late")
watching = load_module(Path(__file__).resolve().parents[1] / "symmetric-hang" / "watching.py", "_dtprobe_scenario_watching")

SPREAD = 2.0
"""Jitter is there where the 95th percentile of a rank's own work is so many times its median, and that many times control's."""
SUSPECT_S = 1.0
"""The watch looks closer where a collective is open for so long: some of the waits here are longer."""

ARGS = ("--steps", "30", "--products", "400")


scenario = Scenario(
    name="honest-jitter",
    failure_mode="healthy",
    title="Healthy ranks with batches of varying length, which must raise no alarm",
    claim="A job whose ranks wait for each other for long and unequal times has a straggler, or hangs.",
    source="failure modes people meet; every diagnosis must call this job healthy",
    layer="code",
    certifies_not="Nothing about tools other than dtprobe's own watch and its test for stragglers.",
    world_size=2,
    tags=("alone",),  # it measures times
    timeout_s=60,
    repeats=2,
    probes=(
        flight_recorder(suspect_s=60),
        watching.Watching(suspect_s=SUSPECT_S),
    ),
    control=Arm("../straggler/worker.py", args=ARGS),
    fault=Arm("../straggler/worker.py", args=(*ARGS, "--batches", "varied")),
    no_cure_because="nothing is wrong",
    expect={"torch>=2.9": "refuted"},
)


@scenario.judge
def judge(evidence: Evidence) -> Verdict:
    """How unequal the steps were, and who raised an alarm over them."""
    steps = symptoms.attempts(evidence, "step")
    if verdict := symptoms.undecided(evidence, {"step": steps}):
        return verdict
    steps = late.timed(steps)
    spreads = late.spread(steps)
    of = {arm: [float(one) for one in own["spread"]] for arm, own in spreads.groupby("arm")}
    named = late.stragglers(steps)
    told = evidence.suspicions
    alarms = {arm: int(told["arm"].eq(arm).sum()) + sum(one == arm for one, _ in named) for arm in ("control", "fault")}
    varied = bool(of.get("fault")) and min(of["fault"]) >= SPREAD and min(of["fault"]) > max(of.get("control", [0.0]))
    well = symptoms.ended_well(evidence, "fault") and symptoms.unmarred(steps, "fault")
    kind = VerdictKind.NOT_REPRODUCED
    if varied and well:
        kind = VerdictKind.REFUTED if alarms["fault"] == 0 else VerdictKind.REPRODUCED
    waits = steps.loc[steps["arm"] == "fault", "wait_s"]
    reasons = "; ".join(str(one) for one in told.loc[told["arm"] == "fault", "reason"])[:300]
    return Verdict(
        kind=kind,
        control_healthy=symptoms.ended_well(evidence, "control")
        and symptoms.unmarred(steps, "control")
        and alarms["control"] == 0,
        metrics={
            "spread": symptoms.measure(spreads, "spread", unit="times the median"),
            "step_s": symptoms.measure(steps, "took_s"),
        },
        because=f"The 95th percentile of a rank's own work was {min(of.get('fault', [0])):.1f} times its median or more"
        f" ({max(of.get('control', [0])):.1f} or less in control), and ranks waited up to {waits.max():.1f} s for each other. Alarms:"
        f" {alarms['fault']} over varied batches, {alarms['control']} over constant ones"
        + (f" ({reasons})" if reasons else "")
        + ".",
    )
