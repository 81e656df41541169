"""What launch commands, environments, schedulers and Kubernetes say of places: which rank a file, a host, a pod or a process is."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from dtprobe.diagnose.case import Line

MOST_TASKS = 1 << 16
_ENV = re.compile(
    r"(?<![A-Za-z_])(?:(?:GLOBAL_|OMPI_COMM_WORLD_|PMIX?_|FLUX_TASK_)?RANK|SLURM_PROCID)[\"']?\s*[=:]\s*[\"']?(?P<rank>\d{1,6})\b(?![-.\d])"
)
_SAYS = re.compile(
    r"(?i)^\W{0,3}(?:(?:info|debug|init|start(?:ing|ed)?|hello(?: from)?|i am|this is|global|my|process|worker|ddp|on)[\s:,|-]+){0,3}"
    r"(?:(?:global|world|my)[_ ])?(?:rank|process[_ ]index)(?:[ =:]+|_)(?P<rank>\d{1,6})\b"
)
_NODE_RANK = re.compile(r"(?i)(?:\b|_)(?:node[-_]?rank|machine[-_]rank|group[-_]rank)[\"']?[ =:]+[\"']?(?P<node>\d{1,5})\b")
_PROCS = re.compile(
    r"(?i)(?:\b|_)(?:nproc[-_]per[-_]node|nproc|n_?gpus?(?:[-_]per[-_]node)?|gpus[-_]per[-_]node|ntasks[-_]per[-_]node|local[-_]world[-_]size)"
    r"[\"']?[ =:]+[\"']?(?P<procs>\d{1,4})\b"
)
_NODES = re.compile(r"(?i)(?:\b|_)nnodes[\"']?[ =:]+[\"']?(?:\d+:)?(?P<nodes>\d{1,5})\b")
_COUNTED = (
    "nproc",
    "NPROC",
    "nnodes",
    "NNODES",
    "per_node",
    "per-node",
    "PER_NODE",
    "local_world",
    "LOCAL_WORLD",
    "gpus",
    "GPUS",
)
_TASKS = re.compile(
    r"^(?:srun: (?:error: )?)?(?P<host>[A-Za-z][\w.-]{0,80}): (?:tasks?|ranks?):? (?P<tasks>\d[\d,-]*)(?:$|[:\s])"
)
_OWN_PID = re.compile(r"(?i)\b(?:os[._ ]?)?(?:get)?pid[ =:(]+(?P<pid>\d{2,10})\b")
_NOT_OWN = re.compile(r"(?i)kill|terminat|signal|child|parent|ppid|died|dead|exit|sent|send|worker pid|subprocess|spawn|fork")
_BOTH = re.compile(r"(?i)(?<![a-z_])rank[ =:#]+(?P<rank>\d{1,6})\b[^\d\n]{1,30}?\bpid[ =:(]+(?P<pid>\d{2,10})\b")
_RAY = re.compile(r"\(ip=(?P<ip>[\d.]{7,15}|[0-9a-f:]{4,39}), pid=(?P<pid>\d{1,10})\) world_rank=(?P<rank>\d{1,6})\b")
_NAME = re.compile(r"^Name: {2,}(?P<pod>[a-z0-9][a-z0-9.-]*)$|^Name: (?P<pod2>[a-z0-9][a-z0-9.-]*)$")
_IP = re.compile(r"^IP: +(?P<ip>[\d.]{7,15}|[0-9a-f:]{4,39})$")
_ON = re.compile(r"^Node: +(?P<node>[\w.-]+)(?:/|$)")
_POD_ROW = re.compile(
    r"^(?P<pod>[a-z0-9][a-z0-9.-]*) +\d+/\d+ +[A-Z][A-Za-z:/0-9]+ +\d+(?: \([^)]*\))? +\w+ +(?P<ip>[\d.]{7,15}|<none>)(?: +(?P<node>[\w.-]+|<none>))?"
)


class At(NamedTuple):
    """A rank, and where it ran."""

    rank: int
    host: str | None = None
    pid: int | None = None


@dataclass(slots=True)
class Places:
    """What was said, by artifact where it holds for one of them.

    `env` and `says`: ranks that an artifact's environment or greeting shows. `nodes`, `procs`: its node's number and the processes
    a node. `sections`: of a description of pods the first line, the pod's name, addresses and rank. `pods`: other names of a pod (its
    address, its node). `several`: more than one node is spoken of.
    """

    env: dict[str, set[int]] = field(default_factory=lambda: defaultdict(set))
    says: dict[str, set[int]] = field(default_factory=lambda: defaultdict(set))
    nodes: dict[str, set[int]] = field(default_factory=lambda: defaultdict(set))
    procs: dict[str, set[int]] = field(default_factory=lambda: defaultdict(set))
    at: list[At] = field(default_factory=list)
    sections: dict[str, list[Section]] = field(default_factory=lambda: defaultdict(list))
    pods: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    several: bool = False

    def locals(self) -> Iterator[tuple[str, dict[int, int]]]:
        """The ranks of local ranks, for each artifact that tells its node's number, where the number of processes a node is known."""
        everywhere = {count for found in self.procs.values() for count in found}
        for name, nodes in self.nodes.items():
            procs = self.procs.get(name) or everywhere
            if len(nodes) == 1 and len(procs) == 1:
                node, each = next(iter(nodes)), next(iter(procs))
                yield name, {own: node * each + own for own in range(each)}


