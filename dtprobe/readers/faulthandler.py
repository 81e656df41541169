"""What Python's faulthandler writes when a process crashes, or when it is asked: the Python stacks of all threads."""

from __future__ import annotations

import re
from collections.abc import Iterator

from dtprobe.readers.threads import MOST_FRAMES, Numbered, Snapshot, Thread

_FATAL = re.compile(r"^Fatal Python error: (?P<reason>.*)$")
_TIMEOUT = re.compile(r"^Timeout \((?P<after>[\d:.]+)\)!$")
_THREAD = re.compile(
    r"^(?P<current>Current thread|Thread) 0x[0-9a-f]+(?: \[(?P<name>[^\]]*)\])?(?: \((?P<state>[^)]*)\))? \(most recent call first\):"
)
_FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+|\?\?\?) in (?P<function>.*)$')
_ENDS = re.compile(r"^(?:Extension modules:|Current thread's C stack trace)")


def is_head(text: str) -> bool:
    """Whether a line begins such a dump."""
    return _FATAL.match(text) is not None or _TIMEOUT.match(text) is not None or _THREAD.match(text) is not None


def from_faulthandler(lines: Numbered) -> Iterator[Snapshot]:
    """Each dump in these lines, which may stand among others of a log."""
    found: Snapshot | None = None
    thread: Thread | None = None
    for number, line in lines:
        if head := (_FATAL.match(line) or _TIMEOUT.match(line)):
            if found is not None:
                yield found
            reason = head["reason"] if "reason" in head.groupdict() else f"Timeout {head['after']}"
            found, thread = Snapshot(tool="faulthandler", reason=reason, line=number), None
        elif head := _THREAD.match(line):
            if found is not None and found.threads and thread is None:
                yield found
                found = None
            found = found or Snapshot(tool="faulthandler", line=number)
            thread = Thread(name=head["name"], current=head["current"] == "Current thread", line=number)
            found.threads.append(thread)
        elif thread is not None and (frame := _FRAME.match(line)):
            if len(thread.frames) < MOST_FRAMES:
                place = frame["file"] if frame["line"] == "???" else f"{frame['file']}:{frame['line']}"
                thread.frames.append(f"{frame['function']} ({place})")
                thread.frame_lines.append(number)
        elif thread is not None and line.strip() and (_ENDS.match(line) or not line.startswith("  ")):
            thread = None  # the dump has ended: another one may follow
    if found is not None:
        yield found
