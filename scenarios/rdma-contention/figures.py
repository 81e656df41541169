"""Figures of the measurements: what each case's artifacts say, and which of them say nothing about the link."""

from __future__ import annotations

from pathlib import PurePath
from typing import TYPE_CHECKING

from dtprobe import Metric
from dtprobe.authoring import symptoms

if TYPE_CHECKING:
    from collections.abc import Sequence

    import pandas as pd

    from dtprobe import Evidence

SUM = (0.6, 1.15)
"""Goodputs of all flows together, as a share of the link's rate: outside of it the emulated processor decided, or the window slipped."""

SLACK_S, EARLY = 3.0, 0.8
"""How late a completion may fail after the time that retries and timeout give, and from which share of that time on it is not early."""

RETRY_EXCEEDED = 12
"""IBV_WC_RETRY_EXC_ERR, ibv_poll_cq(3)."""

EDGE_S = 0.5
"""Of the window in which RDMA was sending so much is left out at each end, where TCP's share is counted."""

COUNTERS = ("out_of_seq_request", "rcvd_seq_err", "completer_retry_err", "duplicate_request")


def goodput(evidence: Evidence) -> pd.DataFrame:
    """One row a case: Mbit/s of RDMA and of TCP in RDMA's window, UDP's share lost, counters' growth; `valid` and, where not, `why`."""
    import pandas as pd

    extra = ("folder", "idle", "drops", "from_s", "to_s", "rate_mbit", "invalid")
    tries = symptoms.attempts(evidence)
    tries = tries.reindex(columns=[*symptoms.COLUMNS, *extra])
    written, flows, counted = (foldered(evidence.frame(name)) for name in ("rdma_bandwidth", "iperf", "rdma_counters"))
    found = []
    for one in tries.itertuples():
        own = [_of(frame, one) for frame in (written, flows, counted)]
        found.append(_case(one, *own))
    columns = ["rdma_mbit", "tcp_mbit", "udp_loss", *COUNTERS, "why"]
    rows = pd.concat([tries, pd.DataFrame(found, columns=columns, index=tries.index)], axis=1)
    return rows.assign(valid=rows["why"].eq("")).astype({name: "Float64" for name in columns[:-1]})


def foldered(frame: pd.DataFrame) -> pd.DataFrame:
    """With the name of the folder in which each row's artifact lies."""
    return frame.assign(folder=[PurePath(source).parent.name for source in frame["source"]])


def _of(frame: pd.DataFrame, one: object) -> pd.DataFrame:
    keys = ("arm", "repeat", "folder")
    return frame[[all(row) for row in zip(*(frame[key].eq(getattr(one, key)) for key in keys), strict=True)]]


def _case(one: object, written: pd.DataFrame, flows: pd.DataFrame, counted: pd.DataFrame) -> dict[str, object]:
    clients = written[written["kind"].eq("bandwidth") & written["source"].str.endswith("ib_write_bw.txt")]
    rdma = float(clients["average_gbits"].iloc[-1]) * 1e3 if len(clients) else None
    tcp, udp = (flows[flows["protocol"].eq(name)] for name in ("tcp", "udp"))
    start_s, end_s = one.from_s + EDGE_S, one.to_s - EDGE_S
    within = tcp[tcp["start_s"].ge(start_s) & tcp["end_s"].le(end_s)]
    lasted_s = float((within["end_s"] - within["start_s"]).sum())
    tcp_mbit = float(within["bytes"].sum()) * 8 / 1e6 / lasted_s if lasted_s else None
    packets = float(udp["packets"].sum())
    grown = counted.pivot_table(index="counter", columns="moment", values="value", aggfunc="sum")
    moved = {name: _growth(grown, name) for name in COUNTERS}
    udp_mbit = float(udp["bits_per_s"].mean()) / 1e6 if len(udp) else 0.0
    why = _doubt(one, rdma, tcp_mbit, udp_mbit)
    return {
        "rdma_mbit": rdma,
        "tcp_mbit": tcp_mbit,
        "udp_loss": float(udp["lost"].sum()) / packets if packets else None,
        **moved,
        "why": why,
    }


def _growth(grown: pd.DataFrame, name: str) -> float | None:
    if name not in grown.index or not {"before", "after"} <= set(grown.columns):
        return None
    return float(grown.loc[name, "after"] - grown.loc[name, "before"])


def _doubt(one: object, rdma: float | None, tcp: float | None, udp: float) -> str:
    """Why a case says nothing about the link, empty where it does."""
    if not one.ended or one.error:
        return f"{one.error}: {one.text}"[:160] if one.ended else "it did not end"
    if isinstance(one.invalid, str) and one.invalid:
        return one.invalid
    if "rdma" in one.what and not rdma:
        return "perftest gave no figure"
    if "tcp" in one.what and tcp is None:
        return "no interval of TCP lies within RDMA's transfer"
    import pandas as pd

    total = (rdma or 0.0) + (tcp or 0.0) + udp
    # Null on a device of the host, whose rate is not known.
    if pd.notna(one.rate_mbit) and not SUM[0] <= total / one.rate_mbit <= SUM[1]:
        return f"all flows together {total:.1f} of {one.rate_mbit:g} Mbit/s"
    return ""


def losses(evidence: Evidence) -> pd.DataFrame:
    """One row a try; `in_time`: its work completed with status 12 when retries and timeout say, or at most SLACK_S later."""
    extra = ("fault", "retries", "promised_s", "watched_s", "status", "after_s", "completed")
    tries = symptoms.attempts(evidence).reindex(columns=[*symptoms.COLUMNS, *extra])
    tries = tries.astype({name: "Float64" for name in extra[2:]}).astype({"retries": "Int64", "fault": "string[python]"})
    timely = tries["after_s"].ge(EARLY * tries["promised_s"]) & tries["after_s"].le(tries["promised_s"] + SLACK_S)
    return tries.assign(in_time=(tries["status"].eq(RETRY_EXCEEDED) & timely).fillna(False).astype(bool))


def discarded(rows: pd.DataFrame) -> str:
    """How many cases were left out, and why."""
    out = rows[~rows["valid"]]
    return f" Left out {len(out)} of {len(rows)} measurements: {'; '.join(sorted(set(out['why'])))[:300]}." if len(out) else ""


def where(evidence: Evidence) -> str:
    """What it ran on: the lab VM, or a device of the host by name."""
    told = evidence.events("where")
    return " and ".join(sorted(set(told["place"]))) if "place" in told else "lab VM"


def values(rows: pd.DataFrame, arm: str, column: str, *, without: str = "", only: str = "") -> list[float]:
    """Figures of an arm's cases, those without a kind of traffic or those with it."""
    own = rows[rows["arm"].eq(arm)]
    if without:
        own = own[~own["what"].str.contains(without, regex=False)]
    if only:
        own = own[own["what"].str.contains(only, regex=False)]
    return [float(one) for one in own[column].dropna()]


def metric(
    rows: pd.DataFrame, column: str, *, unit: str = "Mbit/s", documented: str = "", without: str = "", only: str = ""
) -> Metric:
    from dtprobe.scenario import ARMS
    from dtprobe.stats import measured

    found = {arm: values(rows, arm, column, without=without, only=only) for arm in ARMS}
    return Metric(unit=unit, documented=documented, **{arm: measured(some) for arm, some in found.items() if some})


def median(some: Sequence[float]) -> float:
    from statistics import median as of

    return of(some) if some else 0.0


def apart(first: Sequence[float], second: Sequence[float]) -> bool:
    """Whether no figure of one side lies among the other's."""
    return max(second) < min(first) or max(first) < min(second)
