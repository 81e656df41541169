"""What to collect next time: for each kind of evidence that was not among the artifacts, how to have it at the next failure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """A kind of evidence that was absent: what it would tell, and how to get it."""

    what: str
    tells: str
    how: str


_KNOWN: tuple[tuple[frozenset[str], Advice], ...] = (  # the kinds of files that make it needless
    (
        frozenset({"text"}),
        Advice(
            what="every rank's output",
            tells="the first exception, whoever printed it",
            how="torchrun --log-dir logs --redirects 3 --tee 3 ...",
        ),
    ),
    (
        frozenset({"flight-recorder"}),
        Advice(
            what="flight recorder dumps of all ranks",
            tells="which rank entered which collective, and who is behind (older torch: TORCH_NCCL_TRACE_BUFFER_SIZE and "
            "TORCH_NCCL_DEBUG_INFO_TEMP_FILE)",
            how="TORCH_FR_BUFFER_SIZE=2000 TORCH_NCCL_DUMP_ON_TIMEOUT=1 TORCH_FR_DUMP_TEMP_FILE=/shared/fr_rank_",
        ),
    ),
    (
        frozenset({"stacks", "pyspy-json"}),
        Advice(
            what="stacks of every rank while it hangs",
            tells="where each rank stands, and which one stands elsewhere; to be taken before the job is killed",
            how="py-spy dump --native --pid PID > rankN.txt",
        ),
    ),
    (
        frozenset({"kernel-log"}),
        Advice(
            what="the kernel log of each host",
            tells="Xid errors, the OOM killer, link and file system failures",
            how="journalctl -k -o short-iso-precise --since '-2 hours' > HOST.kernel.log",
        ),
    ),
    (
        frozenset({"nccl-log", "ras"}),
        Advice(
            what="NCCL's own log",
            tells="which network and GPUs each rank uses, and NCCL's first warning",
            how="NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=INIT,ENV,NET NCCL_DEBUG_FILE=/shared/nccl.%h.%p.log",
        ),
    ),
    (
        frozenset(),  # it comes as lines of any text
        Advice(
            what="the scheduler's word on how each rank ended",
            tells="preemption, time limits, memory limits, lost nodes (Kubernetes: kubectl describe pod POD)",
            how="sacct -j JOB -o JobID,State,ExitCode,NodeList,MaxRSS,Reason",
        ),
    ),
)


def to_collect(read: Mapping[str, int]) -> tuple[Advice, ...]:
    """What was absent among the kinds of files that were `read`."""
    present = {kind for kind, count in read.items() if count}
    return tuple(advice for kinds, advice in _KNOWN if not kinds & present)
