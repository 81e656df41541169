"""The common lines of a strace text, found by arithmetic on its bytes: no regular expression, no string made.

Handles calls, unfinished and resumed halves of the forms with or without pid and with one time (`-f`, `-t`, `-tt`, `-ttt`),
`-T` and `-y` too, where the line has one " = " only. What it does not handle it says, and `strace_lines` reads it.
On 300,000 lines this takes a fifth of the time of the regular expressions.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import polars as pl
import pyarrow as pa

Ints = npt.NDArray[np.int64]
Bits = npt.NDArray[np.bool_]
CALL, UNFINISHED, RESUMED = 0, 1, 2
Words = npt.NDArray[np.uint64]
"""The eight letters from each place of the text on, as one little-endian number: a comparison of many letters at once."""
_UNFINISHED = b" <unfinished ...>"
_RESUMED = b" resumed>"
_DOTS = b"<... "
_MARGIN = 64
_MASKS = np.array([(1 << 8 * count) - 1 for count in range(9)], np.uint64)


@dataclass(frozen=True)
class Form:
    """How each line begins: with a pid or not, and with how long a time (0: none) of which kind."""

    pid: bool
    time: int
    clock: bool


def form(line: bytes) -> Form | None:
    """The form of a line, None where it is not one of the plain ones."""
    words = line.split(b" ", 1)
    pid = len(words) == 2 and words[0].isdigit() and len(words[0]) <= 7
    rest = words[1].lstrip(b" ") if pid else line
    time = rest.split(b" ", 1)[0]
    clock = len(time) in (8, 15, 18) and time[2:3] == b":" and time.replace(b":", b"").replace(b".", b"").isdigit()
    epoch = len(time) in (17, 20) and time[10:11] == b"." and time.replace(b".", b"").isdigit()
    body = rest[len(time) + 1 :] if clock or epoch else rest
    if not (body[:1].isalpha() or body.startswith(b"<... ")):
        return None
    return Form(pid, len(time) if clock or epoch else 0, clock)


def split(part: bytes, starts: Ints, ends: Ints, shape: Form) -> tuple[pl.DataFrame, Bits]:
    """The rows that could be split, in the columns of `strace_lines.split` with `row`, and which lines they are.

    `starts` and `ends` are the lines' first and past-last bytes, without line ends.
    """
    letters = np.concatenate([np.frombuffer(part, np.uint8), np.zeros(_MARGIN, np.uint8)])
    words = np.ndarray(len(letters) - 7, "<u8", letters, strides=(1,))
    spaces = np.flatnonzero(letters == 32)
    ends = ends - (letters[np.maximum(ends - 1, 0)] == 13)
    good = ends - starts > 4
    at = starts
    tid = None
    if shape.pid:
        width = _next(spaces, at, ends) - at
        tid, fine = _number(letters, at, width, 7)
        good &= fine
        at = at + width + 1
        for _ in range(6):
            at = at + (letters[at] == 32)
    time = None
    if shape.time:
        time, fine = _time(letters, at, shape)
        good &= fine
        at = at + shape.time + 1
    good &= at < ends
    at = np.where(good, at, 0)
    resumed = _equal(words, at, _DOTS)
    name = at + 5 * resumed
    opening = np.where(resumed, _next(spaces, name, ends), _next(np.flatnonzero(letters == 40), name, ends))
    first = letters[name] | 32
    good &= (first >= 97) & (first <= 122) & (opening < ends) & (opening - name < 48) & (_next(spaces, name, ends) >= opening)
    good &= ~resumed | _equal(words, opening, _RESUMED)
    tail = np.where(good, opening + np.where(resumed, 9, 1), 0)

    unfinished = (
        good & ~resumed & (letters[ends - 1] == 62) & (ends - 17 >= tail) & _equal(words, np.maximum(ends - 17, 0), _UNFINISHED)
    )
    equals = np.flatnonzero((letters[:-2] == 32) & (letters[1:-1] == 61) & (letters[2:] == 32))
    index = np.searchsorted(equals, tail)
    equal = _at(equals, index, ends)
    closing = equal
    while (back := (letters[closing - 1] == 32) & (closing > tail)).any():
        closing = closing - back
    done = good & ~unfinished & (equal < ends) & (_at(equals, index + 1, ends) >= ends)
    done &= (letters[closing - 1] == 41) & (closing > tail)

    value = np.where(done, equal + 3, 0)
    value_end = np.minimum(_next(spaces, value, ends), _next(np.flatnonzero(letters == 60), value, ends))
    first = letters[value]
    done &= ((first >= 48) & (first <= 57)) | (first == 45) | ((first == 63) & (value_end == value + 1))
    failed = done & (letters[value_end] == 32) & (letters[value_end + 1] == 69) & (value_end + 1 < ends)
    error_end = _next(spaces, np.where(failed, value_end + 1, 0), ends)
    failed &= error_end - value_end < 24
    # the file's -y paths may hold spaces and brackets of their own: then only the slow way tells
    done &= (
        (letters[value_end] != 60)
        | (letters[value_end - 1] == 32)
        | (_next(spaces, value_end, ends) >= ends)
        | _timed(letters, spaces, value_end, ends)
    )
    took = _took(letters, ends, done)
    done &= (letters[ends - 1] != 62) | ~np.isnan(took) | (letters[value_end] == 60)

    good = done | unfinished
    rows = np.flatnonzero(good)
    what = np.where(unfinished, UNFINISHED, np.where(resumed, RESUMED, CALL))
    last = np.where(unfinished, ends - 17, closing - 1)

    def text(begin: Ints, end: Ints, valid: Bits | None = None) -> pl.Series:
        return _strings(part, words, begin[rows], end[rows], None if valid is None else valid[rows])

    frame = pl.DataFrame(
        {
            "row": rows.astype(np.uint32),
            "tid": pl.Series(tid[rows].astype(np.int32))
            if tid is not None
            else pl.Series([None], dtype=pl.Int32).new_from_index(0, len(rows)),
            "time_ns": pl.Series(time[rows])
            if time is not None
            else pl.Series([None], dtype=pl.Int64).new_from_index(0, len(rows)),
            "clock": np.full(len(rows), shape.clock),
            "delta_s": pl.Series([None], dtype=pl.Float64).new_from_index(0, len(rows)),
            "name": text(name, opening),
            "args": text(tail, last),
            "result": text(value, value_end, done),
            "errno": text(value_end + 1, error_end, failed),
            "duration_s": pl.Series(took[rows], nan_to_null=True),
            "what": what[rows].astype(np.int8),
        }
    )
    return frame, good


def _next(places: Ints, at: Ints, otherwise: Ints) -> Ints:
    """The first of some sorted places that is not before each position; the line's end where there is none in it."""
    return _at(places, np.searchsorted(places, at), otherwise)


