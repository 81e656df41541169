"""Native code holds the GIL on a rank: every watchdog written in Python is dead there, and only from outside it is seen."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from dtprobe import Scenario, flight_recorder, proc
from dtprobe.authoring import nccl, survivors, symptoms

if TYPE_CHECKING:
    import pandas as pd

    from dtprobe import Evidence, Verdict

HELD_S = 7.0
SILENT_S = 0.8 * HELD_S
BEAT = ("--beat-s", "0.25")
HOLD = (survivors.at_step("gil", seconds=HELD_S),)

scenario = Scenario(
    name="gil-held",
    failure_mode="gil-held",
    title="Native code holds the GIL; the rank's own watchdogs are dead, the others time out",
    claim="While native code holds the GIL on a rank, no Python thread of it runs, so a watchdog in Python says nothing; the others "
    "wait until their timeout. From outside the rank can be read all the time: /proc and py-spy answer.",
    source="failure modes people meet",
    layer="code",
    certifies_not="Nothing about which extension holds it: here the injector sleeps in C. Nothing about NCCL's watchdog, a C++ thread.",
    world_size=survivors.WORLD_SIZE,
    timeout_s=60,
    repeats=2,
    probes=(proc(hz=10), flight_recorder(interval_s=0.5, suspect_s=1.5)),
    control=survivors.arm(*BEAT, timeout_s=survivors.WAITED_S),
    fault=survivors.arm(*BEAT, timeout_s=survivors.WAITED_S, faults=HOLD),
    mitigated=survivors.arm(*BEAT, "--checked", timeout_s=survivors.WAITED_S, faults=HOLD),
    expect={"torch>=2.9": "reproduced"},
)


@scenario.judge
def judge(evidence: Evidence) -> Verdict:
    """The others' errors; how long the watchdog of rank 1 was silent, and what was read of the rank meanwhile."""
    quiet = silences(evidence)
    quiet["samples"] = [_within(evidence.frame("proc"), one) for one in quiet.itertuples()]
    quiet["stacks"] = [_within(evidence.frame("stacks"), one) for one in quiet.itertuples()]
    own = quiet[quiet["rank"].eq(survivors.CULPRIT)]
    dead = own[own["arm"].eq("fault") & own["silent_s"].ge(SILENT_S) & own["samples"].gt(0)]
    claim = survivors.Claim(
        fate=f"had a watchdog that was silent for {SILENT_S:g} s or more, and was sampled meanwhile,",
        hit=lambda outcomes, tries: outcomes["repeat"].isin(dead["repeat"]),
        says="Timed out waiting",
        by_timeout=True,
    )
    verdict = survivors.judge(evidence, claim)
    if own.empty:
        return verdict
    return replace(
        verdict,
        metrics={
            **verdict.metrics,
            "watchdog_silent_s": symptoms.measure(own, "silent_s"),
            "samples_meanwhile": symptoms.measure(own, "samples", unit="samples"),
        },
        because=f"{verdict.because} In the silence /proc was read {int(dead['samples'].sum())} times"
        f" and stacks {int(dead['stacks'].sum())} times.",
    )


def silences(evidence: Evidence) -> pd.DataFrame:
    """The longest silence of each rank's watchdog: `silent_s`, from `since_ns` to `until_ns`."""
    import pandas as pd

    rows = []
    beats = evidence.events("beat")
    for (arm, repeat, rank), own in beats.groupby(["arm", "repeat", "rank"]):
        times = own["t_ns"].sort_values()
        gaps = times.diff()
        if gaps.notna().any():
            until = int(times[gaps.idxmax()])
            since = until - int(gaps.max())
            rows.append((arm, repeat, rank, (until - since) / 1e9, since, until))
    columns = ["arm", "repeat", "rank", "silent_s", "since_ns", "until_ns"]
    return pd.DataFrame(rows, columns=columns)


def _within(frame: pd.DataFrame, one: Any) -> int:
    """At how many moments of that rank's silence, a quarter of a second from its ends, the frame has something of it."""
    edge = 250_000_000
    own = frame[frame["arm"].eq(one.arm) & frame["repeat"].eq(one.repeat) & frame["rank"].eq(one.rank)]
    return int(own.loc[own["t_ns"].between(one.since_ns + edge, one.until_ns - edge), "t_ns"].nunique())


gpu = nccl.variant(
    scenario,
    "gil",
    claim="On NCCL the others of a rank whose interpreter's lock is held wait in a kernel until the watchdog, a thread of C++, ends them.",
    probes=(flight_recorder(interval_s=0.25, suspect_s=1.0),),
)


@gpu.judge
def judge_gpu(evidence: Evidence) -> Verdict:
    """How NCCL's waiting ranks end, and who is named before."""
    return nccl.judge(evidence, nccl.Claim())
