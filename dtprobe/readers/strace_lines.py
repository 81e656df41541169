"""The lines of a strace text, split into columns by vectorised expressions.

A file is written in one form (`-f`, `-tt`, ...), so its form is found from a sample. Lines of the plain forms are split by
arithmetic (`strace_spans`), what that leaves by the form's regular expression, and what that leaves by a general one and at
last letter by letter. The forms were taken from strace 6.1's output.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO

import numpy as np
import numpy.typing as npt
import polars as pl

from dtprobe.readers import strace_spans

PART_BYTES = 2 << 20
CALL, UNFINISHED, RESUMED, SIGNAL, EXIT, CUT, NOISE, QUIET = range(8)
"""What a line is. CUT: a call whose line ends too early. QUIET: strace's own remarks and dumps, which are no events."""

_PIDS = ("()", r"([0-9]{1,7})(?:<[^>]*>)? +", r"\[pid +([0-9]{1,7})(?:<[^>]*>)?\] +")
_CLOCK = r"[0-9]{2}:[0-9]{2}:[0-9]{2}(?:\.[0-9]{1,9})?"
_EPOCH = r"[0-9]{9,10}(?:\.[0-9]{1,9})?"
_LAST_SECOND = 9_000_000_000  # nanoseconds beyond it do not fit 64 bits
_DELTA = r"[0-9]{1,9}\.[0-9]{6,9}"
_TIMES = (
    "()()",
    *(rf"({_TIME}) {delta}" for _TIME in (_CLOCK, _EPOCH) for delta in ("()", rf"\(\+ +({_DELTA})\) ")),
    rf"() *({_DELTA}) ",
)
_EXTRA = r"(?:\[ *[0-9]+\] )?(?:\[[0-9a-f?]{8,16}\] )?"
_NAME = r"[a-zA-Z0-9_?]+"
_OPENING = rf"(?:<\.\.\. )?({_NAME})(\(| resumed>)(.*)"
_GENERAL = (
    r"^(?:\[pid +(?P<p1>[0-9]{1,7})(?:<[^>]*>)?\] +|(?P<p2>[0-9]{1,7})(?:<[^>]*>)? +)?"
    rf"(?:(?P<time>{_CLOCK}|{_EPOCH}) +)?(?:\(\+ +(?P<d1>{_DELTA})\) +| *(?P<d2>{_DELTA}) +)?{_EXTRA}(?P<body>.*)"
)
_MARK = r"^(---|\+\+\+) (.*?)(?: (?:---|\+\+\+))?$"
_QUIET = (
    r"^(?:strace: .*| ?> .*| \| [0-9a-f]{5} .*| \* [0-9]+ bytes in buffer.*|Process [0-9]+ (?:attached|detached|resumed|suspended)"
    r".*|\[ Process PID=.*|% time +seconds .*|[- ]*)\r?\n?$"
)
_RESULT = r"^(\?|-?[0-9]+|0x[0-9a-f]+)(?:<[^ ]*>)?(?: (E[A-Z0-9]+))?(?: .*?)??(?: <([0-9]+\.[0-9]+)>)?$"
_BROKEN_OFF = " <unfinished ...>"
_REMARK_START = b"strace: Process "
_REMARK = re.compile(rb"(?<=[^\n])strace: Process [0-9]+ (?:at|de)tached\n([^\n]*)\n")
_REMARK_AT_END = re.compile(rb"strace: Process [0-9]+ (?:at|de)tached\n$")
_HEAD = ("row", "tid", "time", "delta", "name")


@dataclass(frozen=True)
class Part:
    """A piece of the text: its bytes, UTF-8, and where its lines begin and end (line ends not counted)."""

    text: bytes
    starts: npt.NDArray[np.int64]
    ends: npt.NDArray[np.int64]

    @classmethod
    def of(cls, text: bytes) -> Part:
        letters = np.frombuffer(text, np.uint8)
        if letters.max(initial=0) >= 0x80:
            text = text.decode("utf-8", "replace").encode()
            letters = np.frombuffer(text, np.uint8)
        ends = np.flatnonzero(letters == 10)
        starts = np.concatenate([[0], ends + 1])
        if len(text) and starts[-1] == len(text):
            starts = starts[:-1]
        return cls(text, starts, np.append(ends, len(text))[: len(starts)])

    def line(self, row: int) -> bytes:
        return self.text[self.starts[row] : self.ends[row]]

    def lines(self, rows: npt.NDArray[np.int64]) -> pl.Series:
        """Some of the lines as strings."""
        return pl.Series("line", [self.line(row).decode() for row in rows], dtype=pl.String)


def parts(file: BinaryIO) -> Iterator[Part]:
    """The pieces of a text, some megabytes of whole lines each.

    "strace: Process 7 attached", which strace prints into the middle of a line, is taken out, so that it does not split the
    line; an empty line after it takes its place, so that line numbers stay.
    """
    rest = b""
    while True:
        read = file.read(PART_BYTES)
        text = rest + read
        end = len(text) if not read else text.rfind(b"\n") + 1
        if end and read and _REMARK_AT_END.search(text, max(0, end - 100), end):
            end = text.rfind(b"\n", 0, end - 1) + 1
        rest = text[end:]
        if end:
            yield Part.of(_REMARK.sub(rb"\1\n\n", text[:end]) if _REMARK_START in text else text[:end])
        if not read:
            return


