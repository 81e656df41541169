"""Kubeflow's PyTorchJob: RANK and WORLD_SIZE of *pods*, MASTER_ADDR and MASTER_PORT, inside Kubernetes.

A pod that runs torchrun gets its claim from torchrun, which overwrites RANK. Several processes a pod need torchrun.
Source: kubeflow/training-operator, pkg/controller.v1/pytorch/envvar.go.
"""

from __future__ import annotations

from collections.abc import Mapping

from dtprobe.framework.bootstrap.launchers import torchrun
from dtprobe.framework.bootstrap.placement import Partial, Placement, PlacementError, meeting_point, read, whole_number

MARKERS = ("PET_NNODES", "PET_NODE_RANK", "PET_NPROC_PER_NODE")
_ALL = ("RANK", "WORLD_SIZE")


def claim(environ: Mapping[str, str]) -> Placement | Partial | None:
    if environ.get(torchrun.MARKER) or not is_pytorchjob(environ):
        return None
    rank, world_size = (whole_number(environ, name) for name in _ALL)
    meeting = meeting_point(environ)
    seen = read(environ, *_ALL, *MARKERS)
    if rank is None or world_size is None or meeting.addr is None or meeting.port is None:
        missing = [name for name in (*_ALL, "MASTER_ADDR", "MASTER_PORT") if not environ.get(name)]
        return Partial("pytorchjob", rank, world_size, tuple(missing), seen)
    per_pod = environ.get("PET_NPROC_PER_NODE", "")  # "auto" unless the job's author chose a number
    if per_pod.isdigit() and int(per_pod) > 1:
        raise PlacementError(
            f"pytorchjob: PET_NPROC_PER_NODE={per_pod} asks for torchrun, but this process was started without it",
            "let the pod's command be torchrun, or set nprocPerNode to 1",
        )
    pods, pod = environ.get("PET_NNODES", ""), environ.get("PET_NODE_RANK", "")
    if (pods.isdigit() and int(pods) != world_size) or (pod.isdigit() and int(pod) != rank):
        raise PlacementError(
            f"pytorchjob: rank {rank} of {world_size} does not fit {_shown(seen)}",
            "RANK or WORLD_SIZE was overwritten in the pod",
        )
    return Placement(
        rank=rank,
        world_size=world_size,
        local_rank=0,
        local_world_size=1,
        node_rank=rank,
        nodes=world_size,
        master_addr=meeting.addr,
        master_port=meeting.port,
        source="pytorchjob",
        run=f"{meeting.addr}:{meeting.port}",
        read=seen,
    )


def runs_inside(claim: Placement, outer: Placement | Partial, environ: Mapping[str, str]) -> bool:
    """Pods are the outermost level."""
    return False


def is_pytorchjob(environ: Mapping[str, str]) -> bool:
    """Whether the training operator prepared this pod; operators before 1.6 set no PET_ variables."""
    if not environ.get("KUBERNETES_SERVICE_HOST") or environ.get("JOB_COMPLETION_INDEX"):
        return False
    by_hand = environ.get("LOCAL_RANK") or environ.get("NODE_RANK")
    return any(environ.get(name) for name in MARKERS) or bool(
        environ.get("RANK") and environ.get("MASTER_ADDR") and not by_hand
    )


def _shown(seen: Mapping[str, str]) -> str:
    return ", ".join(f"{name}={value}" for name, value in seen.items())
