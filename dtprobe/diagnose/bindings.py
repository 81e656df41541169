"""Artifacts and hosts of one process each, bound to its rank by their names, by the environment they show or by what they greet with."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence, Set

from dtprobe.diagnose.case import Artifact, Line
from dtprobe.diagnose.placing import Places
from dtprobe.diagnose.siblings import numbered, ranks_of

_OF_PROCESSES = frozenset({"text", "nccl-log", "stacks", "json", "jsonl"})
_POD = re.compile(r"(?i)(?:worker|trainer|train|replica|rank|proc|ddp|master|pytorch|job|pod)[\w.-]*$")
_AGENT = ("distributed/elastic", "distributed.elastic", "attempts left; will restart", "srun: ", "mpirun")


def shown_by(lines: Sequence[Line]) -> tuple[dict[str, set[int]], dict[str, set[int]], set[str]]:
    """The ranks that the lines of each artifact and of each host show, and the artifacts of several processes."""
    files: dict[str, set[int]] = defaultdict(set)
    hosts: dict[str, set[int]] = defaultdict(set)
    several: set[str] = set()
    for line in lines:
        if line.rank is not None:
            files[line.artifact.name].add(line.rank)
            if line.host:
                hosts[line.host].add(line.rank)
        locally = (line.local_rank or 0) > 0 and line.artifact.local_rank is None
        if line.artifact.name not in several and (locally or any(one in line.text for one in _AGENT)):
            several.add(line.artifact.name)
    return files, hosts, several


def bound(
    artifacts: Sequence[Artifact],
    shown: Mapping[str, Set[int]],
    told: Places,
    several: Set[str],
    size: int | None,
    seen: Set[int],
) -> dict[str, int]:
    """The rank of each artifact that is one process's, by what it says, else by its name."""
    several = several | {name for name, procs in told.procs.items() if max(procs) > 1}
    free = [
        one.name
        for one in artifacts
        if one.rank is None and one.local_rank is None and one.kind in _OF_PROCESSES and one.name not in several
    ]
    env = {name: min(told.env[name]) for name in free if len(told.env.get(name, ())) == 1 and name not in told.sections}
    env = {name: rank for name, rank in env.items() if shown.get(name, set()) <= {rank} and (size is None or rank < size)}
    others = set().union(*(ranks for name, ranks in shown.items() if name not in env))
    if len(set(env.values())) < 2 and not (len(env) == 1 and others and not shown.get(next(iter(env)))):
        env = {}
    says = {name: min(told.says[name]) for name in free if len(told.says.get(name, ())) == 1}
    says = {name: rank for name, rank in says.items() if shown.get(name, set()) <= {rank}}
    if not ranks_of(set(says.values()), size):
        says = {}
    if found := says | env:
        return found
    if told.several and size is None:
        return {}  # the files may be of nodes
    named = numbered(free, size, {name: shown.get(name, set()) for name in free})
    beyond = size is None and max(seen, default=0) > max(named.values(), default=0)
    return {} if beyond else named


def pods(names: Set[str], shown: Mapping[str, Set[int]], size: int | None, seen: Set[int]) -> dict[str, int]:
    """The rank of each pod that runs one process, by its number."""
    free = [name for name in names if _POD.search(name)]
    named = numbered(free, size, {name: shown.get(name, set()) for name in free})
    beyond = size is None and max(seen, default=0) > max(named.values(), default=0)
    return {} if beyond else named
