"""What to collect next time: for each kind of evidence that was not among the artifacts, how to have it at the next failure."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """A kind of evidence that was absent: what it would tell, and how to get it."""

    what: str
    tells: str
    how: str


_KNOWN: tuple[tuple[frozenset[str], Advice], ...] = (
    (
        frozenset({"text", "log"}),
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
            tells="which rank entered which collective, and who is behind",
            how="TORCH_FR_BUFFER_SIZE=2000 TORCH_NCCL_DUMP_ON_TIMEOUT=1 TORCH_FR_DUMP_TEMP_FILE=/shared/fr_rank_ (before torch 2.9: "
            "TORCH_NCCL_TRACE_BUFFER_SIZE, TORCH_NCCL_DEBUG_INFO_TEMP_FILE)",
        ),
    ),
    (
        frozenset({"stacks", "pyspy", "py-spy", "gdb", "faulthandler"}),
        Advice(
            what="stacks of every rank while it hangs",
            tells="where each rank stands, and which one stands elsewhere",
            how="py-spy dump --native --pid PID > rankN.txt, before the job is killed",
        ),
    ),
    (
        frozenset({"kernel", "kernel-log", "journal", "dmesg"}),
        Advice(
            what="the kernel log of each host",
            tells="Xid errors, the OOM killer, link and file system failures",
            how="journalctl -k -o short-iso-precise --since '-2 hours' > HOST.kernel.log",
        ),
    ),
    (
        frozenset({"nccl", "nccl-log", "ras"}),
        Advice(
            what="NCCL's own log",
            tells="which network and GPUs each rank uses, and NCCL's first warning",
            how="NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=INIT,ENV,NET NCCL_DEBUG_FILE=/shared/nccl.%h.%p.log",
        ),
    ),
    (
        frozenset({"scheduler", "slurm", "kubernetes"}),
        Advice(
            what="the scheduler's word on how each rank ended",
            tells="preemption, time limits, memory limits, lost nodes",
            how="sacct -j JOB -o JobID,State,ExitCode,NodeList,MaxRSS,Reason, or kubectl describe pod",
        ),
    ),
)


def to_collect(read: Mapping[str, int], seen: Collection[str] = ()) -> tuple[Advice, ...]:
    """What was absent among the kinds of files that were `read` and the kinds of lines that were `seen` in them."""
    present = {kind for kind, count in read.items() if count} | set(seen)
    return tuple(advice for kinds, advice in _KNOWN if not kinds & present)
