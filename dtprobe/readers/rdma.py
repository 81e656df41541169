"""What RDMA tools and devices say: perftest's bandwidth tests, the counters below /sys/class/infiniband, ibstat."""

from __future__ import annotations

import re
from pathlib import Path

import pandas as pd

from dtprobe.readers.artifact import INT64, Problems, ReaderError, note, one_line, rank_of, read_text
from dtprobe.readers.schema import Schema

BANDWIDTH = Schema(
    "rdma_bandwidth",
    {
        "test": "string",
        "device": "string",
        "bytes": "Int64",
        "iterations": "Int64",
        "peak_gbits": "Float64",
        "average_gbits": "Float64",
        "messages_per_s": "Float64",
        "status": "Int64",
        "text": "string",
    },
)
"""`kind` is "bandwidth" for a line of figures, "failure" for a completion with an error: `status` is then the work completion's
(ibv_poll_cq(3): 12 is IBV_WC_RETRY_EXC_ERR, the peer did not acknowledge), or null for another complaint, and `text` the line."""

COUNTERS = Schema(
    "rdma_counters", {"device": "string", "port": "Int64", "counter": "string", "value": "Int64", "moment": "string"}
)
"""`kind` is the folder of the counter, "hw_counters" (the driver's own) or "counters" (the port's). `moment` is what the file's
name says after the first dash: `hw_counters-before.txt` is of "before". Counters count since the driver was loaded."""

PORTS = Schema(
    "rdma_ports",
    {
        "device": "string",
        "type": "string",
        "firmware": "string",
        "port": "Int64",
        "state": "string",
        "physical_state": "string",
        "rate_gbits": "Float64",
        "lid": "Int64",
        "link_layer": "string",
        "moment": "string",
    },
)
"""`kind` is "port". `rate_gbits` is what the driver says; soft-RoCE says 10, whatever its network device does."""

LIMIT = 16 << 20
_MIB_IN_GBITS = 8 * 2**20 / 1e9
_TITLE = re.compile(r"^\s*(\S.*?) BW Test\s*$", re.MULTILINE)
_DEVICE = re.compile(r"\bDevice\s*:\s*(\S+)")
_HEAD = re.compile(r"^\s*#bytes\s+#iterations\s+BW peak\[(Gb|MB)/sec\]\s+BW average\[\1/sec\]", re.MULTILINE)
_FIGURES = re.compile(
    r"^\s*([0-9]{1,18})\s+([0-9]{1,18})\s+([0-9]{1,15}\.[0-9]{1,9})\s+([0-9]{1,15}\.[0-9]{1,9})(?:\s+([0-9]{1,12}\.[0-9]{1,9}))?\s*$"
)
_STATUS = re.compile(r"^\s*Failed status ([0-9]{1,9})\b")
_FAILURE = re.compile(r"^\s*(?:Completion with error|Failed to|Couldn't|Unable to|Requested .* not|.*syndrom).*$")
_COUNTER = re.compile(r"^\S*/([^/\s]+)/ports/([0-9]{1,9})/((?:hw_)?counters)/([^/\s:]+):(-?[0-9]{1,20})$")
_CA = re.compile(r"^CA '(.+)'$")
_PORT = re.compile(r"^\s+Port ([0-9]{1,9}):\s*$")
_FIELD = re.compile(r"^\s+([A-Z][\w ]*):[ \t]*(.*)$")


