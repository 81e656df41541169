"""What an artifact's name says, where a launcher or a recorder documents it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import PurePath

from dtprobe.readers.artifact import rank_of

_ELASTIC = re.compile(r"(?:^|/)attempt_\d+/(?P<local>\d{1,5})/(?:stdout|stderr|error)\.(?:log|json)$")
_SUBMITIT = re.compile(r"^\d{3,}(?:_\d+)?_(?P<rank>\d{1,6})_log\.(?:out|err)$")
_DUMP = r"^_dump_(\d{1,7})$"


@dataclass(frozen=True, slots=True)
class Named:
    """The rank, or the rank within its host, that a name gives."""

    rank: int | None = None
    local_rank: int | None = None


def named(name: str) -> Named:
    """Read a name: torchrun's `--log-dir` (`attempt_0/3/stderr.log` is local rank 3), submitit's (`812_3_log.err`), the flight
    recorder's (`nccl_trace_rank_3`, `_dump_3`), Open MPI's (`rank.3/stderr`), and any with `rank3` in it.
    """
    if match := _ELASTIC.search(name):
        return Named(local_rank=int(match["local"]))
    path = PurePath(name)
    if match := _SUBMITIT.match(path.name):
        return Named(rank=int(match["rank"]))
    return Named(rank=rank_of(path, also=_DUMP))
