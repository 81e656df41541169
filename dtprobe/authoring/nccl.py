"""Both sides of the scenarios in which ranks on GPUs wait over NCCL for a rank that does otherwise: the arms, and what a judge makes of them.

The worker lies in `scenarios/collective-skipped/on_nccl.py`. What differs from gloo: the wait is a kernel on the GPU, so nothing raises in the
ranks that wait; a thread of torch's, the watchdog, sees the timeout, dumps the flight recorder, waits for
4 x TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC and ends the process by SIGABRT (torch 2.11, ProcessGroupNCCL.cpp).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from dtprobe.authoring import symptoms
from dtprobe.scenario import Arm, Mitigation, Scenario, Verdict, VerdictKind

if TYPE_CHECKING:
    import pandas as pd

    from dtprobe.evidence import Evidence

CULPRIT = 1
"""The rank that does otherwise."""

STEP = 6
"""In this step, counted from 0."""

DIFFERENCES = ("skip", "type", "shape", "root", "order", "gil", "stop")
TIMEOUT_S = 6.0
AWAY_S = 20.0
"""Longer than the watchdog takes to end the others, so that nobody comes to the rescue."""

DUMP_MS = 500
ABORTED = 6
PROGRAM = "../collective-skipped/on_nccl.py"
NEEDS = ("linux", "torch", "cuda:2")


def arm(*args: str, faults: tuple[str, ...] = (), timeout_s: float = TIMEOUT_S) -> Arm:
    """An arm of the loop; its watchdog is told to wait less for its own dump than the 60 s of the default."""
    env = {"TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": str(DUMP_MS), "TORCH_NCCL_RETHROW_CUDA_ERRORS": "1"}
    return Arm(PROGRAM, args=("--timeout-s", f"{timeout_s:g}", *args), env=env, faults=faults, timeout_s=75)


def variant(
    base: Scenario, calls: str, name: str = "gpu", *, faults: tuple[str, ...] = (), differs: bool = True, **changes: object
) -> Scenario:
    """A scenario's variant on two ranks and two GPUs, whose steps have these `calls`."""
    said = ("--calls", calls, *(("--differs",) if differs else ()))
    return base.with_variant(
        name,
        **{
            "title": f"{base.title} (NCCL, two GPUs)",
            "default": False,
            "world_size": 2,
            "launch": "local",
            "timeout_s": 90,
            "repeats": 1,
            "needs": NEEDS,
            "tags": ("gpu",),
            "measures_cost": False,
            "probes": (),
            "control": arm("--calls", calls, timeout_s=30),
            "fault": arm(*said, faults=faults),
            "mitigated": arm(*said, "--checked", faults=faults, timeout_s=30),
            "expect": {"torch>=2.9": "reproduced"},
            "source": "measured on two H200 with torch 2.11 and NCCL 2.28.9",
            "certifies_not": "Two GPUs of one host over NVLink: nothing about networks, other transports, other versions of NCCL.",
            "looks_like": (),
            **changes,
        },
    )


@dataclass(frozen=True, kw_only=True)
class Claim:
    """What is said of the fault arm: which ranks the watchdog ends (`aborted`), or that all end well with wrong values (`silent`)."""

    aborted: tuple[int, ...] = (0,)
    silent: bool = False
    recorder_names: bool = True
    """Whether the flight recorder's numbers show the culprit behind the others while they wait."""


def behind(evidence: Evidence, arm: str) -> list[tuple[int, int, float | None]]:
    """Of each repeat in which a hang was suspected with ranks behind: the repeat, the rank, and the seconds from the fault, None
    where the worker does not know of its fault."""
    faults = evidence.events("fault")
    calls = evidence.frame("collectives", arm)
    calls = calls[calls["kind"].eq("collective")]
    found = []
    for repeat, told in evidence.suspicions[evidence.suspicions["arm"].eq(arm)].groupby("repeat"):
        own = calls[calls["repeat"].eq(repeat)]
        came = faults.loc[faults["arm"].eq(arm) & faults["repeat"].eq(repeat), "t_ns"]
        for moment in sorted(int(t_ns) for t_ns in told["t_ns"]):
            last = own[own["t_ns"] <= moment].groupby(["group", "rank"])["seq"].max().unstack("rank")
            late = {int(rank) for rank in last.columns if (last[rank] < last.max(axis=1)).any()}
            if len(late) == 1:
                after_s = (moment - float(came.iloc[0])) / 1e9 if len(came) else None
                found.append((int(repeat), late.pop(), after_s))
                break
    return found


