"""Figures and names as a reader wants them: units, significant digits, short paths, texts with an end."""

from __future__ import annotations

import math
import sys
from typing import Any

MEASURES = ("B", "bytes", "s", "%")
"""Units that numbers are scaled to or cannot be read without; any other is a word beside the number."""
_BINARY = ("B", "KiB", "MiB", "GiB", "TiB")
_SIGNALS = {1: "SIGHUP", 2: "SIGINT", 4: "SIGILL", 6: "SIGABRT", 7: "SIGBUS", 8: "SIGFPE", 9: "SIGKILL", 11: "SIGSEGV"}
_SIGNALS |= {13: "SIGPIPE", 14: "SIGALRM", 15: "SIGTERM", 18: "SIGCONT", 19: "SIGSTOP"}


def absent(value: Any) -> bool:
    """Whether a value is null: None, NaN, or what a frame holds for them."""
    if value is None or isinstance(value, str):
        return value is None
    pandas = sys.modules.get("pandas")  # its nulls exist only where it was imported, which alone takes half a second
    return bool(pandas.isna(value)) if pandas else bool(value != value)  # noqa: PLR0124


def number(value: Any, unit: str = "") -> str:
    """A value with its unit: three significant digits, thousands grouped, bytes and seconds in a fitting multiple.

    A null is "-"; a unit that is no measure but a word ("threads") follows the number.
    """
    if absent(value):
        return "-"
    value = float(value)
    if math.isinf(value):
        return "infinite" if value > 0 else "-infinite"
    if unit in ("B", "bytes"):
        power = min(int(math.log(abs(value), 1024)), len(_BINARY) - 1) if abs(value) >= 1 else 0
        return f"{_digits(value / 1024**power)} {_BINARY[power]}"
    if unit == "s" and value != 0 and abs(value) < 0.1:
        return f"{_digits(value * 1e3)} ms" if abs(value) >= 1e-4 else f"{_digits(value * 1e6)} us"
    if unit in ("", "ratio", "1", "count"):
        return _digits(value)
    return f"{_digits(value)}{unit}" if unit == "%" else f"{_digits(value)} {unit}"


def _digits(value: float) -> str:
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    if abs(value) >= 100:
        return f"{value:,.0f}"
    if abs(value) < 1e-3:
        return f"{value:.2g}"
    return f"{value:.3g}"


def interval(low: Any, high: Any, unit: str = "") -> str:
    """Both ends of an interval; the unit once where they share it, none where it is a mere word. Empty where there is none."""
    if absent(low) or absent(high):
        return ""
    unit = unit if unit in MEASURES else ""
    first, last = number(low, unit), number(high, unit)
    if first == last:
        return first
    head, _, tail = first.partition(" ")
    if tail and last.endswith(f" {tail}"):
        first = head
    return f"{first} to {last}"


def clip(text: Any, length: int = 400) -> str:
    """A text of at most `length` characters, control characters made visible, the cut shown."""
    shown = "".join(
        c if c.isprintable() else ("\n" if c == "\n" else " " if c == "\t" else f"\\x{ord(c):02x}") for c in str(text)
    )
    return shown if len(shown) <= length else f"{shown[: length - 3].rstrip()}..."


def ending(exit_code: Any, signal: Any, timed_out: Any = False) -> str:
    """How a process ended, in words."""
    late = not absent(timed_out) and bool(timed_out)
    if late:
        return "did not end, was ended at the deadline"
    if not absent(signal):
        return f"killed by {_SIGNALS.get(int(signal), f'signal {int(signal)}')}"
    if absent(exit_code):
        return "end unknown"
    return f"exit {int(exit_code)}"


def ranks(numbers: Any) -> str:
    """Ranks as people write them: "rank 3", "ranks 0-2, 5"; what belongs to no rank is the launcher's."""
    found = sorted({int(item) for item in numbers if not absent(item)})
    if not found:
        return "the launcher"
    spans: list[list[int]] = []
    for item in found:
        if spans and item == spans[-1][1] + 1:
            spans[-1][1] = item
        else:
            spans.append([item, item])
    text = ", ".join(str(a) if a == b else f"{a}-{b}" if b > a + 1 else f"{a}, {b}" for a, b in spans)
    return f"rank{'s' if len(found) > 1 else ''} {text}"


def listed(items: Any, limit: int = 8) -> str:
    """Names joined by commas, the last by "and"; beyond `limit` the rest is counted."""
    names = [str(item) for item in items]
    if len(names) > limit:
        names = [*names[: limit - 1], f"{len(names) - limit + 1} more"]
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}" if names else ""
