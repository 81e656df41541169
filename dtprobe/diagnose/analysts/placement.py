"""How processes were placed: more of them than devices, two on one device, worlds of one, versions and addresses that clash."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence

from dtprobe.diagnose.case import Case, Event, Finding, First, Line, Quote, quote
from dtprobe.diagnose.facts.about import rank_of, world
from dtprobe.diagnose.signatures import signatures

BRIDGES = ("docker", "br-", "virbr", "cni", "veth", "flannel", "podman", "lxc", "lxd", "tailscale", "tun", "wg")
"""Interfaces of containers and tunnels: no other host reaches their addresses."""
FAILED_TO_CONNECT = (
    "nccl-connect-failed", "nccl-connect-refused", "nccl-no-route", "nccl-bridge-address", "nccl-socket-closed", "collective-stuck", "nccl-remote-error",
)  # fmt: skip


def analyse(case: Case) -> Iterator[Finding]:
    """A finding for each way in which the placement cannot work."""
    yield from _too_many(case)
    yield from _one_device(case)
    yield from _worlds_of_one(case)
    yield from _launcher_a_task(case)
    yield from _versions(case)
    yield from _addresses(case)
    yield from _no_server(case)


def _too_many(case: Case) -> Iterator[Finding]:
    """More processes a node than devices, and a rank that asked for one it cannot see."""
    failed = case.of("cuda-ordinal")
    if not failed:
        return
    asked = [event for event in case.of("processes-asked") if int(event.fields["count"]) > 0]
    visible = case.of("visible-devices")
    counted = case.of("devices-counted")
    devices = [len(event.fields["devices"].split(",")) for event in visible if "," in event.fields["devices"]]
    devices += [int(event.fields["count"]) for event in counted]
    devices += [int(event.fields["count"]) for event in failed if "count" in event.fields]
    if not asked or not devices or int(asked[0].fields["count"]) <= min(devices):
        return
    named = [rank for event in failed if (rank := rank_of(event, case)) is not None and rank % _most(asked) >= min(devices)]
    first = min(named, default=min(devices))
    lines = dict.fromkeys((event.line.artifact.name, event.line.number) for event in (*asked[:1], *visible[:1], *counted[:1]))
    by_place = {(event.line.artifact.name, event.line.number): event for event in (*asked, *visible, *counted)}
    yield Finding(
        mode="invalid-device-ordinal",
        analyst="placement",
        likelihood=0.95,
        because=f"{_most(asked)} processes were started on a node where {min(devices)} devices are visible.",
        first=first,
        suspects=(first,),
        host=failed[0].host,
        at_ns=failed[0].t_ns,
        evidence=(*_quotes([by_place[place] for place in lines], "cause"), *_quotes(failed[:2], "confirm")),
    )


def _most(asked: Sequence[Event]) -> int:
    return max(int(event.fields["count"]) for event in asked)


def _one_device(case: Case) -> Iterator[Finding]:
    """NCCL's word of a device used twice, beside the environment of the ranks that share it."""
    said = case.of("duplicate-gpu")
    if not said:
        return
    shared: dict[tuple[str | None, str], list[Event]] = defaultdict(list)
    for event in case.of("placement-printed"):
        if event.fields.get("devices"):
            shared[event.host, f"{event.fields['devices']}/{event.fields['local']}"].append(event)
    clashing = next((events for events in shared.values() if len({event.fields["rank"] for event in events}) > 1), [])
    if not clashing:
        return
    pairs = {int(rank) for event in said for rank in (event.fields["a"], event.fields["b"])}
    everybody = world(case) <= pairs or len(pairs) == 2
    first: First = "all" if everybody else min(pairs)
    yield Finding(
        mode="duplicate-gpu",
        analyst="placement",
        likelihood=0.95,
        because=f"Ranks {', '.join(sorted(event.fields['rank'] for event in clashing))} were given the same visible device.",
        first=first,
        suspects=() if everybody else (min(pairs),),
        evidence=(*_quotes(clashing[:3], "cause"), *_quotes(said[:2], "cause")),
    )


