"""Slurm: the variables of the *step* that srun made. Those of the job describe the allocation, which may be larger.

A batch script outside srun, and `salloc` before it, have no step and make no claim.
Source: srun(1), "OUTPUT ENVIRONMENT VARIABLES" (22.05), and `srun -n4 env`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from dtprobe.framework.bootstrap.placement import Partial, Placement, PlacementError, meeting_point, read, whole_number

_ALL = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_STEP_NUM_NODES")

_RANGE = r"\d+(?:-\d+)?"
_ITEM = rf"(?:[^,\[\]\s]|\[{_RANGE}(?:,{_RANGE})*\])+"
_MOST = 100_000


def claim(environ: Mapping[str, str]) -> Placement | Partial | None:
    procid, tasks, local_id, node_id, nodes = (whole_number(environ, name) for name in _ALL)
    seen = read(environ, *_ALL, "SLURM_JOB_ID", "SLURM_STEP_ID")
    if tasks is None and not procid:
        return None  # a batch script is process 0 of no step
    hosts = environ.get("SLURM_STEP_NODELIST")
    if procid is None or tasks is None or local_id is None or node_id is None or nodes is None or not hosts:
        missing = [name for name in (*_ALL, "SLURM_STEP_NODELIST") if not environ.get(name)]
        return Partial("slurm", procid, tasks, tuple(missing), seen)
    names = list(node_names(hosts))
    per_node = list(tasks_per_node(environ.get("SLURM_STEP_TASKS_PER_NODE", "")))
    if len(names) != nodes or (per_node and (len(per_node) != nodes or sum(per_node) != tasks)):
        raise PlacementError(
            f"slurm: a step of {tasks} tasks on {nodes} nodes does not fit SLURM_STEP_NODELIST={hosts}, "
            f"SLURM_STEP_TASKS_PER_NODE={environ.get('SLURM_STEP_TASKS_PER_NODE')}",
            "the variables of two steps are mixed: start the program with srun, without --export of SLURM variables",
        )
    job, step = environ.get("SLURM_JOB_ID"), environ.get("SLURM_STEP_ID")
    meeting = meeting_point(environ)
    return Placement(
        rank=procid,
        world_size=tasks,
        local_rank=local_id,
        local_world_size=per_node[node_id] if per_node and node_id < nodes else None,
        node_rank=node_id,
        nodes=nodes,
        master_addr=meeting.addr or names[0],
        master_port=meeting.port,
        source="slurm",
        run=f"slurm-{job}.{step}" if job and step else "",
        attempt=whole_number(environ, "SLURM_RESTART_COUNT") or 0,
        read=seen,
    )


def runs_inside(claim: Placement, outer: Placement | Partial, environ: Mapping[str, str]) -> bool:
    """srun leaves no sign of what it was started by."""
    return False


def node_names(text: str) -> Iterator[str]:
    """The hosts of a Slurm node list: `n[1-2,07],gpu[1-2]-b` is n1, n2, n07, gpu1-b, gpu2-b. Widths are kept."""
    if not re.fullmatch(rf"{_ITEM}(,{_ITEM})*", text):
        raise PlacementError(f"slurm: {text!r} is no node list", "compare with `scontrol show hostnames`")
    for found in re.finditer(_ITEM, text):
        yield from _expanded(found.group())


def _expanded(item: str) -> Iterator[str]:
    found = re.search(r"\[([^\]]+)\]", item)
    if not found:
        yield item
        return
    for part in found.group(1).split(","):
        low, _, high = part.partition("-")
        if int(high or low) - int(low) > _MOST:
            raise PlacementError(f"slurm: {item!r} names more than {_MOST} nodes", "compare with `scontrol show hostnames`")
        for number in range(int(low), int(high or low) + 1):
            yield from _expanded(f"{item[: found.start()]}{number:0{len(low)}d}{item[found.end() :]}")


def tasks_per_node(text: str) -> Iterator[int]:
    """Tasks of each node: `2(x3),1` is 2, 2, 2, 1."""
    for part in filter(None, text.split(",")):
        found = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if not found or int(found.group(2) or 1) > _MOST:
            raise PlacementError(f"slurm: SLURM_STEP_TASKS_PER_NODE={text!r} is malformed", "start the program with srun")
        yield from [int(found.group(1))] * int(found.group(2) or 1)