@dataclass(frozen=True)
class Form:
    """How the lines of a file look: as a regular expression of their heads, with pid, time and delta as its groups, and as
    the plain form that arithmetic can split, where it is one."""

    head: str
    plain: strace_spans.Form | None


def form(part: Part) -> Form:
    """The form of most lines, found from a sample of them."""
    count = len(part.starts)
    rows = np.unique(np.concatenate([np.arange(min(100, count)), np.arange(count // 2, min(count // 2 + 100, count))]))
    # the plain forms first: without choices in it an expression is matched by a much faster engine
    heads = [f"^{pid}{time}{extra}" for extra in ("", _EXTRA) for pid in _PIDS for time in _TIMES]
    sample = part.lines(rows)
    shapes = Counter(strace_spans.form(part.line(row)) for row in rows)
    plain, often = shapes.most_common(1)[0]
    return Form(
        max(heads, key=lambda head: int(sample.str.contains(head + _OPENING).sum())), plain if often > len(rows) // 2 else None
    )


def split(part: Part, shape: Form) -> pl.DataFrame:
    """One row a line, in order: tid, time_ns, clock, delta_s, name, args, result, errno, duration_s, what.

    `clock` is true where `time_ns` counts from a midnight rather than from the epoch. Where `what` is NOISE, `name` and
    `args` mean nothing.
    """
    if shape.plain is None:
        return _by_expression(part.lines(np.arange(len(part.starts))), shape.head).drop("row")
    rows, good = strace_spans.split(part.text, part.starts, part.ends, shape.plain)
    left = np.flatnonzero(~good)
    if not len(left):
        return rows.drop("row")
    other = _by_expression(part.lines(left), shape.head)
    other = other.with_columns(row=pl.Series(left.astype(np.uint32)).gather(other["row"]))
    return pl.concat([rows, other]).sort("row").drop("row")


def _by_expression(lines: pl.Series, head: str) -> pl.DataFrame:
    frame = (
        pl.DataFrame({"line": lines}).with_row_index("row").with_columns(g=pl.col("line").str.extract_groups(head + _OPENING))
    )
    names = ("tid", "time", "delta", "name", "opening", "tail")
    fast = frame.select("row", *(pl.col("g").struct.field(str(at)).alias(name) for at, name in enumerate(names, 1)))
    rest = frame.filter(fast["name"].is_null()).select("row", "line")
    made = [_calls(fast.drop_nulls("name") if len(rest) else fast)]
    if len(rest):
        other = _general(rest)
        made.append(_calls(other.filter(pl.col("what").is_null())))
        made.append(other.drop_nulls("what").select(*_HEAD, *_body("tail"), "what"))
    rows = pl.concat(made)
    hard = rows.filter(pl.col("what") == CUT)
    if len(hard):
        rows = pl.concat([rows.filter(pl.col("what") != CUT), _hard(hard)])
    return rows.sort("row").select("row", *_numbers())


def _body(args: str, result: str | None = None, errno: str | None = None, duration: str | None = None) -> list[pl.Expr]:
    named = {"result": result, "errno": errno, "duration": duration}
    texts = [(pl.lit(None, pl.String) if column is None else pl.col(column)).alias(name) for name, column in named.items()]
    return [pl.col(args).alias("args"), *texts]


def _general(rest: pl.DataFrame) -> pl.DataFrame:
    """Lines of any form: head, then a call, a signal, an exit, or nothing of strace's (`what` says which, null for a call)."""
    body = pl.col("g").struct.field("body").str.strip_chars_end("\r ")
    found = rest.with_columns(g=pl.col("line").str.extract_groups(_GENERAL)).with_columns(
        call=body.str.extract_groups("^" + _OPENING + "$"), mark=body.str.extract_groups(_MARK)
    )
    mark, text = pl.col("mark").struct.field("1"), pl.col("mark").struct.field("2")
    name, opening, tail = (pl.col("call").struct.field(str(at)) for at in (1, 2, 3))
    field = pl.col("g").struct.field
    return found.select(
        "row",
        tid=pl.coalesce(field("p1"), field("p2")),
        time=field("time"),
        delta=pl.coalesce(field("d1"), field("d2")),
        name=pl.coalesce(name, text.str.extract(r"^(?:stopped by |killed by )?([A-Z][A-Z0-9_]*|[a-z]+)")),
        opening=opening,
        tail=pl.coalesce(tail, text),
        what=pl.when(name.is_not_null())
        .then(pl.lit(None, pl.Int8))
        .when(mark == "---")
        .then(SIGNAL)
        .when(mark == "+++")
        .then(EXIT)
        .when(pl.col("line").str.contains(_QUIET))
        .then(QUIET)
        .otherwise(NOISE)
        .cast(pl.Int8),
    )


def _calls(heads: pl.DataFrame) -> pl.DataFrame:
    """Arguments and result of each call; those that need an exact look are left as CUT with all that followed the name."""
    before, after = (pl.col("halves").struct.field(f"field_{at}") for at in (0, 1))
    value, errno, duration = (pl.col("r").struct.field(str(at)) for at in (1, 2, 3))
    unfinished = pl.col("tail").str.ends_with(_BROKEN_OFF) & (pl.col("opening") == "(")
    # a second " = " may be text in a string, or the result after one: only counting quotes tells
    plain = pl.col("before").str.ends_with(")") & value.is_not_null() & ~after.str.contains(") ", literal=True)
    return (
        heads.with_columns(pl.col("tail").str.strip_chars_end("\r "))
        .with_columns(halves=pl.col("tail").str.splitn(" = ", 2))
        .with_columns(before=before.str.strip_chars_end(" "), r=after.str.extract_groups(_RESULT))
        .with_columns(
            what=pl.when(unfinished)
            .then(UNFINISHED)
            .when(plain.fill_null(False))
            .then(pl.when(pl.col("opening") == "(").then(CALL).otherwise(RESUMED))
            .otherwise(CUT)
            .cast(pl.Int8)
        )
        .select(
            *_HEAD,
            args=pl.when(pl.col("what") == UNFINISHED)
            .then(pl.col("tail").str.strip_suffix(_BROKEN_OFF))
            .when(pl.col("what") == CUT)
            .then(pl.col("opening") + pl.col("tail"))
            .otherwise(pl.col("before").str.strip_suffix(")")),
            result=pl.when(pl.col("what") != CUT).then(value),
            errno=errno,
            duration=duration,
            what="what",
        )
    )


_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|/\*.*?\*/|[0-9A-Z]<(?:->|[^<>])*>|[()]', re.DOTALL)
_EQUALS = re.compile(r"\s+= (?=\?|-?[0-9])")
_VALUE = re.compile(r"(\?|-?[0-9]+|0x[0-9a-f]+)(?:<(?:->|[^<>])*>)?(?: (E[A-Z0-9]+)\b)?")
_TOOK = re.compile(r" <([0-9]+\.[0-9]+)>$")


def cut_at_result(text: str) -> tuple[str, str] | None:
    """Arguments and what follows ` = `, of a call's text after its opening bracket; None if the call does not end in it.

    Brackets within strings, comments and the paths that `-y` adds do not count.
    """
    depth = 1
    for token in _TOKEN.finditer(text):
        depth += {"(": 1, ")": -1}.get(token[0], 0)
        if depth == 0:
            equals = _EQUALS.match(text, token.end())
            return (text[: token.start()], text[equals.end() :]) if equals else None
    return None


def _hard(rows: pl.DataFrame) -> pl.DataFrame:
    """The calls that `_calls` left, one by one: CALL or RESUMED where they have a result, else CUT with the arguments."""
    made: dict[str, list[str | int | None]] = {"args": [], "result": [], "errno": [], "duration": [], "what": []}
    for whole in rows["args"].to_list():
        opening = "(" if whole.startswith("(") else " resumed>"
        text = whole.removeprefix(opening)
        found = cut_at_result(text)
        value = _VALUE.match(found[1]) if found else None
        took = _TOOK.search(found[1]) if found else None
        made["args"].append(found[0] if found and value else text)
        made["result"].append(value[1] if value else None)
        made["errno"].append(value[2] if value else None)
        made["duration"].append(took[1] if took else None)
        made["what"].append(CUT if value is None else CALL if opening == "(" else RESUMED)
    types = {"args": pl.String, "result": pl.String, "errno": pl.String, "duration": pl.String, "what": pl.Int8}
    return pl.concat([rows.select(*_HEAD), pl.DataFrame(made, schema=types)], how="horizontal")


def _numbers() -> list[pl.Expr | str]:
    """The columns of `split` from those of its parts. A clock's time is the nanosecond of the day."""
    time, whole = pl.col("time"), pl.col("time").str.splitn(".", 2)
    clock = time.str.contains(":", literal=True)
    seconds, fraction = whole.struct.field("field_0"), whole.struct.field("field_1")
    of_day = sum(seconds.str.slice(at, 2).cast(pl.Int64, strict=False) * unit for at, unit in ((0, 3600), (3, 60), (6, 1)))
    number = pl.when(clock).then(of_day).otherwise(seconds.cast(pl.Int64, strict=False))
    number = pl.when(number < _LAST_SECOND).then(number)
    part = fraction.str.pad_end(9, "0").cast(pl.Int64, strict=False).fill_null(0)
    return [
        pl.col("tid").cast(pl.Int32, strict=False),
        (number * 1_000_000_000 + part).alias("time_ns"),
        clock.alias("clock"),
        pl.col("delta").cast(pl.Float64, strict=False).alias("delta_s"),
        "name",
        "args",
        "result",
        "errno",
        pl.col("duration").cast(pl.Float64, strict=False).alias("duration_s"),
        "what",
    ]
