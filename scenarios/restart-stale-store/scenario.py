"""torchrun restarts the workers over the store of the attempt before, and they meet its keys."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dtprobe import Arm, Mitigation, Scenario, Verdict, VerdictKind
from dtprobe.authoring import symptoms

if TYPE_CHECKING:
    import pandas as pd

    from dtprobe import Evidence

SUM = 2.0

scenario = Scenario(
    name="restart-stale-store",
    failure_mode="restart-stale-store",
    title="Restarted workers meet the keys of the attempt before",
    claim="With --max-restarts and a static rendezvous (--master-addr, --master-port) torchrun's agent keeps one store for all attempts, "
    "under the same keys: a restarted rank reads the address of a dead one, cannot connect, and the restart that was to "
    "save the job fails.",
    source="measured here; torch/distributed/rendezvous.py, _create_c10d_store (torch 2.13: 'no need to add prefix for each attempt')",
    layer="store",
    certifies_not="Nothing about NCCL, where the restarted ranks meet an old unique id and hang. The agent is torchrun's own, started "
    "by its Python interface so that it can fork its workers; the ranks' skew of half a second is made.",
    world_size=2,
    timeout_s=120,
    repeats=2,
    control=Arm("worker.py", args=("--rendezvous", "c10d"), env={"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}),
    fault=Arm("worker.py"),
    mitigated=Arm("worker.py", args=("--cured",)),
    expect={"torch>=2.9": "reproduced"},
)


@scenario.judge
def judge(evidence: Evidence) -> Verdict:
    """How many jobs a restart saved; what the ranks of the others said."""
    jobs = symptoms.attempts(evidence, "job")
    if verdict := symptoms.undecided(evidence, {"job": jobs}):
        return verdict
    from dtprobe.stats import separated_counts

    lost = jobs["failed"].ne(False) if "failed" in jobs else jobs["error"].notna()
    of = {arm: symptoms.counts(jobs, lost, arm) for arm in ("control", "fault", "mitigated")}
    firsts, seconds = sums(evidence, again=False), sums(evidence, again=True)
    began = all(firsts.get(arm, 0) == 2 * of[arm][1] for arm in ("control", "fault"))
    shown = began and of["fault"][0] > of["control"][0]
    kind = VerdictKind.NOT_REPRODUCED
    if shown:
        kind = VerdictKind.REPRODUCED if separated_counts(*of["fault"], *of["control"]) else VerdictKind.PARTLY
    mitigation = Mitigation.NONE
    if evidence.ran("mitigated"):
        saved = of["mitigated"][1] > 0 and of["mitigated"][0] == 0 and seconds.get("mitigated", 0) == 2 * of["mitigated"][1]
        mitigation = Mitigation.HELD if saved else Mitigation.FAILED
    return Verdict(
        kind=kind,
        mitigation=mitigation,
        control_healthy=symptoms.ended_well(evidence, "control") and of["control"][0] == 0 and bool(began),
        metrics={"restarts_failed": symptoms.share(jobs, lost), "job_s": symptoms.measure(jobs, "took_s")},
        because=f"Every job's first attempt summed right. {of['fault'][0]} of {of['fault'][1]} restarts over the static rendezvous failed"
        + _text(evidence)
        + f", {of['control'][0]} of {of['control'][1]} with a store for each attempt. Started by the framework, {of['mitigated'][0]} of"
        f" {of['mitigated'][1]} restarts over the static rendezvous failed.",
    )


def sums(evidence: Evidence, *, again: bool) -> dict[str, int]:
    """Arm -> ranks that summed right in first attempts, or in second ones."""
    found = evidence.events("sum").reindex(columns=["arm", "again", "sum"])
    right = found[found["again"].eq(again) & found["sum"].eq(SUM)]
    return {str(arm): len(own) for arm, own in right.groupby("arm")}


def _text(evidence: Evidence) -> str:
    said: pd.DataFrame = evidence.events("failed", "fault").reindex(columns=["again", "text"])
    said = said[said["again"].eq(True)]
    return f' ("{str(said["text"].iloc[0])[-110:]}")' if len(said) else ""
