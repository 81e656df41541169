"""py-spy's dumps, JSON or text, as threads."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dtprobe.readers.artifact import Problems, ReaderError, as_bool, as_int, as_text, load_json, note
from dtprobe.readers.threads import MOST_FRAMES, Numbered, Snapshot, Thread

_PROCESS = re.compile(r"^Process ([0-9]{1,9})(?: \(child of ([0-9]{1,9})\))?: (.*)$")
_PARENT = re.compile(r"^Parent Process ([0-9]{1,9}): ")
_THREAD = re.compile(
    r'^Thread (0x[0-9A-Fa-f]{1,16}|[0-9]{1,20})(?:/0x[0-9A-Fa-f]+)?(?: \((active|idle|active\+gil|idle\+gil)\))?(?:: "(.*)")?$'
)
_FRAME = re.compile(r"^    (\S.*) \((.+)\)$")
_SECTION = re.compile(r"^        (Arguments|Locals):$")
_VARIABLE = re.compile(r"^            (\S.*)$")
_ERROR = re.compile(r"^Error: (.*)$")
_CAUSE = re.compile(r"^\s+\d+: (\S.*)$")
_TIDS = 1 << 22
"""The kernel's thread numbers are smaller; a larger one is pthread's own."""
NATIVE = re.compile(r"\.so[.\d]*\)$|\(\[vdso\]\)$|^0x[0-9a-f]+ ")


def is_head(text: str) -> bool:
    """Whether a line begins the text form of a dump."""
    return _PROCESS.match(text) is not None or (_THREAD.match(text) is not None and "most recent" not in text)


def from_text(lines: Numbered) -> Iterator[Snapshot]:
    """Processes of the text form; lines of other forms are passed over (a shell's remarks, a second dump's head)."""
    found: Snapshot | None = None
    thread: Thread | None = None
    section = causes = False
    for number, line in lines:
        if process := _PROCESS.match(line):
            if found is not None:
                yield found
            found = Snapshot(tool="py-spy", pid=int(process[1]), parent=as_number(process[2]), command=process[3], line=number)
            thread, section, causes = None, False, False
        elif found is not None and not found.threads and (parent := _PARENT.match(line)):
            found.parent = int(parent[1])
        elif head := _THREAD.match(line):
            found = found or Snapshot(tool="py-spy", line=number)
            tid, state, name = head.groups()
            thread = Thread(
                pid=found.pid,
                tid=int(tid) if tid.isdigit() and int(tid) < _TIDS else None,
                name=name,
                active=state.startswith("active") if state else None,
                owns_gil=state.endswith("+gil") if state else None,
                line=number,
            )
            found.threads.append(thread)
            section = False
        elif found is not None and not found.threads and (error := _ERROR.match(line)):
            found.reason, causes = error[1], True
        elif causes and found is not None and (cause := _CAUSE.match(line)) and "::" not in cause[1]:
            found.reason = f"{found.reason}: {cause[1]}"
        elif line.startswith("Stack backtrace"):
            causes = False
        elif thread is not None:
            if _SECTION.match(line):
                section = True
            elif section and (variable := _VARIABLE.match(line)):
                thread.locals.append(f"{thread.frames[-1] if thread.frames else '?'}: {variable[1]}")
            elif (frame := _FRAME.match(line)) and len(thread.frames) < MOST_FRAMES:
                section = False
                thread.frames.append(f"{frame[1]} ({frame[2]})")
                thread.frame_lines.append(number)
                if found is not None and not found.native:
                    found.native = NATIVE.search(thread.frames[-1]) is not None
    if found is not None:
        yield found


def as_number(text: str | None) -> int | None:
    """The number that a group holds, if it matched."""
    return int(text) if text is not None else None


def from_json(path: Path, text: str, problems: Problems | None = None) -> Iterator[Snapshot]:
    """Processes of the JSON form. Raises ReaderError."""
    try:
        value = load_json(text)
    except ValueError as error:
        raise ReaderError(f"{path} is not a py-spy dump: {error}", "the dump was cut, or is of another kind") from error
    entries = value if isinstance(value, list) else [value]
    found: dict[int | None, Snapshot] = {}
    read = 0
    for entry in entries:
        if not isinstance(entry, dict) or not isinstance(entry.get("frames"), list):
            continue
        read += 1
        frames = [one for one in entry["frames"][:MOST_FRAMES] if isinstance(one, dict)]
        pid = as_int(entry.get("pid"))
        process = found.setdefault(pid, Snapshot(tool="py-spy", pid=pid))
        process.threads.append(
            Thread(
                pid=pid,
                tid=as_int(entry.get("os_thread_id")),
                name=as_text(entry.get("thread_name")),
                active=as_bool(entry.get("active")),
                owns_gil=as_bool(entry.get("owns_gil")),
                frames=[_frame(one) for one in frames],
                locals=[line for one in frames for line in _locals(one)],
            )
        )
        process.native = process.native or any(NATIVE.search(one) for one in process.threads[-1].frames)
    if read < len(entries):
        note(problems, path, "noise", f"{len(entries) - read} of {len(entries)} entries are not threads")
    yield from found.values()


def _frame(frame: dict[str, Any]) -> str:
    file = as_text(frame.get("short_filename")) or as_text(frame.get("filename")) or as_text(frame.get("module")) or "?"
    line = as_int(frame.get("line"))
    return f"{as_text(frame.get('name')) or '?'} ({file}:{line})" if line else f"{as_text(frame.get('name')) or '?'} ({file})"


def _locals(frame: dict[str, Any]) -> Iterator[str]:
    known = frame.get("locals")
    for one in known if isinstance(known, list) else []:
        if isinstance(one, dict) and isinstance(one.get("name"), str):
            yield f"{frame.get('name')}: {one['name']} = {one.get('repr')}"
