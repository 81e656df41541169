"""The telling lines of what the ranks printed, found without ever holding the whole of it: a log may be 200 MB."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pandas as pd

from dtprobe.report import words
from dtprobe.report.load import Place, RunFolder

LINES = 12
LINE_CHARS = 400
CONTEXT = 4
CONTEXT_BYTES = 4 << 20
"""Lines further into a file than this are shown without those before them."""
TAIL_BYTES = 256 << 10
"""What is read of the end of a raw file where no frame was made of it."""

TELLING = (
    r"(?:^|\]:?\s*)(?:(?:[A-Za-z_]\w*\.)+[A-Z]\w*|[A-Z]\w*(?:Error|Exception|Interrupt|Timeout))(?::\s|\s*$)",
    r"terminate called|what\(\):|Segmentation fault|core dumped|Out of memory|\bKilled\b|NCCL WARN|CUDA error|Xid",
    r"[Tt]imed out|Connection (?:reset|closed|refused)|Broken pipe|Address already in use|[Dd]esync|[Mm]ismatch|No space left",
)
"""What makes a line evidence, most telling first. In RE2's syntax too: pyarrow filters the frame with it while reading."""

_ANY = re.compile("|".join(TELLING))
_OWN_PREFIX = re.compile(r"^\S*\[?rank\s?\d+\]?:?\s*")
_CARETS = re.compile(r"(?:\[[\w.]+\]:)?[\s^~]*")
"""The line under a traceback's source line, which says little without its column."""
_NUMBERS = re.compile(r"0x[0-9a-f]+|\d+")


@dataclass(frozen=True, kw_only=True)
class Line:
    """A line that ranks printed. `count` were alike but for their numbers; `place` is the first, `before` what led to it."""

    arm: str
    who: str
    text: str
    before: tuple[str, ...]
    count: int
    place: Place


def lines(folder: RunFolder) -> tuple[Line, ...]:
    """The telling lines: exceptions before symptoms, the fault arm before the others, equal ones once.

    From the frame of the logs, or, where none was made, from the end of the ranks' `stderr.log`.
    """
    frame = _from_frame(folder) if folder.has_frame("log_lines") else pd.DataFrame(_from_files(folder), columns=_COLUMNS)
    frame = frame[frame["arm"].isin(folder.arms)]
    if frame.empty:
        return ()
    frame = frame.assign(text=frame["text"].astype(str).str.slice(0, 4 * LINE_CHARS).str.strip())
    weight = [
        next((i for i, pattern in enumerate(TELLING) if re.search(pattern, text)), len(TELLING)) for text in frame["text"]
    ]
    alike = [_NUMBERS.sub("0", _OWN_PREFIX.sub("", text)) for text in frame["text"]]
    frame = frame.assign(weight=weight, alike=alike, turn=frame["arm"].map({"fault": 0, "mitigated": 1, "control": 2}))
    groups = [rows for _, rows in frame.groupby(["arm", "alike"], sort=False)]
    groups.sort(key=lambda rows: (rows["weight"].iloc[0], rows["turn"].iloc[0]))
    return tuple(_line(folder, rows) for rows in groups[:LINES])


_COLUMNS = ["arm", "repeat", "rank", "source", "line", "text"]


def _from_frame(folder: RunFolder) -> pd.DataFrame:
    import pyarrow.compute as pc

    condition: Any = pc.match_substring_regex(pc.field("text"), "|".join(f"(?:{pattern})" for pattern in TELLING))
    return folder.frame("log_lines", *_COLUMNS[2:], where=condition, rows=50_000)


def _from_files(folder: RunFolder) -> Iterator[dict[str, Any]]:
    for path in sorted(folder.path.glob("*/*/*/stderr.log"))[:2000]:
        source = path.relative_to(folder.path)
        arm, repeat, who = source.parts[:3]
        rank = int(who.removeprefix("rank")) if who.removeprefix("rank").isdigit() else None
        if not repeat.isdigit() or folder.artifact(str(source)) is None:
            continue
        try:
            with path.open("rb") as file:
                size = file.seek(0, 2)
                file.seek(max(0, size - TAIL_BYTES))
                tail = file.read(TAIL_BYTES).decode("utf-8", errors="replace").splitlines()
        except OSError as error:
            folder.problem(f"{source} cannot be read: {error.strerror}")
            continue
        whole = size <= TAIL_BYTES
        for number, text in enumerate(tail, start=1):
            if _ANY.search(text[: 4 * LINE_CHARS]):
                line = number if whole else None
                yield dict(zip(_COLUMNS, (arm, int(repeat), rank, str(source), line, text), strict=True))


def _line(folder: RunFolder, rows: pd.DataFrame) -> Line:
    first = rows.iloc[0]
    where = folder.place(first["source"], first["arm"], first["repeat"], first["line"])
    return Line(
        arm=str(first["arm"]),
        who=words.ranks(rows["rank"]),
        text=words.clip(first["text"], LINE_CHARS),
        before=_before(folder, where),
        count=len(rows),
        place=where,
    )


def _before(folder: RunFolder, where: Place) -> tuple[str, ...]:
    """The few lines above a line, from the file itself; none where it lies too far in, or is gone."""
    if where.href is None or where.line is None or where.line < 2:
        return ()
    wanted = range(max(1, where.line - CONTEXT), where.line)
    try:
        with (folder.path / where.href).open("rb") as file:
            head = file.read(CONTEXT_BYTES).split(b"\n", where.line)
    except OSError:
        return ()
    if len(head) <= where.line - 1:
        return ()
    told = [words.clip(head[number - 1].decode("utf-8", errors="replace").rstrip(), 200) for number in wanted]
    return tuple(text for text in told if not _CARETS.fullmatch(text))
