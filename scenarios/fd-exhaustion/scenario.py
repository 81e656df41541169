"""Groups that are never ended use up a rank's descriptors: it fails or aborts, and the other rank does not learn why."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dtprobe import Arm, Mitigation, Scenario, Verdict, proc, strace
from dtprobe.authoring import symptoms, syscalls

if TYPE_CHECKING:
    import pandas as pd

    from dtprobe import Evidence

LIMIT = 110
GROUPS = 25
SHORT = 1
MAKE = ("openat", "socket", "accept4", "epoll_create", "epoll_create1", "eventfd2", "pipe2", "dup")
"""Calls that give a new descriptor."""

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
    probes=(proc(hz=20), strace(calls=",".join(MAKE))),
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
    traced = _traced(evidence)
    refused = traced[traced["arm"].eq("fault")]
    # the kernel's own answer, where it was recorded: to the rank that is short, and to no other
    by_kernel = bool((refused["refused"].gt(0) == refused["rank"].eq(SHORT)).all())
    kind = symptoms.apart(failed, clean, whole=bool(failed[0] == failed[1] and not other["says_so"].any() and by_kernel))
    grown = kept.loc[kept["arm"].eq("control"), "grown_per_group"]
    because = (
        f"Under a limit of {LIMIT} descriptors on rank {SHORT} {failed[0]} of {failed[1]} ranks did not come through {GROUPS} kept groups, {clean[0]} of "
        f"{clean[1]} without it. Of {len(short)} on rank {SHORT} {int(short['died'].sum())} were aborted and {int(short['says_so'].sum())} got an error that speaks of open "
        f"files; of {len(other)} on the other rank {int(other['says_so'].sum())} did{_last_words(other)}. A kept group costs {grown.median():.1f} descriptors."
    )
    because += _kernel_said(refused)
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
            "calls_refused": symptoms.measure(traced, "refused", unit="EMFILE a rank"),
            "descriptors_per_kept_group": symptoms.measure(kept, "grown_per_group", unit="descriptors"),
            "descriptors_per_ended_group": symptoms.measure(
                tries[tries["what"].eq("groups ended")], "grown_per_group", unit="descriptors"
            ),
        },
        because=because + symptoms.chance(kind),
    )


def _traced(evidence: Evidence) -> pd.DataFrame:
    """One row a traced rank: how often the kernel refused it a descriptor (EMFILE) in its tries, which call first, and after which collective."""
    import pandas as pd

    calls = pd.concat([syscalls.during(evidence, f"groups {way}", *MAKE) for way in ("kept", "ended")])
    calls = syscalls.after_collectives(evidence, calls[calls["errno"].eq("EMFILE")])
    keys = syscalls.KEYS
    first = calls.groupby(keys).agg(
        refused=("name", "size"), call=("name", "first"), op=("op", "first"), since_s=("since_s", "first")
    )
    return syscalls.traced(evidence).merge(first.reset_index(), on=keys, how="left").fillna({"refused": 0})


def _kernel_said(refused: pd.DataFrame) -> str:
    own = refused[refused["refused"].gt(0)]
    if own.empty:
        return "" if len(refused) else " No system call was traced here."
    one = own.iloc[0]
    after = f", {one['since_s']:.3f} s after the rank had called {one['op']}" if isinstance(one["op"], str) else ""
    return f" Traced: the kernel refused rank {one['rank']} {int(one['refused'])} descriptors (EMFILE), the first in {one['call']}{after}."


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
