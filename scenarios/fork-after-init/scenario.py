"""A child forked after init_process_group has the group's memory and none of its threads: a collective there never ends."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dtprobe import Arm, Mitigation, Scenario, Verdict, strace
from dtprobe.authoring import symptoms, syscalls

if TYPE_CHECKING:
    import pandas as pd

    from dtprobe import Evidence

TIMEOUT_S = 2.0
PATIENCE_S = 3 * TIMEOUT_S
SUM = 2.0

scenario = Scenario(
    name="fork-after-init",
    failure_mode="fork-after-init",
    title="A child forked after the group was made hangs in its first collective",
    claim="A child that is forked after init_process_group and uses the inherited gloo group hangs for ever in its first collective, "
    "whatever the timeout: the threads that would run the collective and its timeout were not forked.",
    source="failure modes people meet; fork(2): the child has one thread",
    layer="code",
    certifies_not="Nothing about NCCL: CUDA refuses a forked child by itself. 'For ever' was watched for three timeouts.",
    world_size=2,
    timeout_s=60,
    repeats=2,
    probes=(strace(calls=",".join((*syscalls.FORKING, "futex"))),),
    control=Arm("worker.py", args=("--mode", "spared")),
    fault=Arm("worker.py", args=("--mode", "inherited", "--timeout-s", str(TIMEOUT_S), "--patience-s", str(PATIENCE_S))),
    mitigated=Arm("worker.py", args=("--mode", "own", "--timeout-s", "20")),
    expect={"torch>=2.9": "reproduced"},
)


@scenario.judge
def judge(evidence: Evidence) -> Verdict:
    """Which children came to the end of their work, and with which sum."""
    children = symptoms.attempts(evidence, "child")
    if verdict := symptoms.undecided(evidence, {"child": children}):
        return verdict
    ends = evidence.events("child-ended").reindex(columns=["arm", "repeat", "rank", "ended"])
    children = children.merge(ends.rename(columns={"ended": "left"}), on=["arm", "repeat", "rank"], how="left")
    if "sum" not in children:
        children["sum"] = None
    hung = ~children["ended"] & children["left"].eq(False)
    right = children["error"].eq("") & children["sum"].eq(SUM) & children["left"].eq(True)
    stuck, asked = symptoms.counts(children, hung, "fault")
    done, cured = symptoms.counts(children, right, "mitigated")
    fine, controls = symptoms.counts(children, right, "control")
    tries = syscalls.windows(evidence, "child").rename(columns={"trier": "child"})
    forked = syscalls.after_collectives(evidence, syscalls.forks(evidence).merge(tries[[*syscalls.KEYS, "child"]]))
    seen = forked[forked["arm"].eq("fault")]
    # What the kernel saw, where it was recorded: forked after a collective, alone, and in a wait that nobody can end.
    alone = seen["waits"] & seen["threads"].eq(0) & seen["op"].notna()
    kind = symptoms.apart((stuck, asked), (controls - fine, controls), whole=stuck == asked and bool(alone.all()))
    mitigation = Mitigation.NONE
    if evidence.ran("mitigated"):
        mitigation = Mitigation.HELD if cured and done == cured else Mitigation.FAILED
    return Verdict(
        kind=kind,
        mitigation=mitigation,
        control_healthy=symptoms.ended_well(evidence, "control") and fine == controls,
        metrics={
            "children_hung": symptoms.share(children, hung),
            "sums_right": symptoms.share(children, right),
            "children_left_in_a_futex": symptoms.share(forked, forked["waits"]),
            "threads_of_a_child": symptoms.measure(forked, "threads", unit="threads"),
        },
        because=f"{stuck} of {asked} children were still in their all-reduce after {PATIENCE_S:g} s, three timeouts of {TIMEOUT_S:g} s,"
        f" and raised nothing.{_kernel_saw(seen)} Forked before and started as a job of their own, {done} of {cured} summed right."
        + symptoms.chance(kind),
    )


def _kernel_saw(seen: pd.DataFrame) -> str:
    if seen.empty:
        return " No system call was traced here."
    return (
        f" Traced: {int(seen['waits'].sum())} of {len(seen)} children, forked {seen['since_s'].max():.3f} s at most after their rank's last collective,"
        f" were in a futex that never came back and had {int(seen['threads'].max())} threads of their own."
    )
