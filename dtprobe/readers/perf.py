"""perf's text: `perf script` samples and `perf stat` counts."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from dtprobe.readers.artifact import (
    INT64,
    Problems,
    ReaderError,
    as_float,
    as_text,
    load_json,
    note,
    one_line,
    rank_of,
    read_text,
)
from dtprobe.readers.schema import Schema

SAMPLES = Schema(
    "perf_samples",
    {
        "event": "string",
        "comm": "string",
        "cpu": "Int64",
        "frames": "string",
        "text": "string",
        "period": "Int64",
        "clock_s": "Float64",
    },
)
"""`kind` is "sample". `frames` are innermost first, as "symbol (library)" separated by ";". `text` is a tracepoint's fields.
`clock_s` is perf's own clock; `t_ns` is null unless that clock was the real-time one (`perf record -k CLOCK_REALTIME`), or the
reader is told its offset. Where perf printed one number, it is the thread's."""

COUNTS = Schema(
    "perf_counts",
    {
        "event": "string",
        "count": "Int64",
        "value": "Float64",
        "unit": "string",
        "running": "Float64",
        "of": "string",
        "since_start_s": "Float64",
    },
)
"""`kind` is "count", or "time" for the seconds at the end. `count` is null for what has a unit (`value` has it) and for what was not
supported or not counted. `running` is the share of the time (0 to 1) in which the counter ran; below 1 perf extrapolated.
`of` is the processor or thread of a split count, `since_start_s` the moment of an interval's."""

LIMIT = 1 << 30
_EPOCH_S = 1e9
_HEAD = re.compile(
    r"^\s*(?P<comm>\S.*?)\s+(?P<pid>-?[0-9]{1,9})(?:/(?P<tid>-?[0-9]{1,9}))?\s+(?:\[(?P<cpu>[0-9]{1,6})\]\s+)?"
    r"(?P<time>[0-9]{1,11}\.[0-9]{1,9}):\s+(?:(?P<period>[0-9]{1,18})\s+)?(?P<event>[^\s:]+(?::[^\s:]+)*):\s*(?P<text>.*)$"
)
_ADDRESS = re.compile(r"^[0-9a-f]{4,16} \S.* \(.*\)$")
_FRAME = re.compile(r"^\t\s*[0-9a-f]+ (.+?)(?:\+0x[0-9a-f]+)?(?: \((.*)\))?$")


def read_perf_script(
    path: Path, rank: int | None = None, problems: Problems | None = None, *, clock_offset_ns: int | None = None
) -> pd.DataFrame:
    """The output of `perf script` (default fields, or with pid) as `perf_samples`.

    `clock_offset_ns` is what to add to perf's clock to have UTC. Raises ReaderError for files without a sample.
    """
    rows: list[dict[str, Any]] = []
    stacks: list[list[str]] = []
    noise: list[int] = []
    names: dict[str, str] = {}
    lines = read_text(path, LIMIT, problems).split("\n")
    for number, line in enumerate(lines, 1):
        if line.startswith("\t"):
            name = names.get(line) or names.setdefault(line, _symbol(line))
            if stacks and name:
                stacks[-1].append(name)
        elif line and not line.startswith("#"):
            head = _HEAD.match(line)
            if head:
                row = head.groupdict()
                alone = _ADDRESS.match(row["text"])
                rows.append(row | {"text": None} if alone else row)
                stacks.append([_symbol("\t" + row["text"])] if alone else [])
            elif line.strip():
                noise.append(number)
    if noise and not rows:
        raise ReaderError(
            f"{path} is not perf script's output: none of its {len(lines)} lines is", one_line(lines[noise[0] - 1], 80)
        )
    if noise:
        note(problems, path, "noise", f"{len(noise)} of {len(lines)} lines are no samples, the first is line {noise[0]}")
    seconds = [float(row["time"]) for row in rows]
    return SAMPLES.frame(
        {
            "t_ns": [_utc(row["time"], clock_offset_ns) for row in rows],
            "rank": rank if rank is not None else rank_of(path),
            "pid": [int(row["pid"]) if row["tid"] and int(row["pid"]) >= 0 else None for row in rows],
            "tid": [one if (one := int(row["tid"] or row["pid"])) >= 0 else None for row in rows],
            "source": str(path),
            "kind": "sample",
            "event": [row["event"] for row in rows],
            "comm": [row["comm"] for row in rows],
            "cpu": [int(row["cpu"]) if row["cpu"] else None for row in rows],
            "frames": [";".join(stack) or None for stack in stacks],
            "text": [row["text"] or None for row in rows],
            "period": [int(row["period"]) if row["period"] else None for row in rows],
            "clock_s": seconds,
        }
    )


def _symbol(line: str) -> str:
    found = _FRAME.match(line)
    return f"{found[1]} ({found[2]})" if found and found[2] else found[1] if found else ""


def _utc(text: str, offset_ns: int | None) -> int | None:
    seconds, _, part = text.partition(".")
    moment = int(seconds) * 10**9 + int(part.ljust(9, "0"))
    if offset_ns is None:
        return moment if _EPOCH_S < int(seconds) < INT64 // 10**9 else None
    return moment + offset_ns if abs(moment + offset_ns) < INT64 else None


