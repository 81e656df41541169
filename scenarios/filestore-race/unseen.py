"""How long a rank waits for a key that is there, because its client of the file system remembers the file as it was."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dtprobe import Metric, Mitigation, Verdict
from dtprobe.authoring import symptoms, syscalls, tries

if TYPE_CHECKING:
    import pandas as pd

    from dtprobe import Evidence

ARMS = ("control", "fault", "mitigated")
LOOKER = 1
"""The rank whose view may be an old one."""
DOCUMENTED = "not atomic on NFS; no figure"

BLIND = 0.5
"""Share of the time for which the client remembers from which a wait comes from that; without it waits last milliseconds."""


def judged(evidence: Evidence, remembers_s: float) -> Verdict:
    """Keys that rank 1 saw only when its client's time was over, and how often it had opened the file and found nothing meanwhile."""
    rows = _waits(evidence, "see")
    late = rows["blind_s"].ge(BLIND * remembers_s).fillna(False)
    looks = _looks(evidence)
    metrics = {
        "blind_s": symptoms.measure(rows, "blind_s", documented=DOCUMENTED),
        "open_s": symptoms.measure(_waits(evidence, "open"), "took_s"),
        "looks_while_blind": symptoms.measure(looks, "looks", unit="opens"),
    }
    return tries.judged(
        evidence,
        rows,
        late,
        shown=f"saw the key only after more than half of the {remembers_s:g} s for which their client remembers",
        cured=rows["ended"] & rows["error"].eq("") & ~late,
        healed="saw the key before that",
        metrics=_measured(metrics),
        more=f"From set to seen: {_spans(rows)}.{_traced(looks)}",
    )


def judged_over_nfs(evidence: Evidence, remembers_s: float) -> Verdict:
    """Names and keys that client 1 saw only when its time for folders was over: `partly` where it is so for names alone."""
    names, keys, opened = (_waits(evidence, what, rank=0) for what in ("see name", "see key", "open 1"))  # one rank has the VM
    if (nothing := symptoms.undecided(evidence, {"names": names, "keys": keys})) is not None:
        return nothing
    (name_late, name_counts), (key_late, key_counts) = (_late(rows, remembers_s) for rows in (names, keys))
    kind = symptoms.apart(name_counts["fault"], name_counts["control"], whole=key_counts["fault"][0] == key_counts["fault"][1])
    late, asked = name_counts["fault"]
    because = (
        f"{late} of {asked} names that the client had looked for before were seen only after more than half of the {remembers_s:g} s for "
        f"which it remembers a folder ({_spans(names)}), and {key_counts['fault'][0]} of {key_counts['fault'][1]} keys of torch's FileStore on "
        f"the same mount: its flock and its opening ask the server. From set to seen: {_spans(keys)}."
    )
    return Verdict(
        kind=kind,
        mitigation=_mitigation(evidence, names, keys, opened, remembers_s),
        control_healthy=symptoms.ended_well(evidence, "control")
        and symptoms.unmarred(symptoms.attempts(evidence), "control")
        and not name_counts["control"][0]
        and not key_counts["control"][0],
        metrics=_measured(
            {
                "names_seen_late": symptoms.share(names, name_late),
                "keys_seen_late": symptoms.share(keys, key_late),
                "name_blind_s": symptoms.measure(names, "blind_s", documented=DOCUMENTED),
                "key_blind_s": symptoms.measure(keys, "blind_s", documented=DOCUMENTED),
                "open_s": symptoms.measure(opened, "took_s"),
            }
        ),
        because=because + symptoms.chance(kind),
    )


def _mitigation(
    evidence: Evidence, names: pd.DataFrame, keys: pd.DataFrame, opened: pd.DataFrame, remembers_s: float
) -> Mitigation:
    """Held where the store was opened and its keys were seen in good time, and no name had to be waited for."""
    if not evidence.ran("mitigated"):
        return Mitigation.NONE
    keys, opened = (rows[rows["arm"].eq("mitigated")] for rows in (keys, opened))
    limit_s = BLIND * remembers_s
    held = len(keys) and keys["blind_s"].lt(limit_s).fillna(False).all() and not names["arm"].eq("mitigated").any()
    held = held and len(opened) and opened["took_s"].lt(limit_s).fillna(False).all()
    return Mitigation.HELD if held and symptoms.ended_well(evidence, "mitigated") else Mitigation.FAILED


def _waits(evidence: Evidence, what: str, rank: int = LOOKER) -> pd.DataFrame:
    """The rank's tries called so; `blind_s` is null where nothing was seen."""
    rows = symptoms.attempts(evidence, what)
    rows = rows[rows["rank"].eq(rank)].reset_index(drop=True)
    return rows.assign(blind_s=tries.number(rows, "blind_s").where(rows["error"].eq("").fillna(False)).astype("Float64"))


def _late(rows: pd.DataFrame, remembers_s: float) -> tuple[pd.Series, dict[str, tuple[int, int]]]:
    late = rows["blind_s"].ge(BLIND * remembers_s).fillna(False) | rows["error"].fillna("hung").ne("")
    return late, {arm: symptoms.counts(rows, late, arm) for arm in ("control", "fault", "mitigated")}


def _measured(metrics: dict[str, Metric]) -> dict[str, Metric]:
    return {name: metric for name, metric in metrics.items() if any(map(metric.arm, ARMS))}


def _spans(rows: pd.DataFrame) -> str:
    """The shortest and the longest wait of each arm, in words."""
    told = []
    for arm in ARMS:
        some = rows.loc[rows["arm"].eq(arm), "blind_s"].dropna()
        told += [f"{arm} {some.min():.3f} to {some.max():.3f} s"] if len(some) else []
    return ", ".join(told) or "never"


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
