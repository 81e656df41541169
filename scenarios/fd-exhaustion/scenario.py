"""Groups that are never ended use up a rank's descriptors: it fails or aborts, and the other rank does not learn why."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dtprobe import Arm, Mitigation, Scenario, Verdict, proc
from dtprobe.authoring import symptoms

if TYPE_CHECKING:
    import pandas as pd

    from dtprobe import Evidence

LIMIT = 110
GROUPS = 25
SHORT = 1
LIMITED = (f"resource:nofile,rank={SHORT},limit={LIMIT}",)
ASKED = ("--groups", str(GROUPS))

scenario = Scenario(
    name="fd-exhaustion",
    failure_mode="fd-limit",
    title="A rank runs out of descriptors, group by group",
    claim="Groups that are made and never ended use up a rank's descriptors: it fails in making the next one, or its process is aborted, and "
    "the other rank waits for its timeout or sees a broken connection, and does not learn why.",
    source="failure modes people meet; measured here",
    layer="process",
    certifies_not="Nothing about a host whose files are used up by others (ENFILE), nor about data loaders and shared memory.",
    world_size=2,
    repeats=2,
    probes=(proc(hz=20),),
    control=Arm("worker.py", (*ASKED, "--ways", "ended,kept", "--timeout-s", "30")),
    fault=Arm("worker.py", (*ASKED, "--ways", "kept"), faults=LIMITED),
    mitigated=Arm("worker.py", (*ASKED, "--ways", "ended"), faults=LIMITED),
    expect={"torch>=2.9": "reproduced"},
)


@scenario.judge
def judge(evidence: Evidence) -> Verdict:
    """Ranks that did not come through all groups: aborted, or with which error; descriptors that each group left behind."""
    tries = _tries(evidence)
    kept = tries[tries["what"].eq("groups kept")]
    if (nothing := symptoms.undecided(evidence, {"tries": kept})) is not None:
        return nothing
    failed, clean = (symptoms.counts(kept, kept["failed"], arm) for arm in ("fault", "control"))
    fault = kept[kept["arm"].eq("fault")]
    short, other = fault[fault["rank"].eq(SHORT)], fault[fault["rank"].ne(SHORT)]
    kind = symptoms.apart(failed, clean, whole=bool(failed[0] == failed[1] and not other["says_so"].any()))
    grown = kept.loc[kept["arm"].eq("control"), "grown_per_group"]
    because = (
        f"Under a limit of {LIMIT} descriptors on rank {SHORT} {failed[0]} of {failed[1]} ranks did not come through {GROUPS} kept groups, {clean[0]} of "
        f"{clean[1]} without it. Of {len(short)} on rank {SHORT} {int(short['died'].sum())} were aborted and {int(short['says_so'].sum())} got an error that speaks of open "
        f"files; of {len(other)} on the other rank {int(other['says_so'].sum())} did{_last_words(other)}. A kept group costs {grown.median():.1f} descriptors."
    )
    cured = tries[tries["arm"].eq("mitigated")]
    if len(cured):
        because += f" Ended by the registry: {int((~cured['failed']).sum())} of {len(cured)} ranks came through, {cured['grown'].max():g} descriptors left at most."
    return Verdict(
        kind=kind,
        mitigation=_mitigation(evidence, cured),
        control_healthy=symptoms.unmarred(symptoms.attempts(evidence), "control") and symptoms.ended_well(evidence, "control"),
        metrics={
            "ranks_failed": symptoms.share(tries, tries["failed"]),
            "process_aborted": symptoms.share(tries, tries["died"]),
            "errors_that_speak_of_open_files": symptoms.share(tries[tries["failed"] & ~tries["died"]], tries["says_so"]),
            "descriptors_per_kept_group": symptoms.measure(kept, "grown_per_group", unit="descriptors"),
            "descriptors_per_ended_group": symptoms.measure(
                tries[tries["what"].eq("groups ended")], "grown_per_group", unit="descriptors"
            ),
        },
        because=because + symptoms.chance(kind),
    )


def _last_words(rows: pd.DataFrame) -> str:
    """The ends of the errors' first lines."""
    texts = sorted({text.splitlines()[0][-90:] for text in rows["text"].dropna() if text})
    return f" ({'; '.join(texts)})" if texts else ""


def _tries(evidence: Evidence) -> pd.DataFrame:
    rows = symptoms.attempts(evidence).reindex(columns=[*symptoms.COLUMNS, "asked", "done", "grown"])
    failed = (~rows["ended"] | rows["error"].ne("")).fillna(True).astype(bool)
    return rows.assign(
        failed=failed,
        died=(~rows["ended"]).astype(bool),
        says_so=rows["text"].str.contains("Too many open files", regex=False).fillna(False).astype(bool),
        grown_per_group=rows["grown"] / rows["done"].where(rows["done"].gt(0)),
    )


def _mitigation(evidence: Evidence, cured: pd.DataFrame) -> Mitigation:
    if not evidence.ran("mitigated"):
        return Mitigation.NONE
    held = len(cured) and cured["what"].eq("groups ended").all() and not cured["failed"].any()
    return Mitigation.HELD if held and symptoms.ended_well(evidence, "mitigated") else Mitigation.FAILED
