"""How long a rank waits for a key that is there, because its client of the file system remembers the file as it was."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dtprobe import Verdict
from dtprobe.authoring import symptoms, syscalls, tries

if TYPE_CHECKING:
    import pandas as pd

    from dtprobe import Evidence

LOOKER = 1
"""The rank whose view may be an old one."""

BLIND = 0.5
"""Share of the time for which the client remembers from which a wait comes from that; without it waits last milliseconds."""


def judged(evidence: Evidence, remembers_s: float) -> Verdict:
    """Keys that rank 1 saw only when its client's time was over, and how often it had opened the file and found nothing meanwhile."""
    rows = symptoms.attempts(evidence, "see")
    rows = rows[rows["rank"].eq(LOOKER)].reset_index(drop=True)
    rows = rows.assign(blind_s=tries.number(rows, "blind_s").where(rows["error"].eq("")))
    late = rows["blind_s"].ge(BLIND * remembers_s).fillna(False)
    looks = _looks(evidence)
    opened = symptoms.attempts(evidence, "open")
    opened = opened[opened["rank"].eq(LOOKER) & opened["error"].eq("")]
    metrics = {
        "blind_s": symptoms.measure(rows, "blind_s", documented="not atomic on NFS; no figure"),
        "open_s": symptoms.measure(opened, "took_s"),
        "looks_while_blind": symptoms.measure(looks, "looks", unit="opens"),
    }
    return tries.judged(
        evidence,
        rows,
        late,
        shown=f"saw the key only after more than half of the {remembers_s:g} s for which their client remembers",
        cured=rows["ended"] & rows["error"].eq("") & ~late,
        healed="saw the key before that",
        metrics={name: metric for name, metric in metrics.items() if any(map(metric.arm, ("control", "fault", "mitigated")))},
        more=_waits(rows) + _traced(looks),
    )


def _waits(rows: pd.DataFrame) -> str:
    def of(arm: str) -> str:
        some = rows.loc[rows["arm"].eq(arm), "blind_s"].dropna()
        return f"{some.min():.3f} to {some.max():.3f} s" if len(some) else "never"

    told = [
        f"{name} {of(arm)}"
        for name, arm in (("fault", "fault"), ("control", "control"), ("the framework's store", "mitigated"))
    ]
    return f"From set to seen: {', '.join(told)}."


def _looks(evidence: Evidence) -> pd.DataFrame:
    """One row a traced try of rank 1: how often it opened a file of the store while it waited for the key."""
    opens = syscalls.during(evidence, "see", "openat", "open")
    opens = opens[opens["rank"].eq(LOOKER) & opens["path"].str.contains("/meeting/", regex=False).fillna(False)]
    windows = syscalls.windows(evidence, "see").merge(syscalls.traced(evidence), on=syscalls.KEYS)
    windows = windows[windows["rank"].eq(LOOKER)]
    counts = opens.groupby([*syscalls.KEYS, "begun_ns"]).size().rename("looks").reset_index()
    return windows.merge(counts, on=[*syscalls.KEYS, "begun_ns"], how="left").fillna({"looks": 0})


def _traced(looks: pd.DataFrame) -> str:
    some = looks.loc[looks["arm"].eq("fault"), "looks"]
    return (
        f" Traced: the file was opened {some.min():g} to {some.max():g} times while it was not seen to have grown."
        if len(some)
        else ""
    )
