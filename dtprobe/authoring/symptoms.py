"""What judges ask of workers that try something and say how it ended: shares, times, and whether control was well.

A worker tries under `dtprobe.worker.attempt`; here the tries of all arms become one frame, and counts over it metrics with
intervals. pandas and scipy are imported when a function is called.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from dtprobe.scenario import ARMS, Metric, Verdict, VerdictKind

if TYPE_CHECKING:
    import pandas as pd

    from dtprobe.evidence import Evidence

COLUMNS = {
    "arm": "string",
    "repeat": "Int64",
    "rank": "Int64",
    "what": "string",
    "ended": "boolean",
    "took_s": "Float64",
    # Not pyarrow's: comparing with those gives another kind of nullable boolean, and the two cannot be combined (pandas 3.1).
    "error": "string[python]",
    "text": "string[python]",
}


def attempts(evidence: Evidence, what: str | None = None) -> pd.DataFrame:
    """One row a try of a rank in the three arms, or of those called `what`; fields that the worker added are further columns.

    `ended` is False for one that was begun and never came to an end (its rank hung, or was killed in it): `took_s`, `error`
    and `text` are null then. `error` is the exception's type, empty where none was raised.
    """
    import pandas as pd

    keys = ["arm", "repeat", "rank", "what", "try"]
    begun = evidence.events("begun").reindex(columns=keys)
    ended = evidence.events("attempt").assign(ended=True)
    ended = ended.drop(columns=[name for name in ("pid", "t_ns") if name in ended])
    for name in (*keys, *COLUMNS):
        if name not in ended:
            ended[name] = pd.NA
    found = begun.astype(object).merge(ended.astype(object), on=keys, how="left")
    found["ended"] = found["ended"].eq(True)
    found = found[found["arm"].isin(ARMS) & (found["what"].eq(what) if what is not None else True)]
    found = found.drop(columns="try").reset_index(drop=True)
    extra = [name for name in found if name not in COLUMNS]
    return found[[*COLUMNS, *extra]].astype(COLUMNS).infer_objects()


def share(rows: pd.DataFrame, holds: pd.Series, *, documented: str = "") -> Metric:
    """Of each arm the share of `rows` (with a column `arm`) for which `holds`, a boolean series beside it; null counts as no."""
    from dtprobe.stats import wilson

    yes = holds.fillna(False).astype(bool)
    counts = {str(arm): (int(yes[some.index].sum()), len(some)) for arm, some in rows.groupby("arm")}
    found = {arm: wilson(k, n) for arm, (k, n) in counts.items() if arm in ARMS}
    return Metric(unit="share", documented=documented, **found)


def counts(rows: pd.DataFrame, holds: pd.Series, arm: str) -> tuple[int, int]:
    """(k, n): for how many of the arm's rows it holds."""
    yes = holds.fillna(False).astype(bool)[rows["arm"].eq(arm)]
    return int(yes.sum()), len(yes)


def apart(
    fault: tuple[int, int],
    control: tuple[int, int],
    kind: VerdictKind = VerdictKind.REPRODUCED,
    *,
    whole: bool | None = None,
) -> VerdictKind:
    """What (k, n) of both arms say: `kind` where `whole` (default: every try of the fault arm shows the symptom), else `partly`.

    `not-reproduced` where no larger share shows it than in control, `inconclusive` where one does that chance may have made
    (Fisher exact test at 0.05, `stats.separated_counts`): then more repeats are wanted, and `chance` says so.
    """
    from dtprobe.stats import separated_counts

    if fault[0] * control[1] <= control[0] * fault[1]:
        return VerdictKind.NOT_REPRODUCED
    if not separated_counts(*fault, *control):
        return VerdictKind.INCONCLUSIVE
    return kind if (fault[0] == fault[1] if whole is None else whole) else VerdictKind.PARTLY


def chance(kind: VerdictKind) -> str:
    """What the reason of a verdict from `apart` ends with: what helps where it is inconclusive, else nothing."""
    return " That may be chance: give more --repeats." if kind is VerdictKind.INCONCLUSIVE else ""


def measure(rows: pd.DataFrame, column: str, *, unit: str = "s", documented: str = "") -> Metric:
    """The median of a column by arm, nulls left out."""
    from dtprobe.stats import measured

    some = rows.dropna(subset=[column]) if column in rows else rows.iloc[:0]
    values = {str(arm): [float(one) for one in own[column]] for arm, own in some.groupby("arm")}
    found = {arm: measured(own) for arm, own in values.items() if arm in ARMS}
    return Metric(unit=unit, documented=documented, **found)


def ended_well(evidence: Evidence, arm: str) -> bool:
    """Whether the arm ran, and every rank of it ended by itself with exit code 0."""
    own = evidence.outcomes[evidence.outcomes["arm"] == arm]
    return bool(len(own) and own["exit_code"].eq(0).fillna(False).all() and not own["timed_out"].fillna(False).any())


def unmarred(rows: pd.DataFrame, arm: str) -> bool:
    """Whether the arm tried anything, and every try ended without an exception."""
    own = rows[rows["arm"] == arm]
    return bool(len(own) and own["ended"].all() and own["error"].eq("").fillna(False).all())


def undecided(evidence: Evidence, rows: Mapping[str, pd.DataFrame] | None = None) -> Verdict | None:
    """The verdict where nothing can be said: control or fault did not run, or one of these frames has no row of one of them."""
    for arm in ("control", "fault"):
        if not evidence.ran(arm):
            return _inconclusive(f"{arm} did not run")
        for name, frame in (rows or {}).items():
            if not frame["arm"].eq(arm).any():
                return _inconclusive(f"{arm} left no {name}")
    return None


def naming(rows: pd.DataFrame, ranks: Iterable[int], column: str = "text") -> pd.Series:
    """Whether a text names all of these ranks as `rank N` or in `ranks N, M`, and no other."""
    import re

    import pandas as pd

    wanted = set(ranks)

    def names(text: object) -> bool:
        lists = re.findall(r"\branks? (\d+(?:(?:, | and )\d+)*)", str(text))
        return {int(one) for some in lists for one in re.findall(r"\d+", some)} == wanted

    return pd.Series([names(text) for text in rows[column]], index=rows.index, dtype="boolean")


def _inconclusive(why: str) -> Verdict:
    return Verdict(kind=VerdictKind.INCONCLUSIVE, control_healthy=False, because=why)
