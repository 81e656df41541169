"""A start in an order, or with a world size, that cannot complete: no deadlock, and no name in the error either."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dtprobe import Arm, Mitigation, Scenario, Verdict, VerdictKind
from dtprobe.authoring import symptoms

if TYPE_CHECKING:
    import pandas as pd

    from dtprobe import Evidence

RANKS = 3
TIMEOUT_S = 3.0
SLACK_S = 2.0
"""How much later than its deadline an error may come on a busy machine."""

TRIES = 2
"""c10d's client makes two attempts, each with the whole timeout."""

TIMEOUT = ("--ranks", str(RANKS), "--timeout-s", str(TIMEOUT_S))
FRAMEWORK = ("--start", "framework")

scenario = Scenario(
    name="init-order",
    failure_mode="init-order",
    title="The rank that serves the store starts it too late",
    claim="Parts that are started in the wrong order deadlock in the handshake; `_test_set_default_backend` is where it happens.",
    source="failure document, section 2.5",
    layer="store",
    certifies_not="Nothing about rendezvous by torchrun, whose agent serves the store before any rank is started.",
    variant="late-store",
    default=True,
    world_size=RANKS,
    repeats=2,
    control=Arm("worker.py", ("--ranks", str(RANKS), "--timeout-s", "30")),
    fault=Arm("worker.py", ("--order", "late-store", *TIMEOUT)),
    mitigated=Arm("worker.py", ("--order", "late-store", *TIMEOUT, *FRAMEWORK)),
    expect={"torch>=2.9": "refuted"},
    looks_like=("tcpstore-connect-failed",),  # nobody listens, whether the store's host is late or gone
)

TOO_LARGE = (f"environment:set,var=WORLD_SIZE,value={RANKS + 1}",)

world_size = scenario.with_variant(
    "world-size-too-large",
    default=False,
    title="The world size is larger than the number of ranks",
    claim="Ranks that are told a larger world than was started wait until the timeout, and fail with errors that do not name the rank that "
    "is missing.",
    source="measured here; the real failure behind section 2.5 of the failure document",
    fault=Arm("worker.py", TIMEOUT, faults=TOO_LARGE),
    mitigated=Arm("worker.py", (*TIMEOUT, *FRAMEWORK), faults=TOO_LARGE),
    expect={"torch>=2.9": "reproduced"},
    looks_like=("rendezvous-timeout",),  # a rank that was never started is absent as one that is late
)


@scenario.judge
def judge(evidence: Evidence) -> Verdict:
    """A deadlock would leave tries without an end; a refusal ends all of them, with an error, after the client's two attempts."""
    tries = _tries(evidence, waiting=range(1, RANKS), missing=0)
    if (nothing := symptoms.undecided(evidence, {"tries": tries})) is not None:
        return nothing
    symbols = evidence.events("symbol")
    known = bool(symbols["found"].any()) if "found" in symbols else False
    fault = tries[tries["arm"].eq("fault")]
    stuck = int((~fault["ended"]).sum())
    bounded = int(fault["took_s"].le(TRIES * TIMEOUT_S + SLACK_S + TIMEOUT_S).sum())
    refuted = _apart(tries, VerdictKind.REFUTED, whole=not known and bounded == len(fault))
    kind = VerdictKind.REPRODUCED if stuck else refuted
    because = (
        f"{stuck} of {len(fault)} starts deadlocked; {int(fault['failed'].sum())} ended with {_kinds(fault)} after {fault['took_s'].median():.1f} s "
        f"of a {TIMEOUT_S:g} s timeout. `_test_set_default_backend` {'exists' if known else 'does not exist in this torch'}."
    )
    return _verdict(evidence, tries, kind, because, missing=0, documented="deadlock")


@world_size.judge
def judge_world_size(evidence: Evidence) -> Verdict:
    """Starts that fail at the timeout without the name of the rank that is missing."""
    tries = _tries(evidence, waiting=range(RANKS), missing=RANKS)
    if (nothing := symptoms.undecided(evidence, {"tries": tries})) is not None:
        return nothing
    fault = tries[tries["arm"].eq("fault")]
    late = fault["failed"] & fault["took_s"].ge(0.9 * TIMEOUT_S) & ~fault["told"]
    kind = _apart(tries, VerdictKind.REPRODUCED, whole=bool(late.all()))
    because = (
        f"{int(late.sum())} of {len(fault)} starts failed at the {TIMEOUT_S:g} s timeout without naming rank {RANKS}"
        + (f" ({_kinds(fault)})" if late.any() else "")
        + "."
    )
    return _verdict(evidence, tries, kind, because, missing=RANKS, documented="")


def _tries(evidence: Evidence, waiting: range, missing: int) -> pd.DataFrame:
    """The starts of the ranks that wait: `failed`, and `told` where the error names the missing rank alone."""
    rows = symptoms.attempts(evidence, "start").reindex(columns=[*symptoms.COLUMNS, "named", "how"])
    rows = rows[rows["rank"].isin(waiting)]
    return rows.assign(failed=rows["error"].fillna("").ne("").astype(bool), told=rows["named"].eq(str(missing)))


def _apart(tries: pd.DataFrame, kind: VerdictKind, *, whole: bool) -> VerdictKind:
    """What the starts that failed in the fault arm and in control say, as `symptoms.apart`."""
    bad, clean = (symptoms.counts(tries, tries["failed"], arm) for arm in ("fault", "control"))
    return symptoms.apart(bad, clean, kind, whole=whole)


def _kinds(rows: pd.DataFrame) -> str:
    """The errors by type, each with its first line."""
    failed = rows[rows["failed"]]
    return (
        "; ".join(f"{kind}: {own['text'].iloc[0].splitlines()[0][:120]}" for kind, own in failed.groupby("error")) or "no error"
    )


def _verdict(
    evidence: Evidence, tries: pd.DataFrame, kind: VerdictKind, because: str, *, missing: int, documented: str
) -> Verdict:
    cured = tries[tries["arm"].eq("mitigated")]
    mitigation = Mitigation.NONE
    if evidence.ran("mitigated"):
        held = len(cured) and cured["told"].all() and cured["took_s"].le(TIMEOUT_S + SLACK_S).all()
        mitigation = Mitigation.HELD if held else Mitigation.FAILED
    if len(cured):
        because += f" The framework's start: {int(cured['told'].sum())} of {len(cured)} errors named rank {missing}, after {cured['took_s'].max():.1f} s at most."
    return Verdict(
        kind=kind,
        mitigation=mitigation,
        control_healthy=symptoms.unmarred(tries, "control") and symptoms.ended_well(evidence, "control"),
        metrics={
            "failed": symptoms.share(tries, tries["failed"]),
            "never_ended": symptoms.share(tries, ~tries["ended"], documented=documented),
            "errors_naming_the_missing_rank": symptoms.share(tries[tries["failed"]], tries["told"]),
            "time_to_error_s": symptoms.measure(tries[tries["failed"]], "took_s"),
        },
        because=because + symptoms.chance(kind),
    )