_NUMBER = r"[0-9][0-9,.']*|<not (?:supported|counted)>"
_LINE = re.compile(
    rf"^\s*(?:(?P<since>[0-9]+\.[0-9]{{6,9}})\s+)?(?:(?P<of>(?:CPU|S|D|N)[0-9][-\w]*|\S.*?-[0-9]+)\s+)?(?P<number>{_NUMBER})\s+"
    r"(?:(?P<unit>msec|sec|ns|Joules|MiB|%|C)\s+)?(?P<event>[A-Za-z_][^\s#(]*)\s*(?:#.*?)?(?:\((?P<running>[0-9.]+)%\))?\s*$"
)
_TIMES = re.compile(r"^\s*([0-9]+[.,][0-9]+)(?:\s*\+-.*?)? seconds (time elapsed|user|sys)\b")
_QUIET = re.compile(r"^\s*(?:#|Performance counter stats|Some events weren't counted|echo |$|.*\(\+-)")


def read_perf_stat(path: Path, rank: int | None = None, problems: Problems | None = None) -> pd.DataFrame:
    """The output of `perf stat` (for people, `-x` with any separator, `-j`; also `-I`, `-A`, `--per-thread`) as `perf_counts`.

    Raises ReaderError for files without a count.
    """
    lines = read_text(path, LIMIT, problems).splitlines()
    rows = []
    noise: list[int] = []
    for number, line in enumerate(lines, 1):
        row = next((made for read in (_json, _human, _fields) if (made := read(line)) is not None), None)
        if row is not None:
            rows.append(row)
        elif not _QUIET.match(line):
            noise.append(number)
    if not rows:
        why = f"none of its {len(lines)} lines is" if noise else "it is empty"
        raise ReaderError(f"{path} is not perf stat's output: {why}", "perf stat -o FILE ...")
    if noise:
        note(problems, path, "noise", f"{len(noise)} of {len(lines)} lines are no counts, the first is line {noise[0]}")
    names = ("kind", "event", "count", "value", "unit", "running", "of", "since_start_s")
    columns = {name: [row.get(name) for row in rows] for name in names}
    return COUNTS.frame({**columns, "rank": rank if rank is not None else rank_of(path), "source": str(path)})


def _made(event: str, number: str | None, unit: str | None, running: float | None, **more: Any) -> dict[str, Any]:
    text = (number or "").replace(",", "").replace("'", "")
    value = float(text) if re.fullmatch(r"[0-9]{1,300}(?:\.[0-9]*)?", text) else None
    whole = value is not None and not unit and value.is_integer() and value < INT64
    share = running / 100 if running is not None else None
    count = int(value) if whole and value is not None else None
    return {"kind": "count", "event": event, "count": count, "value": value, "unit": unit or None, "running": share, **more}


def _json(line: str) -> dict[str, Any] | None:
    if not line.lstrip().startswith("{"):
        return None
    try:
        fields = load_json(line)
    except ValueError:
        return None
    event = as_text(fields.get("event")) if isinstance(fields, Mapping) else None
    if event is None:
        return None
    of = as_text(fields.get("thread")) or as_text(fields.get("cpu"))
    since, running = as_float(fields.get("interval")), as_float(fields.get("pcnt-running"))
    return _made(event, as_text(fields.get("counter-value")), as_text(fields.get("unit")), running, of=of, since_start_s=since)


def _human(line: str) -> dict[str, Any] | None:
    times = _TIMES.match(line)
    if times:
        return {"kind": "time", "event": times[2], "value": float(times[1].replace(",", ".")), "unit": "sec"}
    found = _LINE.match(line)
    if found is None:
        return None
    running = as_float(float(found["running"])) if re.fullmatch(r"[0-9]+(?:\.[0-9]+)?", found["running"] or "") else None
    since = float(found["since"]) if found["since"] else None
    return _made(found["event"], found["number"], found["unit"], running, of=found["of"], since_start_s=since)


def _fields(line: str) -> dict[str, Any] | None:
    """A line of `-x`: perhaps a time, perhaps a processor or thread, then count, unit, event, run time, share in percent."""
    for separator in ",;\t|:":
        fields = [field.strip() for field in line.split(separator)]
        for at in range(min(3, len(fields) - 3)):
            number, unit, event = fields[at : at + 3]
            if re.fullmatch(_NUMBER, number) and re.fullmatch("[A-Za-z%]*", unit) and re.match("[A-Za-z_]", event):
                before = fields[:at]
                since = next((float(one) for one in before if re.fullmatch(r"[0-9]{1,12}\.[0-9]{1,9}", one)), None)
                of = next((one for one in before if re.search("[A-Za-z]", one)), None)
                share = next(_numbers(fields[at + 4 : at + 5]), None)
                return _made(event, number, unit, share, of=of, since_start_s=since)
    return None


def _numbers(fields: list[str]) -> Iterator[float]:
    yield from (float(one) for one in fields if re.fullmatch(r"[0-9]{1,12}(?:\.[0-9]{1,9})?", one))
