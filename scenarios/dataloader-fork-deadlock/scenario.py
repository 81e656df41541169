"""A loader's worker is forked while another thread has a lock: in the child nobody ever gives it back."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dtprobe import Arm, Mitigation, Scenario, Verdict, strace
from dtprobe.authoring import symptoms, syscalls

if TYPE_CHECKING:
    import pandas as pd

    from dtprobe import Evidence

CULPRIT = 1
TIMEOUT_S = 5.0
PATIENCE_S = 12.0
RENEW_S = 1.0

ARGS = ("--timeout-s", str(TIMEOUT_S), "--patience-s", str(PATIENCE_S))
RENEW = (*ARGS, "--renew-s", str(RENEW_S))

scenario = Scenario(
    name="dataloader-fork-deadlock",
    failure_mode="dataloader-fork-deadlock",
    title="A loader's worker is forked while a lock is held, and waits for it for ever",
    claim="A DataLoader worker that is forked while another thread of the rank holds a lock waits for that lock for ever, and the rank waits "
    "for the worker (DataLoader's timeout is 0, none, by default); the other ranks time out and blame the network.",
    source="failure modes people meet; pthread_atfork(3): the child has a copy of each lock, and only the thread that forked",
    layer="code",
    certifies_not="Nothing about locks inside libraries (OpenMP, gRPC, BLAS), which deadlock the same way. 'For ever' was watched for "
    f"{PATIENCE_S:g} s.",
    world_size=2,
    timeout_s=60,
    repeats=2,
    probes=(strace(calls=",".join((*syscalls.FORKING, "futex"))),),
    control=Arm("worker.py", args=ARGS),
    fault=Arm("worker.py", args=RENEW),
    mitigated=Arm("worker.py", args=(*RENEW, "--cured")),
    expect={"torch>=2.9": "reproduced"},
)


@scenario.judge
def judge(evidence: Evidence) -> Verdict:
    """Whether the loader's worker still waited long after the lock had been given back, and what the other rank said."""
    epochs = symptoms.attempts(evidence, "epoch")
    if verdict := symptoms.undecided(evidence, {"epoch": epochs}):
        return verdict
    stuck = evidence.events("stuck").reindex(columns=["arm", "repeat", "rank", "wchan", "status"])
    stuck = stuck[stuck["arm"].eq("fault") & stuck["rank"].eq(CULPRIT)]
    own, other = epochs[epochs["rank"].eq(CULPRIT)], epochs[epochs["rank"].ne(CULPRIT)]
    hung, runs = symptoms.counts(own, ~own["ended"] & own["repeat"].isin(stuck["repeat"]), "fault")
    timed, others = symptoms.counts(other, other["text"].str.contains("Timed out", regex=False), "fault")
    forked = _loaders(evidence)
    seen = forked[forked["arm"].eq("fault")]
    # what the kernel saw, where it was recorded: only the loader that was forked beside the lock's holder never left its futex
    by_kernel = bool((seen["waits"] == seen["rank"].eq(CULPRIT)).all())
    lost = ~epochs["ended"] | epochs["error"].ne("")
    kind = symptoms.apart(
        symptoms.counts(epochs, lost, "fault"),
        symptoms.counts(epochs, lost, "control"),
        whole=hung == runs and timed == others and by_kernel,
    )
    fine, cured = symptoms.counts(epochs, epochs["ended"] & epochs["error"].eq(""), "mitigated")
    mitigation = Mitigation.NONE
    if evidence.ran("mitigated"):
        held = cured > 0 and fine == cured and symptoms.ended_well(evidence, "mitigated")
        mitigation = Mitigation.HELD if held else Mitigation.FAILED
    where = ", ".join(sorted({str(one) for one in stuck["wchan"].dropna()}))
    return Verdict(
        kind=kind,
        mitigation=mitigation,
        control_healthy=symptoms.ended_well(evidence, "control") and symptoms.unmarred(epochs, "control"),
        metrics={
            "epochs_lost": symptoms.share(epochs, lost),
            "epoch_s": symptoms.measure(epochs, "took_s"),
            "loaders_left_in_a_futex": symptoms.share(forked, forked["waits"]),
        },
        because=f"The lock was held for {RENEW_S:g} s at the fork; {PATIENCE_S:g} s later the loader's worker of rank {CULPRIT} still waited in"
        f" {hung} of {runs} runs"
        + (f" (in {where})" if where else "")
        + f", and {timed} of {others} other ranks had timed out.{_kernel_saw(seen)} With forks that wait for the lock {fine} of {cured} ranks did "
        "their epoch." + symptoms.chance(kind),
    )


def _loaders(evidence: Evidence) -> pd.DataFrame:
    """The children that traced ranks forked in their epoch, with the rank's last collective before."""
    forked = syscalls.forks(evidence).merge(syscalls.windows(evidence, "epoch"), on=syscalls.KEYS)
    late = forked["ended_ns"].notna() & forked["t_ns"].gt(forked["ended_ns"])
    own = forked["parent"].eq(forked["trier"]) & forked["t_ns"].ge(forked["begun_ns"]) & ~late.fillna(False)
    return syscalls.after_collectives(evidence, forked[own])


def _kernel_saw(seen: pd.DataFrame) -> str:
    if seen.empty:
        return " No system call was traced here."
    waits = seen[seen["waits"]]
    told = f" Traced: {len(waits)} of {len(seen)} loaders' workers never came back from a futex"
    if waits["since_s"].notna().any():
        told += f"; they were forked {waits['since_s'].max():.3f} s at most after their rank's last {waits['op'].iloc[0]}"
    return told + "."