def _at(places: Ints, index: Ints, otherwise: Ints) -> Ints:
    if not len(places):
        return otherwise
    found = places[np.minimum(index, len(places) - 1)]
    return np.where(index < len(places), np.minimum(found, otherwise), otherwise)


def _equal(words: Words, at: Ints, text: bytes) -> Bits:
    """Where the letters from each position on are the text."""
    same = np.ones(len(at), bool)
    for offset in range(0, len(text), 8):
        piece = text[offset : offset + 8]
        same &= words[at + offset] & _MASKS[len(piece)] == int.from_bytes(piece, "little")
    return same


def _number(letters: npt.NDArray[np.uint8], at: Ints, width: Ints, most: int) -> tuple[Ints, Bits]:
    """Decimal numbers of at most `most` digits, and where they are."""
    value = np.zeros(len(at), np.int64)
    fine = (width > 0) & (width <= most)
    for offset in range(most):
        inside = offset < width
        digit = letters[np.minimum(at + offset, len(letters) - 1)].astype(np.int64) - 48
        fine &= ~inside | ((digit >= 0) & (digit <= 9))
        value = np.where(inside, value * 10 + digit, value)
    return value, fine


def _time(letters: npt.NDArray[np.uint8], at: Ints, shape: Form) -> tuple[Ints, Bits]:
    """Nanoseconds of the times that begin at each position; all have the form's length."""

    def digits(offset: int, count: int) -> tuple[Ints, Bits]:
        return _number(letters, at + offset, np.full(len(at), count), count)

    at = np.minimum(at, len(letters) - _MARGIN)
    fields = [(0, 2, 3600), (3, 2, 60), (6, 2, 1)] if shape.clock else [(0, 10, 1)]
    point = 8 if shape.clock else 10
    total = np.zeros(len(at), np.int64)
    fine = letters[at + shape.time] == 32
    for offset, count, unit in fields:
        value, good = digits(offset, count)
        total += value * unit
        fine &= good
    for offset in (2, 5) if shape.clock else ():
        fine &= letters[at + offset] == 58
    fine &= total < 9_000_000_000
    total = np.where(fine, total, 0) * 10**9
    if shape.time > point:
        count = shape.time - point - 1
        value, good = digits(point + 1, count)
        total += value * 10 ** (9 - count)
        fine &= good & (letters[at + point] == 46)
    return total, fine