_ALONE = re.compile(r"(?i)\b(?:world[_ ]?size|num_processes|nranks)\b[\"']?\s*[:=]?\s*1\b(?![\d.])")
_TOLD = re.compile(
    r"\b(?:SLURM_N(?:TASKS|PROCS)|SLURM_STEP_NUM_TASKS|OMPI_COMM_WORLD_SIZE|PMI_SIZE|PMIX_SIZE|MV2_COMM_WORLD_SIZE)=(?P<env>\d+)|"
    r"--ntasks[= ](?P<tasks>\d+)|\bsrun\b.*\s-n ?(?P<srun>\d+)|\bmpi(?:run|exec)\b.*\s-(?:np|n) ?(?P<mpi>\d+)|"
    r"(?i:\bexpected\b.{0,24}\bworld[_ ]size\W{1,3}(?P<expected>\d+))|(?i:\bworld[_ ]size\b.{0,24}\bexpected\W{1,3}(?P<wanted>\d+))"
)
_TASK = re.compile(r"\b(?:SLURM_PROCID|OMPI_COMM_WORLD_RANK|PMI_RANK|PMIX_RANK|MASTER_PORT)=(?P<task>\d+)")


def _worlds_of_one(case: Case) -> Iterator[Finding]:
    """Several processes that each believe to be alone in their world."""
    alone: dict[tuple[object, ...], Line] = {}
    told: list[tuple[int, Line]] = []
    for line in case.lines:
        if (
            "ize" not in line.text
            and "IZE" not in line.text
            and "run" not in line.text
            and "TASKS" not in line.text
            and "tasks" not in line.text
        ):
            continue
        if found := _TOLD.search(line.text):
            told.append((max(int(one) for one in found.groups() if one), line))
        if _ALONE.search(line.text) and (not (wanted := _TOLD.search(line.text)) or wanted["expected"] is None):
            task = _TASK.search(line.text)
            process = (line.artifact.name, line.host, line.pid, line.rank)
            alone.setdefault(("task", task["task"]) if task and process[1:] == (None, None, None) else process, line)
    if not any(size > 1 for size, _line in told):
        # nothing tells that more were started together: each must say that it is the first of its own
        said = case.of("nested-world")
        alone = {
            (event.line.artifact.name, event.host, event.line.pid, event.line.rank, event.line.number): event.line
            for event in said
        }
    if len(alone) < 2:
        return
    lines = list(alone.values())
    yield Finding(
        mode="nested-launcher",
        analyst="placement",
        likelihood=0.85,
        because=f"{len(lines)} processes each say that their world is of size one: a launcher was started inside another.",
        first="all",
        evidence=(
            *(quote(line, "cause") for line in lines[:4]),
            *(quote(line, "confirm") for size, line in told[:1] if size > 1),
        ),
        not_proven="which of the two launchers was meant to make the world",
    )


def _versions(case: Case) -> Iterator[Finding]:
    """NCCL's version as the ranks print it, where they differ and the job failed in NCCL."""
    by_version: dict[str, Event] = {}
    for event in case.of("nccl-version"):
        if event.line.text.lstrip().startswith("NCCL version") or "NCCL INFO" in event.line.text:
            by_version.setdefault(event.fields["version"], event)
    if len(by_version) < 2:
        return
    failed = [event for event in case.events if event.signature in _NCCL_FAILED]
    if not failed:
        return
    yield Finding(
        mode="nccl-version-mismatch",
        analyst="placement",
        likelihood=0.78,
        because=f"The ranks run different NCCL versions: {', '.join(sorted(by_version))}.",
        first="all",
        evidence=(*_quotes(list(by_version.values())[:3], "cause"), *_quotes(failed[:1], "effect")),
        not_proven="that the versions cannot work together",
    )


_A_NODE = re.compile(r"(?:--ntasks-per-node|SLURM_NTASKS_PER_NODE)[= ](?P<tasks>\d+)")
_LAUNCHED = re.compile(r"\bsrun\b.*?\b(?:torchrun|torch\.distributed\.(?:run|launch)|accelerate launch|deepspeed)\b")
_WORKERS = re.compile(r"--nproc[-_]per[-_]node[= ](?P<workers>\d+)|--num_(?:processes|gpus)[= ](?P<others>\d+)")


