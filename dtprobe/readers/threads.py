"""What tools that look into a living or dying process show of its threads: the common form of all stack readers.

Light: a diagnosis of a small folder imports this, and nothing of it needs a frame.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

Numbered = Iterable[tuple[int, str]]
"""Lines of an artifact with their numbers, which count from 1."""

MOST_FRAMES = 1024


@dataclass(slots=True, kw_only=True)
class Thread:
    """One thread. `frames` are innermost first, as "function (file:line)"; a native frame has its library for a file.

    `active` and `owns_gil` are None where the tool does not tell. `current` is the thread that a crash stopped, or that asked for
    the dump. `line` is where the thread begins in its artifact, None where that has no lines.
    """

    pid: int | None = None
    tid: int | None = None
    name: str | None = None
    active: bool | None = None
    owns_gil: bool | None = None
    current: bool = False
    frames: list[str] = field(default_factory=list)
    locals: list[str] = field(default_factory=list)
    line: int | None = None
    frame_lines: list[int] = field(default_factory=list)


@dataclass(slots=True, kw_only=True)
class Snapshot:
    """The threads of one process at one moment, by one `tool`: py-spy, gdb or faulthandler.

    `reason` is what made the dump (faulthandler: "Segmentation fault", "Timeout") or why there is none (py-spy's error). `parent`
    is the process that it descends from, where the tool says so.
    """

    tool: str
    pid: int | None = None
    parent: int | None = None
    command: str | None = None
    reason: str | None = None
    threads: list[Thread] = field(default_factory=list)
    line: int | None = None
    native: bool = False


def function_of(frame: str) -> str:
    """The function of a frame: `all_reduce` of `all_reduce (torch/distributed/distributed_c10d.py:3068)`."""
    return frame.rpartition(" (")[0] or frame


def place_of(frame: str) -> str:
    """The file or library of a frame, without the line."""
    place = frame.rpartition(" (")[2].removesuffix(")")
    head, colon, line = place.rpartition(":")
    return head if colon and line.isdigit() else place
