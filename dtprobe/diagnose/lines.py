"""Text artifacts as lines: colours and progress bars undone, the tags and stamps of launchers read and taken off."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from dtprobe.diagnose.case import Artifact, Line
from dtprobe.readers.artifact import Problems, read_bytes

MOST_BYTES = 32 << 20
_COLOURS = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]")
_RANK_TAG = re.compile(r"\[(?:rank ?|Rank )(?P<rank>\d{1,6})\]:? ?")
_DEFAULT_TAG = re.compile(r"\[[A-Za-z_]\w*?(?P<local>\d{1,4})\]:")


@dataclass(frozen=True, slots=True)
class _Envelope:
    text: str
    rank: int | None = None
    local_rank: int | None = None


def read_lines(artifact: Artifact, problems: Problems | None = None) -> Iterator[Line]:
    """The lines of a text artifact."""
    data = read_bytes(artifact.path, MOST_BYTES, problems)
    for number, raw in enumerate(data.decode("utf-8", "replace").split("\n"), 1):
        if not raw.strip():
            continue
        plain = _COLOURS.sub("", raw).rstrip("\r").rpartition("\r")[2]
        opened = _opened(plain)
        yield Line(
            artifact=artifact,
            number=number,
            text=opened.text,
            raw=plain,
            rank=artifact.rank if opened.rank is None else opened.rank,
            local_rank=opened.local_rank,
            host=artifact.host,
        )


def _opened(text: str) -> _Envelope:
    if tag := _RANK_TAG.match(text):
        return _Envelope(text[tag.end() :], rank=int(tag["rank"]))
    if tag := _DEFAULT_TAG.match(text):
        return _Envelope(text[tag.end() :], local_rank=int(tag["local"]))
    return _Envelope(text)
