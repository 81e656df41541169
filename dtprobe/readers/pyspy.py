"""py-spy's dumps of Python stacks, as JSON or text."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

from dtprobe.readers.artifact import Problems, ReaderError, as_bool, as_int, as_text, load_json, note, rank_of, read_text
from dtprobe.readers.schema import Schema

SCHEMA = Schema(
    "stacks",
    {
        "thread_name": "string",
        "active": "boolean",
        "owns_gil": "boolean",
        "top": "string",
        "frames": "string",
        "digest": "string",
        "locals": "string",
    },
)
"""`kind` is "stack", one row a thread. `frames` are innermost first, as "func (file:line)" separated by ";" (a native frame has its
library for a file), `top` is the first. `digest` is equal for stacks of equal functions and files, whatever the lines.
`locals` is what `--locals` printed, one variable a line. `tid` is the system's number, null where only pthread's is known.
`t_ns` is the file's own time: the dump does not bear one."""

LIMIT = 64 << 20
_FRAMES = 1024


@dataclass
class _Thread:
    pid: int | None = None
    tid: int | None = None
    name: str | None = None
    active: bool | None = None
    owns_gil: bool | None = None
    frames: list[str] = field(default_factory=list)
    locals: list[str] = field(default_factory=list)


def read_pyspy(path: Path, rank: int | None = None, problems: Problems | None = None, *, dated: bool = True) -> pd.DataFrame:
    """One dump (`py-spy dump`, with `--json`, `--locals`, `--native`, `--subprocesses` or not) as `stacks`.

    `rank` defaults to the name's. `dated` false leaves `t_ns` null: for files that were copied about. Raises ReaderError.
    """
    text = read_text(path, LIMIT, problems)
    threads = _from_json(path, text, problems) if text.lstrip()[:1] in ("[", "{") else list(_from_text(text))
    if not threads:
        raise ReaderError(f"{path} is not a py-spy dump: it has no thread", "py-spy dump [--json] --pid PID > FILE")
    return stacks(threads, path, rank, path.stat().st_mtime_ns if dated else None)


def stacks(threads: Sequence[_Thread], path: Path, rank: int | None, t_ns: int | None) -> pd.DataFrame:
    """The frame of some threads."""
    return SCHEMA.frame(
        {
            "t_ns": [t_ns for _ in threads],
            "rank": rank if rank is not None else rank_of(path, r"stack\.\w+\.([0-9]{1,7})$"),
            "pid": [one.pid for one in threads],
            "tid": [one.tid for one in threads],
            "source": str(path),
            "kind": "stack",
            "thread_name": [one.name for one in threads],
            "active": [one.active for one in threads],
            "owns_gil": [one.owns_gil for one in threads],
            "top": [one.frames[0] if one.frames else None for one in threads],
            "frames": [";".join(one.frames) if one.frames else None for one in threads],
            "digest": [digest(one.frames) if one.frames else None for one in threads],
            "locals": ["\n".join(one.locals) if one.locals else None for one in threads],
        }
    )


def digest(frames: Sequence[str]) -> str:
    """Eight letters that are equal for stacks of the same functions in the same files. Line numbers do not count."""
    return hashlib.blake2s(
        "\n".join(re.sub(r":\d+\)$", ")", one) for one in frames).encode("utf-8", "replace"), digest_size=4
    ).hexdigest()


def _from_json(path: Path, text: str, problems: Problems | None) -> list[_Thread]:
    try:
        value = load_json(text)
    except ValueError as error:
        raise ReaderError(f"{path} is not a py-spy dump: {error}", "the dump was cut, or is of another kind") from error
    entries = value if isinstance(value, list) else [value]
    threads = []
    for entry in entries:
        if not isinstance(entry, dict) or not isinstance(entry.get("frames"), list):
            continue
        frames = [one for one in entry["frames"][:_FRAMES] if isinstance(one, dict)]
        threads.append(
            _Thread(
                pid=as_int(entry.get("pid")),
                tid=as_int(entry.get("os_thread_id")),
                name=as_text(entry.get("thread_name")),
                active=as_bool(entry.get("active")),
                owns_gil=as_bool(entry.get("owns_gil")),
                frames=[_frame(one) for one in frames],
                locals=[line for one in frames for line in _locals(one)],
            )
        )
    if len(threads) < len(entries):
        note(problems, path, "noise", f"{len(entries) - len(threads)} of {len(entries)} entries are not threads")
    return threads


def _frame(frame: dict[str, Any]) -> str:
    file = as_text(frame.get("short_filename")) or as_text(frame.get("filename")) or as_text(frame.get("module")) or "?"
    line = as_int(frame.get("line"))
    return f"{as_text(frame.get('name')) or '?'} ({file}:{line})" if line else f"{as_text(frame.get('name')) or '?'} ({file})"


def _locals(frame: dict[str, Any]) -> Iterator[str]:
    known = frame.get("locals")
    for one in known if isinstance(known, list) else []:
        if isinstance(one, dict) and isinstance(one.get("name"), str):
            yield f"{frame.get('name')}: {one['name']} = {one.get('repr')}"


_PROCESS = re.compile(r"^Process ([0-9]{1,9}): (.*)$")
_THREAD = re.compile(
    r'^Thread (0x[0-9A-Fa-f]{1,16}|[0-9]{1,20})(?:/0x[0-9A-Fa-f]+)?(?: \((active|idle|active\+gil|idle\+gil)\))?(?:: "(.*)")?$'
)
_FRAME = re.compile(r"^    (\S.*) \((.+)\)$")
_SECTION = re.compile(r"^        (Arguments|Locals):$")
_VARIABLE = re.compile(r"^            (\S.*)$")


def _from_text(text: str) -> Iterator[_Thread]:
    """Threads of the text form; lines of other forms are passed over (a shell's remarks, a second dump's head)."""
    pid: int | None = None
    thread: _Thread | None = None
    section = False
    for line in text.splitlines():
        head = _THREAD.match(line)
        process = _PROCESS.match(line)
        if head or process:
            if thread is not None:
                yield thread
            thread, section = None, False
        if process:
            pid = int(process[1])
        elif head:
            number, state, name = head.groups()
            # below 2**22, the kernel's largest thread number: a larger one is pthread's own
            tid = int(number) if number.isdigit() and int(number) < 1 << 22 else None
            state = state or ""
            active = state.startswith("active") if state else None
            thread = _Thread(pid, tid, name, active, state.endswith("+gil") if state else None)
        elif thread is not None:
            if _SECTION.match(line):
                section = True
            elif section and (variable := _VARIABLE.match(line)):
                thread.locals.append(f"{thread.frames[-1] if thread.frames else '?'}: {variable[1]}")
            elif (found := _FRAME.match(line)) and len(thread.frames) < _FRAMES:
                section = False
                thread.frames.append(f"{found[1]} ({found[2]})")
    if thread is not None:
        yield thread