def read_perftest(path: Path, rank: int | None = None, problems: Problems | None = None) -> pd.DataFrame:
    """The output of ib_write_bw, ib_read_bw or ib_send_bw as `rdma_bandwidth`, in either unit. Raises ReaderError."""
    text = read_text(path, LIMIT, problems)
    head = _HEAD.search(text)
    scale = _MIB_IN_GBITS if head and head[1] == "MB" else 1.0
    rows: list[dict[str, object]] = []
    for line in text.splitlines():
        if head and (found := _FIGURES.match(line)):
            rate = float(found[5]) * 1e6 if found[5] else None
            peak, average = (float(found[at]) * scale for at in (3, 4))
            figures = {"peak_gbits": peak, "average_gbits": average, "messages_per_s": rate}
            rows.append({"kind": "bandwidth", "bytes": int(found[1]), "iterations": int(found[2]), **figures})
        elif status := _STATUS.match(line):
            rows.append({"kind": "failure", "status": int(status[1]), "text": one_line(line.strip())})
        elif _FAILURE.match(line):
            rows.append({"kind": "failure", "text": one_line(line.strip())})
    if not rows and not head and not _TITLE.search(text):
        raise ReaderError(f"{path} is not the output of a perftest bandwidth test", "give what ib_write_bw printed")
    if not any(row["kind"] == "bandwidth" for row in rows):
        note(problems, path, "incomplete", "perftest printed no figures")
    title, device = _TITLE.search(text), _DEVICE.search(text)
    columns = {name: [row.get(name) for row in rows] for name in ("kind", *list(BANDWIDTH.own)[2:])}
    common = {"rank": rank if rank is not None else rank_of(path), "source": str(path)}
    named = {"test": title[1] if title else None, "device": device[1] if device else None}
    return BANDWIDTH.frame({**columns, **common, **named})


def read_counters(path: Path, rank: int | None = None, problems: Problems | None = None) -> pd.DataFrame:
    """Lines `.../<device>/ports/<port>/hw_counters/<name>:<value>` as `rdma_counters`, as `grep . /sys/class/infiniband/*/ports/*/*counters/*` prints them.

    Raises ReaderError.
    """
    lines = [line for line in read_text(path, LIMIT, problems).splitlines() if line.strip()]
    rows = [found.groups() for line in lines if (found := _COUNTER.match(line)) and abs(int(found[5])) < INT64]
    if lines and not rows:
        raise ReaderError(
            f"{path} holds no counters of an RDMA device",
            "give what `grep . /sys/class/infiniband/*/ports/*/*counters/*` printed",
        )
    if len(rows) < len(lines):
        note(problems, path, "noise", f"{len(lines) - len(rows)} of {len(lines)} lines are no counters")
    return COUNTERS.frame(
        {
            "kind": [row[2] for row in rows],
            "device": [row[0] for row in rows],
            "port": [int(row[1]) for row in rows],
            "counter": [row[3] for row in rows],
            "value": [int(row[4]) for row in rows],
            "moment": moment_of(path),
            "rank": rank if rank is not None else rank_of(path),
            "source": str(path),
        }
    )


def read_ibstat(path: Path, rank: int | None = None, problems: Problems | None = None) -> pd.DataFrame:
    """ibstat's text as `rdma_ports`, one row a port. Raises ReaderError."""
    device: dict[str, str] = {}
    ports: list[dict[str, str]] = []
    for line in read_text(path, LIMIT, problems).splitlines():
        if found := _CA.match(line):
            device = {"CA": found[1]}
        elif (found := _PORT.match(line)) and device:
            ports.append({**device, "Port": found[1]})
        elif (found := _FIELD.match(line)) and device:
            here = ports[-1] if ports and ports[-1]["CA"] == device["CA"] else device
            here.setdefault(found[1], found[2].strip())
    if not ports:
        raise ReaderError(f"{path} is not what ibstat prints: no port of a CA in it", "give the output of ibstat")

    def texts(name: str) -> list[str | None]:
        return [port.get(name) or None for port in ports]

    def number(text: str | None) -> float | None:
        found = re.match(r"[0-9]{1,9}(?:\.[0-9]{1,9})?(?=\s|$)", text or "")
        return float(found[0]) if found else None

    return PORTS.frame(
        {
            "kind": "port",
            "device": texts("CA"),
            "type": texts("CA type"),
            "firmware": texts("Firmware version"),
            "port": [int(port["Port"]) for port in ports],
            "state": texts("State"),
            "physical_state": texts("Physical state"),
            "rate_gbits": [number(text) for text in texts("Rate")],
            "lid": [int(lid) if (lid := number(text)) is not None else None for text in texts("Base lid")],
            "link_layer": texts("Link layer"),
            "moment": moment_of(path),
            "rank": rank if rank is not None else rank_of(path),
            "source": str(path),
        }
    )


def moment_of(path: Path) -> str | None:
    """What a file's name says after its first dash, null where there is none."""
    _, dash, after = path.stem.partition("-")
    return after if dash else None
