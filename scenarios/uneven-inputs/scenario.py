"""A rank with fewer batches ends its epoch well, and those with more fail in a backward that it no longer joins."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dtprobe import Arm, Mitigation, Scenario, Verdict
from dtprobe.authoring import symptoms

if TYPE_CHECKING:
    import pandas as pd

    from dtprobe import Evidence

SHORT = 1
TIMEOUT_S = 2.5
PROVOKED = ("--short-rank", str(SHORT), "--timeout-s", str(TIMEOUT_S))

scenario = Scenario(
    name="uneven-inputs",
    failure_mode="uneven-dataloader-desync",
    title="One rank has fewer batches than the others",
    claim="In DDP a rank with fewer batches ends its epoch without an error; the others wait in their next backward until the timeout, and "
    "the error names nobody.",
    source="failure modes people meet; torch documentation of Join",
    layer="code",
    certifies_not="Nothing about NCCL, nor about FSDP, which Join does not serve.",
    world_size=2,
    repeats=2,
    control=Arm("worker.py", ("--cures", "none,join,agreed,checked", "--timeout-s", "30")),
    fault=Arm("worker.py", (*PROVOKED, "--cures", "none")),
    mitigated=Arm("worker.py", (*PROVOKED, "--cures", "join,agreed,checked")),
    expect={"torch>=2.9": "reproduced"},
)


@scenario.judge
def judge(evidence: Evidence) -> Verdict:
    """Epochs of the long ranks that failed at the timeout, epochs of the short one that ended well."""
    epochs = _epochs(evidence)
    plain = epochs[epochs["cure"].eq("none")]
    long, short = plain[plain["rank"].ne(SHORT)], plain[plain["rank"].eq(SHORT)]
    if (
        nothing := symptoms.undecided(evidence, {"epochs of the long rank": long, "epochs of the short rank": short})
    ) is not None:
        return nothing
    hung, clean = (symptoms.counts(long, long["hung"], arm) for arm in ("fault", "control"))
    well = symptoms.counts(short, short["error"].eq(""), "fault")
    kind = symptoms.apart(hung, clean, whole=bool(hung[0] == hung[1] and well[0] == well[1]))
    because = (
        f"{hung[0]} of {hung[1]} epochs of the long rank failed at the {TIMEOUT_S:g} s timeout naming nobody, {clean[0]} of {clean[1]} in "
        f"control; {well[0]} of {well[1]} of the short rank ended well."
    )
    cured = epochs[epochs["arm"].eq("mitigated")]
    cures = {name: cured[cured["cure"].eq(name)] for name in ("join", "agreed", "checked")}
    if len(cured):
        because += (
            f" Join: {int(cures['join']['equal'].sum())} of {len(cures['join'])} epochs ended with equal weights and every batch used; stopping "
            f"together: {int(cures['agreed']['equal'].sum())} of {len(cures['agreed'])}. Checked: {int(cures['checked']['told'].sum())} of "
            f"{len(cures['checked'])} errors named rank {SHORT}, on every rank."
        )
    return Verdict(
        kind=kind,
        mitigation=_mitigation(evidence, cures),
        control_healthy=symptoms.unmarred(symptoms.attempts(evidence), "control")
        and symptoms.ended_well(evidence, "control")
        and epochs.loc[epochs["arm"].eq("control"), "equal"].all(),
        metrics={
            "long_rank_timed_out": symptoms.share(long, long["hung"]),
            "short_rank_failed": symptoms.share(short, short["error"].fillna("unknown").ne("")),
            "equal_after_join": symptoms.share(cures["join"], cures["join"]["equal"]),
            "equal_after_stopping_together": symptoms.share(cures["agreed"], cures["agreed"]["equal"]),
            "errors_naming_the_short_rank": symptoms.share(epochs[epochs["error"].fillna("").ne("")], epochs["told"]),
            "time_to_error_s": symptoms.measure(epochs[epochs["error"].fillna("").ne("")], "took_s"),
        },
        because=because + symptoms.chance(kind),
    )


def _epochs(evidence: Evidence) -> pd.DataFrame:
    """All epochs: `hung` failed at the timeout, `told` names the short rank, `equal` ended on both ranks with the same weights."""
    rows = symptoms.attempts(evidence, "epoch").reindex(
        columns=[*symptoms.COLUMNS, "cure", "batches", "steps", "weights", "named"]
    )
    rows["trial"] = rows.groupby(["arm", "repeat", "rank", "cure"], dropna=False).cumcount()
    failed = rows["error"].fillna("").ne("")
    each = rows.groupby(["arm", "repeat", "cure", "trial"], dropna=False)["weights"]
    equal = rows["error"].eq("").fillna(False) & each.transform("nunique").eq(1)
    full = rows["steps"].eq(rows["batches"]) | rows["cure"].eq("agreed")
    return rows.assign(
        hung=(failed & rows["took_s"].ge(0.9 * TIMEOUT_S).fillna(False)).astype(bool),
        told=rows["named"].eq(str(SHORT)),
        equal=(equal & full).astype(bool),
    )


def _mitigation(evidence: Evidence, cures: dict[str, pd.DataFrame]) -> Mitigation:
    """Held where Join and stopping together end well with equal weights, and checked names the short rank on every rank."""
    if not evidence.ran("mitigated"):
        return Mitigation.NONE
    held = all(len(own) for own in cures.values()) and cures["checked"]["told"].all()
    held = (
        held and cures["join"]["equal"].all() and cures["agreed"]["equal"].all() and symptoms.ended_well(evidence, "mitigated")
    )
    return Mitigation.HELD if held else Mitigation.FAILED
