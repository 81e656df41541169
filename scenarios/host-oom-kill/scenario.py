"""The kernel kills a rank for memory: no traceback, exit by signal 9, and the others see a broken connection."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

from dtprobe import Scenario
from dtprobe.authoring import survivors

if TYPE_CHECKING:
    import pandas as pd

    from dtprobe import Evidence, Verdict

GROW = ("--grow-mib", "500")
LIMIT = (f"resource:memory,rank={survivors.CULPRIT},limit=500M,by=cgroup",)

scenario = Scenario(
    name="host-oom-kill",
    failure_mode="host-oom-kill",
    title="The kernel kills a rank for memory; the others see a broken connection",
    claim="A rank that exceeds its memory limit is killed by the kernel: it leaves no traceback and ends by signal 9, and the others "
    "fail at once with a connection error that does not speak of memory.",
    source="failure modes people meet",
    layer="process",
    certifies_not="Nothing about a host that runs out of memory as a whole: there the kernel chooses a victim, perhaps another one, "
    "and everything is slow first.",
    world_size=survivors.WORLD_SIZE,
    timeout_s=60,
    repeats=2,
    needs=("linux", "torch", "cgroup-memory"),
    control=survivors.arm(*GROW),
    fault=survivors.arm(*GROW, faults=LIMIT),
    mitigated=survivors.arm(*GROW, "--checked", faults=LIMIT),
    expect={"torch>=2.9": "reproduced"},
)


@scenario.judge
def judge(evidence: Evidence) -> Verdict:
    """The others' errors, and whether rank 1 ended by signal 9 while the kernel counted a kill in its group."""

    def killed(outcomes: pd.DataFrame, tries: pd.DataFrame) -> pd.Series:
        return outcomes["signal"].eq(9) & outcomes["repeat"].isin(kernel_killed(evidence, "fault"))

    claim = survivors.Claim(
        fate="was killed by the kernel for memory",
        hit=killed,
        says=r"Connection (closed by peer|reset by peer)|Broken pipe",
        by_timeout=False,
    )
    return survivors.judge(evidence, claim)


def kernel_killed(evidence: Evidence, arm: str) -> list[int]:
    """Repeats of the arm in which the kernel counted an OOM kill in the limited group, by what the injector wrote down."""
    file = evidence.folder / "run.json"
    runs = json.loads(file.read_text(encoding="utf-8")).get("arm_runs", []) if file.is_file() else []
    return [
        int(run["repeat"])
        for run in runs
        if run["arm"] == arm
        and any(re.search(r"[1-9]\d* OOM kill", one["detail"]) for fault in run["injections"] for one in fault["fired"])
    ]