def judge(evidence: Evidence, claim: Claim) -> Verdict:
    """How the ranks ended, when, and who was named before: by the recorder while they waited, by the checked step in the cure."""
    steps = symptoms.attempts(evidence, "step").reindex(columns=[*symptoms.COLUMNS, "step", "wrong", "named"])
    if (nothing := symptoms.undecided(evidence, {"steps": steps})) is not None:
        return nothing
    ends = evidence.outcomes[evidence.outcomes["arm"].isin(("control", "fault", "mitigated"))].reset_index(drop=True)
    aborted = ends["signal"].eq(ABORTED)
    silent = steps["error"].eq("") & steps["wrong"].fillna(0).astype(int).gt(0)
    own = ends["rank"].isin(claim.aborted)
    hit = symptoms.counts(ends[own], aborted[own], "fault")
    wrong = {arm: symptoms.counts(steps, silent, arm) for arm in ("control", "fault")}
    named = behind(evidence, "fault")
    runs = int(ends.loc[ends["arm"].eq("fault"), "repeat"].nunique())
    right = sum(rank == CULPRIT for _, rank, _ in named)
    if claim.silent:
        well = symptoms.ended_well(evidence, "fault")
        kind = VerdictKind.REPRODUCED if well and wrong["fault"][0] else VerdictKind.NOT_REPRODUCED
        shown = (
            f"{wrong['fault'][0]} of {wrong['fault'][1]} steps ended without an error and with wrong elements, every rank with "
        )
        shown += "code 0" if well else "another code"
    else:
        seen = right == runs if claim.recorder_names else not right
        kind = VerdictKind.NOT_REPRODUCED
        if hit[0]:
            kind = VerdictKind.REPRODUCED if hit[0] == hit[1] and seen else VerdictKind.PARTLY
        shown = f"The watchdog ended {hit[0]} of {hit[1]} waiting ranks by SIGABRT"
    because = f"{shown}. The flight recorder named rank {CULPRIT} in {right} of {runs} runs"
    after = [s for _, rank, s in named if rank == CULPRIT and s is not None]
    because += f", {min(after):.1f} s after the fault." if after else "."
    mitigation, cured = _mitigation(evidence, steps)
    return Verdict(
        kind=kind,
        mitigation=mitigation,
        control_healthy=symptoms.ended_well(evidence, "control")
        and symptoms.unmarred(steps, "control")
        and not wrong["control"][0],
        metrics={
            "ranks_aborted": symptoms.share(ends, aborted),
            "silently_wrong_steps": symptoms.share(steps, silent),
            "lasted_s": symptoms.measure(_lasted(ends), "wall_s"),
        },
        because=f"{because} {cured}".strip(),
    )


def _lasted(ends: pd.DataFrame) -> pd.DataFrame:
    """The longest-lived rank of each arm run."""
    return ends.groupby(["arm", "repeat"], as_index=False)["wall_s"].max()


def _mitigation(evidence: Evidence, steps: pd.DataFrame) -> tuple[Mitigation, str]:
    """Held where every rank that raised named the culprit, and the ranks that wait raised."""
    if not evidence.ran("mitigated"):
        return Mitigation.NONE, ""
    own = steps[steps["arm"].eq("mitigated") & steps["step"].eq(STEP)]
    told = own["named"].eq(str(CULPRIT)).fillna(False)
    waiting = own[own["rank"].ne(CULPRIT)]
    held = bool(len(waiting)) and bool(told[waiting.index].all())
    text = f"Checked: {int(told.sum())} of {len(own)} ranks raised an error that names rank {CULPRIT}"
    if held:
        text += f", after {float(waiting['took_s'].max()):.1f} s at most"
    return (Mitigation.HELD if held else Mitigation.FAILED), f"{text}."