@dataclass(slots=True)
class Section:
    """One pod in `kubectl describe`."""

    first: int
    pod: str
    rank: int | None = None


def places(lines: Sequence[Line]) -> Places:
    """Read all lines once."""
    found = Places()
    for line in lines:
        text = line.text
        if "RANK" in text or "rank" in text or "Rank" in text or "PROCID" in text or "rocess index" in text:
            _ranks(line, found)
        if "ask" in text and (match := _TASKS.match(text)):
            found.at += [At(rank, match["host"]) for rank in _listed(match["tasks"])]
        if "pid" in text or "PID" in text or "Pid" in text:
            _processes(line, found)
        lower = (
            "nproc" in text
            or "nnodes" in text
            or "NPROC" in text
            or "NNODES" in text
            or "per_node" in text
            or "per-node" in text
        )
        if lower or "PER_NODE" in text or "LOCAL_WORLD_SIZE" in text or "GPU" in text:
            _counts(line, found)
        _pods(line, found)
    return found


def _ranks(line: Line, found: Places) -> None:
    text, name = line.text, line.artifact.name
    for match in _ENV.finditer(text):
        found.env[name].add(int(match["rank"]))
        if sections := found.sections.get(name):
            sections[-1].rank = int(match["rank"])
    if line.rank is None and (said := _SAYS.match(text)):
        found.says[name].add(int(said["rank"]))
    if not any(one in text for one in ("ode", "ODE", "achine", "ACHINE", "roup", "ROUP")):
        return
    for match in _NODE_RANK.finditer(text):
        found.nodes[name].add(int(match["node"]))
        found.several = found.several or int(match["node"]) > 0


def _counts(line: Line, found: Places) -> None:
    for match in _PROCS.finditer(line.text):
        if int(match["procs"]):
            found.procs[line.artifact.name].add(int(match["procs"]))
    for match in _NODES.finditer(line.text):
        found.several = found.several or int(match["nodes"]) > 1


def _processes(line: Line, found: Places) -> None:
    text = line.text
    if "world_rank=" in text and (ray := _RAY.search(text)):
        found.at.append(At(int(ray["rank"]), ray["ip"], int(ray["pid"])))
        return
    match = _BOTH.search(text) if "ank" in text else None
    rank = int(match["rank"]) if match else line.rank
    if match is None and rank is not None and line.pid is None:
        match = _OWN_PID.search(text[:80])
    if match is not None and rank is not None and not _NOT_OWN.search(text):
        found.at.append(At(rank, line.host, int(match["pid"])))


def _pods(line: Line, found: Places) -> None:
    text, name = line.text, line.artifact.name
    first = text[:1]
    if first == "N" and (match := _NAME.match(text.rstrip())):
        found.sections[name].append(Section(line.number, match["pod"] or match["pod2"]))
    elif first == "I" and (match := _IP.match(text.rstrip())) and found.sections.get(name):
        found.pods[found.sections[name][-1].pod].add(match["ip"])
    elif first == "N" and (match := _ON.match(text)) and found.sections.get(name):
        found.pods[found.sections[name][-1].pod].add(match["node"])
    elif "/" in text and (match := _POD_ROW.match(text)):
        found.pods[match["pod"]] |= {one for one in (match["ip"], match["node"]) if one and one != "<none>"}


def _listed(text: str) -> Iterator[int]:
    for part in text.split(","):
        low, _, high = part.partition("-")
        if low.isdigit():
            yield from range(int(low), min(int(high or low), int(low) + MOST_TASKS) + 1)


def blocks(shown: Mapping[str, set[int]]) -> Iterator[tuple[str, dict[int, int]]]:
    """The ranks of local ranks where an artifact shows the ranks of one node that is not the first: they follow each other."""
    for name, ranks in shown.items():
        base, many = min(ranks), len(ranks)
        if base > 0 and many > 1 and max(ranks) == base + many - 1 and base % many == 0:
            yield name, {own: base + own for own in range(many)}
