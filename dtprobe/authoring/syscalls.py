"""What the kernel was asked while workers tried something: strace's calls, the tries and the collectives, on one clock.

Only traced repeats have calls (strace is a heavy recorder), and none where strace is missing: a judge says which, and what it
sees there has to agree with what the workers said.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dtprobe.scenario import ARMS

if TYPE_CHECKING:
    import pandas as pd

    from dtprobe.evidence import Evidence

KEYS = ["arm", "repeat", "rank"]
FORKING = ("clone", "clone3", "fork", "vfork")


def windows(evidence: Evidence, what: str | None = None) -> pd.DataFrame:
    """The tries of all arms, or those called `what`: arm, repeat, rank, what, `trier` (a pid), `begun_ns`, and `ended_ns`, null without an end."""
    begun = evidence.events("begun").reindex(columns=[*KEYS, "what", "try", "pid", "t_ns"])
    ended = evidence.events("attempt").reindex(columns=[*KEYS, "what", "try", "t_ns"])
    found = begun.merge(ended, on=[*KEYS, "what", "try"], how="left", suffixes=("_begun", "_ended"))
    found = found.rename(columns={"t_ns_begun": "begun_ns", "t_ns_ended": "ended_ns", "pid": "trier"}).astype(
        {"ended_ns": "Int64"}
    )
    found = found[found["arm"].isin(ARMS) & (found["what"].eq(what) if what is not None else True)]
    return found[[*KEYS, "what", "trier", "begun_ns", "ended_ns"]].reset_index(drop=True)


def traced(evidence: Evidence) -> pd.DataFrame:
    """The ranks whose calls were traced: arm, repeat and rank."""
    calls = evidence.frame("syscalls")
    return calls.loc[calls["arm"].isin(ARMS), KEYS].drop_duplicates().reset_index(drop=True)


def during(evidence: Evidence, what: str, *names: str) -> pd.DataFrame:
    """Calls of these names that a rank, or a child of it, began in its tries called `what`, with the try's `trier`, `begun_ns`, `ended_ns`.

    Columns as in the frame `syscalls`; the kernel's answer is in `result` and `errno`. A call that never came back has no `result`.
    """
    calls = evidence.frame("syscalls")
    calls = calls[calls["kind"].eq("syscall") & calls["name"].isin(names)]
    found = calls.merge(windows(evidence, what).drop(columns="what"), on=KEYS)
    late = found["ended_ns"].notna() & found["t_ns"].gt(found["ended_ns"])
    return found[found["t_ns"].ge(found["begun_ns"]) & ~late.fillna(False)].reset_index(drop=True)


def after_collectives(evidence: Evidence, calls: pd.DataFrame) -> pd.DataFrame:
    """The same calls with `op` and `seq` of the collective that the rank had called last, and `since_s`, how long before.

    Null where the flight recorder has none before it.
    """
    import pandas as pd

    made = evidence.frame("collectives")
    made = made.loc[made["arm"].isin(ARMS), [*KEYS, "t_ns", "op", "seq"]].assign(called_ns=made["t_ns"])
    keys = {"arm": "string[python]", "repeat": "int64", "rank": "int64", "t_ns": "int64"}
    left, right = (frame.dropna(subset=list(keys)).astype(keys).sort_values("t_ns") for frame in (calls, made))
    found = pd.merge_asof(left, right, on="t_ns", by=KEYS)
    return found.assign(since_s=(found["t_ns"] - found["called_ns"]) / 1e9).drop(columns="called_ns")


def forks(evidence: Evidence) -> pd.DataFrame:
    """One row a child process of a traced rank: arm, repeat, rank, `t_ns` of the call it came from, `parent` and `child` (pids), and its end.

    `threads` that the child started itself, and `waits`: whether the last call of its first thread was a futex that never came
    back. To be traced: clone, clone3, fork, vfork and futex.
    """
    import pandas as pd

    calls = evidence.frame("syscalls")
    calls = calls[calls["kind"].eq("syscall") & calls["arm"].isin(ARMS)]
    threads = calls["args"].str.contains("CLONE_THREAD", regex=False).fillna(False)
    births = calls[calls["name"].isin(FORKING) & ~threads & calls["result"].str.fullmatch(r"[1-9]\d*").fillna(False)]
    rows = []
    for birth in births.itertuples():
        child = int(birth.result)
        own = (
            calls["arm"].eq(birth.arm)
            & calls["repeat"].eq(birth.repeat)
            & calls["rank"].eq(birth.rank)
            & calls["pid"].eq(child)
        )
        first = calls[own & calls["tid"].eq(child)].sort_values("t_ns")
        waits = len(first) > 0 and first["name"].iloc[-1] == "futex" and pd.isna(first["result"].iloc[-1])
        made = int((own & threads).sum())
        row = {"t_ns": birth.t_ns, "parent": birth.pid, "child": child, "threads": made, "waits": bool(waits)}
        rows.append({**{key: getattr(birth, key) for key in KEYS}, **row})
    return pd.DataFrame(rows, columns=[*KEYS, "t_ns", "parent", "child", "threads", "waits"]).astype({"waits": "boolean"})