def _launcher_a_task(case: Case) -> Iterator[Finding]:
    """The scheduler starts several tasks a node, each a launcher of several workers, and they are in each other's way."""
    clash = case.of("address-in-use", "duplicate-gpu")
    tasks = workers = None
    for line in case.lines:
        if "srun" not in line.text and "TASKS_PER_NODE" not in line.text and "ntasks-per-node" not in line.text:
            continue
        launched = _LAUNCHED.search(line.text)
        # what stands on srun's own command line holds, whatever the job asked for
        own = _A_NODE.search(line.text[: launched.end()] if launched else line.text)
        if own and (launched or tasks is None or _LAUNCHED.search(tasks[1].text) is None):
            tasks = int(own["tasks"]), line
        if launched and (found := _WORKERS.search(line.text)):
            workers = int(found["workers"] or found["others"]), line
    if tasks is None or workers is None or tasks[0] < 2 or workers[0] < 2 or not clash:
        return
    yield Finding(
        mode="nested-launcher",
        analyst="tasks",
        likelihood=0.88,
        because=f"srun starts {tasks[0]} tasks a node, and each of them is a launcher of {workers[0]} workers that wants the same port and devices.",
        first="all",
        evidence=(quote(tasks[1], "cause"), quote(workers[1], "cause"), *_quotes(clash[:2], "effect")),
    )


_NCCL_FAILED = frozenset(
    {"nccl-usage", "nccl-remote-error", "nccl-socket-closed", "nccl-truncated", "collective-stuck", "nccl-connect-failed"}
)


def _addresses(case: Case) -> Iterator[Finding]:
    """Addresses that ranks advertise and that no other host reaches: the same on two hosts, or of a bridge or of loopback."""
    failed = [event for event in case.events if event.signature in FAILED_TO_CONNECT]
    if not failed:
        return
    used = case.of("nccl-interface-used")
    hosts: dict[str, dict[str, Event]] = defaultdict(dict)
    for event in used:
        if event.host:
            hosts[event.fields["address"]].setdefault(event.host, event)
    named = [
        event
        for event in failed
        if signatures()[event.signature].mode in ("firewall-no-route", "container-network-unreachable")
    ]
    blamed = next((rank for event in (named or failed) if (rank := rank_of(event, case)) is not None), None)
    wrong = [event for event in used if event.fields["interface"].startswith(BRIDGES) or event.fields["interface"] == "lo"]
    if wrong and len({event.host for event in used if event.host}) > 1:
        # where some hosts took another one, the ranks that took it are to blame, not the one that could not reach them
        own = {rank for event in wrong if (rank := rank_of(event, case)) is not None}
        apart = {event.host for event in used if event.host} - {event.host for event in wrong}
        rank = blamed if blamed is not None and not (own and apart) else min(own, default=None)
        because = f"NCCL took the interface {wrong[0].fields['interface']}"
        yield _unreachable("wrong-socket-interface", 0.93, because, wrong[:2], named or failed, rank)
        return
    twice = next((list(found.values()) for found in hosts.values() if len(found) > 1), [])
    if twice:
        yield _unreachable(
            "container-network-unreachable", 0.92, "Several hosts advertise the same address", twice, named or failed, blamed
        )


def _no_server(case: Case) -> Iterator[Finding]:
    """Every node waits as a client for the store: the one that was to serve it did not know that it was meant."""
    failed = case.of("store-connect-failed")
    asked = [int(event.fields["count"]) for event in case.of("nodes-asked")]
    places = {event.host or event.line.artifact.name: event for event in reversed(failed)}
    if not asked or max(asked) < 2 or len(places) < max(asked):
        return
    yield Finding(
        mode="rendezvous-host-mismatch",
        analyst="placement",
        likelihood=0.84,
        because=f"All {len(places)} nodes tried to connect to the store and none served it: no node took the endpoint for its own.",
        first="all",
        evidence=_quotes(list(places.values())[:4], "cause"),
        not_proven="which node the endpoint was meant to name",
    )


def _unreachable(
    mode: str, likelihood: float, because: str, shown: Sequence[Event], failed: Sequence[Event], first: int | None
) -> Finding:
    return Finding(
        mode=mode,
        analyst="placement",
        likelihood=likelihood,
        because=f"{because} ({shown[0].fields['address']}), which other hosts cannot reach.",
        first=first,
        suspects=() if first is None else (first,),
        host=failed[0].host,
        at_ns=failed[0].t_ns,
        evidence=(*_quotes(shown[:2], "cause"), *_quotes(failed[:2], "cause")),
        not_proven="which interface all hosts share",
    )


def _quotes(events: Sequence[Event], role: str) -> tuple[Quote, ...]:
    return tuple(
        quote(event.line, "cause" if role == "cause" else "confirm" if role == "confirm" else "effect") for event in events
    )
