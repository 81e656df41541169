"""A Flight Recorder dump as plain data: pickle or JSON, whole or cut, of every version. No table library is imported here."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from dtprobe.readers.artifact import Problems, ReaderError, load_json, note
from dtprobe.readers.safe_pickle import CutPickle, RefusedPickle, loads

RANK_NAMES = r"(?:_dump_|fr_[a-z]+_|trace_)([0-9]{1,7})(?:\.\w+)?$"
"""File names that tell the rank without the word, as torch's default prefixes make them."""
IN_TORCH = re.compile(r"(?:^|(?:site|dist)-packages/)torch/|/torch/(?:distributed|nn|utils|_dynamo|autograd)/|^<")
"""Files of frames that are not the job's own code."""
_PEERS = re.compile(r"^(\w+) ([0-9]{1,9})(->|<-)([0-9]{1,9})$")


def content(path: Path, data: bytes, problems: Problems | None) -> dict[str, Any]:
    """What the file's bytes hold. Raises ReaderError for what is no dump, and for a pickle that would run code."""
    if not data:
        raise ReaderError(f"{path} is empty", "the rank died before or while it wrote the dump")
    try:
        whole = loads(data) if data[0] == 0x80 else load_json(data)
    except CutPickle as error:
        whole = _without_last(error.value)
        note(problems, path, "cut", f"the pickle is cut: {len(whole.get('entries', ()))} complete entries read")
    except RefusedPickle as error:
        raise ReaderError(f"{path} refused: {error}", "it was not loaded; ask who wrote it") from error
    except ValueError as error:
        whole = _entries_of_cut_json(data.decode("utf-8", "replace")) if data[0] != 0x80 else {}
        if not whole:
            raise ReaderError(f"{path} is not a Flight Recorder dump: {error}", "give a pickle or JSON of torch's") from error
        note(problems, path, "cut", f"the JSON is cut: {len(whole['entries'])} complete entries read")
    if isinstance(whole, list):  # torch 2.2 wrote the entries alone
        return {"entries": whole}
    if not isinstance(whole, dict):
        raise ReaderError(f"{path} is not a Flight Recorder dump: it holds {type(whole).__name__}", "give a dump of torch's")
    return whole


def _without_last(value: Any) -> dict[str, Any]:
    """A cut dump without the entry that the cut went through, and the loose parts of it."""
    whole = value if isinstance(value, dict) else {}
    entries = whole.get("entries")
    entries = entries if isinstance(entries, list) else []
    # what is complete, only another entry can tell: a lone one is left out
    keys = set(entries[0]) - {"frames", "duration_ms"} if len(entries) > 1 and isinstance(entries[0], dict) else set()
    while entries and not (isinstance(entries[-1], dict) and keys and keys <= set(entries[-1])):
        entries = entries[:-1]
    return {**whole, "entries": entries}


def _entries_of_cut_json(text: str) -> dict[str, Any]:
    start = re.search(r'"entries"\s*:\s*\[', text)
    if start is None:
        return {}
    decoder, at, entries = json.JSONDecoder(), start.end(), []
    gap = re.compile(r"[\s,]*")
    try:
        while (at := gap.match(text, at).end()) < len(text):  # type: ignore[union-attr]
            entry, at = decoder.raw_decode(text, at)
            entries.append(entry)
    except (ValueError, RecursionError):
        pass  # the entry that the cut went through
    version = re.search(r'"version"\s*:\s*"([^"]{1,20})"', text)
    return {"entries": entries, "version": version[1] if version else None}


def split_name(name: Any) -> tuple[str | None, str | None, int | None, int | None]:
    """Backend, operation, source and destination of "nccl:send 0->1", "nccl:recv 1<-0", "gloo:all_reduce"."""
    if not isinstance(name, str):
        return None, None, None, None
    backend, colon, op = name.partition(":")
    if not colon:
        backend, op = "", name
    peers = _PEERS.match(op)
    if peers is None:
        return backend or None, op, None, None
    left, right = int(peers[2]), int(peers[4])
    return backend or None, peers[1], *((left, right) if peers[3] == "->" else (right, left))


def ranks_of(value: Any) -> tuple[int, ...] | None:
    """The ranks of a group: torch writes them as text such as "[0, 1]". None where they are not told (gloo: "[]")."""
    if isinstance(value, str):
        return tuple(map(int, re.findall(r"[0-9]{1,7}", value[: 1 << 20]))) or None
    if isinstance(value, list | tuple) and value and all(type(one) is int for one in value):
        return tuple(value)
    return None