def _timed(letters: npt.NDArray[np.uint8], spaces: Ints, at: Ints, ends: Ints) -> Bits:
    """Where the rest of the line from a bracket on is one word and perhaps the time that `-T` adds."""
    space = _next(spaces, at, ends)
    after = np.minimum(space + 1, ends - 1)
    return (letters[after] == 60) & (letters[ends - 1] == 62) & (_next(spaces, after, ends) >= ends)


def _took(letters: npt.NDArray[np.uint8], ends: Ints, done: Bits) -> npt.NDArray[np.float64]:
    """The seconds in ` <0.000123>` at the line's end, which always have six decimals; NaN where there are none."""
    point = np.maximum(ends - 8, 0)
    fine = done & (letters[ends - 1] == 62) & (letters[point] == 46)
    micros, good = _number(letters, point + 1, np.full(len(ends), 6), 6)
    fine &= good
    whole = np.zeros(len(ends), np.int64)
    unit, open_ = np.ones(len(ends), np.int64), fine.copy()
    bracket = np.zeros(len(ends), bool)
    for back in range(1, 9):
        letter = letters[np.maximum(point - back, 0)].astype(np.int64)
        digit = open_ & (letter >= 48) & (letter <= 57)
        bracket |= open_ & (letter == 60) & (letters[np.maximum(point - back - 1, 0)] == 32) & (back > 1)
        whole += np.where(digit, (letter - 48) * unit, 0)
        unit = np.where(digit, unit * 10, unit)
        open_ = digit
        if not open_.any():
            break
    return np.where(fine & bracket, whole + micros / 1e6, np.nan)


def _strings(part: bytes, words: Words, begin: Ints, end: Ints, valid: Bits | None) -> pl.Series:
    """Strings that are pieces of the text, as views into it (Arrow's variadic layout): up to 12 letters inline, none copied."""
    length = np.maximum(end - begin, 0)
    if valid is not None:
        length = np.where(valid, length, 0)
    begin = np.where(length > 0, begin, 0)
    views = np.empty((len(begin), 2), np.uint64)
    head = words[begin] & _MASKS[np.minimum(length, 4)]
    views[:, 0] = length.astype(np.uint64) | (head << np.uint64(32))
    inline = words[begin + 4] & _MASKS[np.clip(length - 4, 0, 8)]
    views[:, 1] = np.where(length <= 12, inline, begin.astype(np.uint64) << np.uint64(32))
    mask = None if valid is None else pa.py_buffer(np.packbits(valid, bitorder="little"))
    array = pa.Array.from_buffers(pa.string_view(), len(begin), [mask, pa.py_buffer(views), pa.py_buffer(part)])
    return pl.Series(pl.from_arrow(array))
