"""TCP connections of processes, by iproute2's `ss`: how many bytes each process moved, and a listing for the bundle."""

from __future__ import annotations

import re
from collections.abc import Mapping

from dtprobe.errors import Unavailable
from dtprobe.probes.answers import output

TIMEOUT_S = 5.0
_OWNER = re.compile(r"pid=(\d+),fd=\d+")
_BYTES = re.compile(r"\bbytes_(?:acked|received):(\d+)")


def listing(environ: Mapping[str, str]) -> str | Unavailable:
    """All TCP connections with their owners, states, queues and counters, a line each, as `ss -atinpO` says it."""
    return output(("ss", "-atinpOH"), environ, package="iproute2", timeout_s=TIMEOUT_S)


def moved(environ: Mapping[str, str]) -> dict[int, int] | Unavailable:
    """Bytes received and acknowledged on a process's TCP connections so far, by pid.

    Only connections of this network namespace. A shared connection counts for each of its owners.
    """
    text = listing(environ)
    if isinstance(text, Unavailable):
        return text
    found: dict[int, int] = {}
    for line in text.splitlines():
        size = sum(int(one) for one in _BYTES.findall(line))
        for pid in {int(one) for one in _OWNER.findall(line)}:
            found[pid] = found.get(pid, 0) + size
    return found
