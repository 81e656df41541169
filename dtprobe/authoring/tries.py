"""The verdict of a scenario whose every try either shows the symptom or does not: how many did, in which arm, and who was cured."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from dtprobe.authoring import symptoms
from dtprobe.scenario import Metric, Mitigation, Verdict, VerdictKind

if TYPE_CHECKING:
    import pandas as pd

    from dtprobe.evidence import Evidence


def judged(
    evidence: Evidence,
    rows: pd.DataFrame,
    shows: pd.Series,
    *,
    shown: str,
    cured: pd.Series,
    healed: str,
    kind: VerdictKind = VerdictKind.REPRODUCED,
    metrics: Mapping[str, Metric] | None = None,
    more: str = "",
    ends_with_error: bool = False,
) -> Verdict:
    """The verdict from `rows` (of `symptoms.attempts`) and two boolean series beside them, in which null counts as no.

    `shows` says of a try whether it shows the symptom, `cured` whether it ended as the cure promises; `shown` and `healed` say
    so in words ("ended without an error and with wrong elements"). The verdict is `kind` where every try of the fault arm shows
    the symptom and none of control, `partly` where only some do; `more` ends its reason. Control is healthy where no try of it
    raised, whatever it was called. `ends_with_error`: ranks of the cured arm end with an exit code, as they should.
    """
    if (nothing := symptoms.undecided(evidence, {"tries": rows})) is not None:
        return nothing
    bad, clean = symptoms.counts(rows, shows, "fault"), symptoms.counts(rows, shows, "control")
    found = symptoms.apart(bad, clean, kind)
    because = f"{bad[0]} of {bad[1]} tries {shown}, {clean[0]} of {clean[1]} in control."
    because += symptoms.chance(found)
    mitigation = Mitigation.NONE
    if evidence.ran("mitigated"):
        well = symptoms.counts(rows, cured, "mitigated")
        held = well[0] == well[1] > 0 and not symptoms.counts(rows, shows, "mitigated")[0]
        held = held and (ends_with_error or symptoms.ended_well(evidence, "mitigated"))
        mitigation = Mitigation.HELD if held else Mitigation.FAILED
        because += f" With the cure {well[0]} of {well[1]} {healed}."
    return Verdict(
        kind=found,
        mitigation=mitigation,
        control_healthy=symptoms.ended_well(evidence, "control")
        and symptoms.unmarred(symptoms.attempts(evidence), "control")
        and not clean[0],
        metrics={"shown": symptoms.share(rows, shows), **(metrics or {})},
        because=f"{because} {more}".strip(),
    )


def number(rows: pd.DataFrame, column: str) -> pd.Series:
    """A column that workers noted, as numbers; 0 where a try noted nothing, as one that hung."""
    import pandas as pd

    given = rows[column] if column in rows else pd.Series(0, index=rows.index)
    return pd.to_numeric(given, errors="coerce").fillna(0)


def text(rows: pd.DataFrame, column: str) -> pd.Series:
    """A column that workers noted, as text; empty where a try noted nothing."""
    import pandas as pd

    given = rows[column] if column in rows else pd.Series("", index=rows.index)
    return given.fillna("").astype(str)
