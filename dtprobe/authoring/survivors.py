"""The judge that several scenarios share: something happens to rank 1 in the middle of training; what do the others learn, and when?"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dtprobe import Arm, Metric, Mitigation, Verdict, VerdictKind
from dtprobe.authoring import symptoms

if TYPE_CHECKING:
    import pandas as pd

    from dtprobe import Evidence

WORLD_SIZE = 3
CULPRIT = 1
"""The rank that the faults are aimed at; rank 0 serves the store, which the cure needs."""

STEP = 12
"""The number of the step, counted from 1, in which the fault acts, between two all-reduces."""

WAITED_S = 5.0
"""The collectives' timeout where it is expected to pass."""
SPARED_S = 20.0
"""The collectives' timeout where the error is to come long before it, on a busy machine too."""
LATE = 0.9
"""Of the timeout: an error that comes later than this came by the timeout."""


def arm(*args: str, timeout_s: float = SPARED_S, faults: tuple[str, ...] = ()) -> Arm:
    """An arm of the loop in `rank-killed`, for that scenario and those beside it."""
    return Arm("../rank-killed/worker.py", args=("--timeout-s", str(timeout_s), *args), faults=faults)


def at_step(action: str, **parameters: object) -> str:
    """The fault `process:action` on rank 1 in its own work of step STEP."""
    words = "".join(f",{key}={value}" for key, value in parameters.items())
    return f"process:{action},rank={CULPRIT},op=barrier,group=own,nth={STEP}{words}"


@dataclass(frozen=True, kw_only=True)
class Claim:
    """What is said to happen: how the culprit ends, what the others' error says, and whether it comes at once or by the timeout."""

    fate: str
    """How the culprit ends, in words: `was killed by signal 9`."""
    hit: Callable[[pd.DataFrame, pd.DataFrame], pd.Series]
    """From the culprit's outcomes and its tries to whether that is how it ended, one value an outcome."""
    says: str
    """A regular expression that the others' error matches."""
    by_timeout: bool
    """Whether the error comes by the timeout, which is WAITED_S then, or at once, with a timeout of SPARED_S."""
    cure_says: str = ""
    """What the cured error says besides the rank, as a regular expression."""


def ended_by(signal: int) -> Callable[[pd.DataFrame, pd.DataFrame], pd.Series]:
    """Whether the culprit was ended by that signal."""
    return lambda outcomes, tries: outcomes["signal"].eq(signal)


def judge(evidence: Evidence, claim: Claim) -> Verdict:
    """The others' errors: their text, their time, whether they name the culprit; and how the culprit itself ended."""
    steps = symptoms.attempts(evidence, "step")
    timeout_s = WAITED_S if claim.by_timeout else SPARED_S
    if verdict := symptoms.undecided(evidence, {"step": steps}):
        return verdict
    others = evidence.outcomes[evidence.outcomes["rank"].ne(CULPRIT)]
    survivors = len(others[others["arm"] == "fault"])
    failed = steps[steps["rank"].ne(CULPRIT) & steps["error"].fillna("").ne("")].copy()
    failed["named"] = symptoms.naming(failed, (CULPRIT,))
    failed["said"] = failed["text"].fillna("").map(lambda text: re.search(claim.says, text) is not None)
    failed["late"] = failed["took_s"].ge(LATE * timeout_s)
    own = evidence.outcomes[evidence.outcomes["arm"].eq("fault") & evidence.outcomes["rank"].eq(CULPRIT)]
    hit = int(claim.hit(own, steps[steps["arm"].eq("fault") & steps["rank"].eq(CULPRIT)]).fillna(False).sum())
    fault = failed[failed["arm"] == "fault"]
    as_said = fault["said"] & fault["late"].eq(claim.by_timeout) & ~fault["named"]
    if not hit or not len(fault):
        kind = VerdictKind.NOT_REPRODUCED
    else:
        whole = hit == len(own) and len(fault) == survivors and bool(as_said.all())
        kind = VerdictKind.REPRODUCED if whole else VerdictKind.PARTLY
    text = fault["text"].iloc[0].partition("] ")[2] or fault["text"].iloc[0] if len(fault) else ""
    because = (
        f"Rank {CULPRIT} {claim.fate} in {hit} of {len(own)} runs; {len(fault)} of {survivors} other ranks raised"
        + (f' ("{text.partition(". ")[0][:150]}")' if text else "")
        + f", {int(fault['late'].sum())} of them by their {timeout_s:g} s timeout"
        + (f", after {float(fault['took_s'].median()):.2f} s in the median" if len(fault) else "")
        + f"; {int(fault['named'].sum())} named the rank."
    )
    mitigation, cured = _mitigation(evidence, failed, claim)
    return Verdict(
        kind=kind,
        mitigation=mitigation,
        control_healthy=symptoms.ended_well(evidence, "control") and symptoms.unmarred(steps, "control"),
        metrics={
            "other_ranks_failed": _failed_share(others, failed),
            "errors_naming_the_rank": symptoms.share(failed, failed["named"]),
            "time_to_error_s": symptoms.measure(failed, "took_s"),
        },
        because=f"{because} {cured}".strip(),
    )


def _failed_share(others: pd.DataFrame, failed: pd.DataFrame) -> Metric:
    import pandas as pd

    key = ["arm", "repeat", "rank"]
    raised = set(failed[key].itertuples(index=False, name=None))
    rows = others.reset_index(drop=True)
    return symptoms.share(rows, pd.Series([one in raised for one in rows[key].itertuples(index=False, name=None)]))


def _mitigation(evidence: Evidence, failed: pd.DataFrame, claim: Claim) -> tuple[Mitigation, str]:
    """Held where every other rank raised an error that names the culprit, and in it what the cure promises to say."""
    if not evidence.ran("mitigated"):
        return Mitigation.NONE, ""
    outcomes = evidence.outcomes
    expected = int((outcomes["arm"].eq("mitigated") & outcomes["rank"].ne(CULPRIT)).sum())
    cured = failed[failed["arm"] == "mitigated"]
    told = cured["named"] & cured["text"].map(lambda text: re.search(claim.cure_says, str(text)) is not None)
    held = len(cured) == expected and bool(told.all()) and expected > 0
    text = f"Checked: {int(told.sum())} of {expected} other ranks raised an error that names rank {CULPRIT}"
    if len(cured):
        text += f", after {float(cured['took_s'].median()):.1f} s in the median"
    return (Mitigation.HELD if held else Mitigation.FAILED), f"{text}."
