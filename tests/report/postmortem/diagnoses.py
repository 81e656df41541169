"""Diagnoses made up for the tests of the report: each a kind of answer that people get."""

from __future__ import annotations

from dtprobe.diagnose.case import Finding, Quote
from dtprobe.diagnose.diagnosis import HEALTHY, UNDETERMINED, Diagnosis, Moment, Operation, Waiting

T0 = 1_790_000_000 * 10**9
"""2026-09-21, 14:13:20 UTC."""
MS, S, MIN, HOUR = 10**6, 10**9, 60 * 10**9, 3600 * 10**9


def lost_gpu() -> Diagnosis:
    """A GPU falls off the bus on one of two hosts; half an hour later the watchdogs of the others cry."""
    return Diagnosis(
        failure_mode="gpu-fell-off-bus",
        group="device",
        locus="device",
        first_failing_rank=3,
        host="node-b",
        suspects=(3,),
        confidence=0.93,
        because="the kernel of node-b lost GPU 0000:c1:00.0, on which rank 3 ran, 31 minutes before the first watchdog spoke",
        evidence=(
            Quote(file="node-b/kernel.log", line=8812, text="NVRM: Xid (PCI:0000:c1:00): 79, pid=4711, GPU has fallen off the bus.", role="cause"),
            Quote(file="node-b/rank3.log", line=120, text="[rank3]: RuntimeError: CUDA error: unspecified launch failure", role="confirm"),
            Quote(
                file="node-a/rank0.log",
                line=2201,
                text="[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=812, OpType=ALLREDUCE, NumelIn=1048576) ran for 1800024 milliseconds before timing out.",
                role="effect",
            ),
        ),
        missing=("node-b/rank2.log: cut in the middle of a line", "flight recorder dump of rank 3"),
        fix="Drain the node, reset or power-cycle the GPU, and have the card, its riser, power and cooling checked before it is used again.",
        scenario=None,
        timeline=(
            Moment(t_ns=T0 - 40 * S, text="init_process_group done, 4 ranks", rank=0, host="node-a", file="node-a/rank0.log", line=12),
            Moment(t_ns=T0 - 6 * S, text="temperature of 0000:c1:00.0 is 94 C", host="node-b", file="node-b/kernel.log", line=8800, uncertainty_ns=2 * S),
            Moment(t_ns=T0, text="Xid 79, GPU has fallen off the bus", rank=3, host="node-b", file="node-b/kernel.log", line=8812, uncertainty_ns=2 * S),
            Moment(t_ns=T0 + 1200 * MS, text="CUDA error: unspecified launch failure", rank=3, host="node-b", file="node-b/rank3.log", line=120, uncertainty_ns=40 * MS),
            Moment(t_ns=T0 + 1250 * MS, text="process exits with code 1", rank=3, host="node-b"),
            Moment(t_ns=T0 + 31 * MIN, text="watchdog: ALLREDUCE 812 timed out after 1800 s", rank=0, host="node-a", file="node-a/rank0.log", line=2201),
            Moment(t_ns=T0 + 31 * MIN + 300 * MS, text="watchdog: ALLREDUCE 812 timed out after 1800 s", rank=1, host="node-a"),
            Moment(t_ns=T0 + 31 * MIN + 700 * MS, text="watchdog: ALLREDUCE 812 timed out after 1800 s", rank=2, host="node-b", uncertainty_ns=40 * MS),
            Moment(t_ns=T0 + 31 * MIN + 5 * S, text="elastic agent ends all workers", host="node-a"),
            Moment(t_ns=None, text="core dump of pid 4711 found", rank=3, host="node-b", file="node-b/cores.txt", line=1),
        ),
        waits=tuple(Waiting(rank=rank, awaits=3, operation="all_reduce #812", group="default_pg") for rank in (0, 1, 2)),
        operations=tuple(
            Operation(rank=rank, name="all_reduce", begin_ns=T0 - 35 * S + seq * 8 * S, end_ns=T0 - 33 * S + seq * 8 * S if seq < 4 else None, group="default_pg", seq=808 + seq)
            for rank in range(4)
            for seq in range(5)
            if (rank, seq) != (3, 4)
        ),
        ruled_out=(
            Finding(mode="nccl-cuda-error", analyst="direct", likelihood=0.8, because="rank 3 met a CUDA error inside NCCL: it follows from gpu-fell-off-bus.", first=3, host="node-b"),
            Finding(mode="collective-skipped", analyst="collectives", likelihood=0.4, because="rank 3 never enters all_reduce 812: it follows from gpu-fell-off-bus.", first=3),
            Finding(mode="packet-loss", analyst="direct", likelihood=0.1, because="a retransmission is told of on node-a: less likely (0.10) than gpu-fell-off-bus.", host="node-a"),
        ),
        read={"text": 7, "flight-recorder": 3, "empty": 1},
        not_proven="That the card is broken: a loose riser or a power supply does the same.",
    )  # fmt: skip


def deadlock() -> Diagnosis:
    """Two groups entered in opposite orders, seen by dumps only, no clock."""
    return Diagnosis(
        failure_mode="cross-communicator-deadlock",
        group="desync",
        locus="code",
        first_failing_rank="all",
        host=None,
        suspects=(0, 1),
        confidence=0.88,
        because="rank 0 holds tp and waits in dp, rank 1 holds dp and waits in tp",
        evidence=(Quote(file="fr_0.pickle", line=None, text="last entered: all_reduce 7 of dp", role="cause"),),
        missing=(),
        fix="Enter the groups in one order on every rank.",
        scenario="cross-communicator-deadlock",
        waits=(
            Waiting(rank=0, awaits=1, operation="all_reduce #7", group="dp"),
            Waiting(rank=1, awaits=0, operation="all_gather #3", group="tp"),
            Waiting(rank=2, awaits=0, operation="all_reduce #7", group="dp_1"),
            Waiting(rank=3, awaits=1, operation="all_reduce #7", group="dp_1"),
        ),
        read={"flight-recorder": 4},
    )


def big(ranks: int = 4096) -> Diagnosis:
    """One of very many ranks is absent from a collective."""
    return Diagnosis(
        failure_mode="collective-skipped",
        group="desync",
        locus="code",
        first_failing_rank=777,
        host="node-97",
        suspects=(777,),
        confidence=0.97,
        because=f"{ranks - 1:,} ranks are in all_reduce 41 of default_pg, rank 777 has completed 40 and entered no other",
        evidence=(Quote(file="fr_777.json", line=None, text='{"collective_seq_id": 40, "state": "completed"}', role="cause"),),
        missing=(),
        fix="Let every rank enter the collective.",
        scenario="collective-skipped",
        timeline=tuple(
            Moment(t_ns=T0 + rank * 17 * MS, text="watchdog: time-out", rank=rank, host=f"node-{rank // 8}") for rank in range(ranks)
        ),
        waits=tuple(
            Waiting(rank=rank, awaits=777, operation="all_reduce #41", group="default_pg") for rank in range(ranks) if rank != 777
        ),
        read={"flight-recorder": ranks},
    )  # fmt: skip


def undetermined() -> Diagnosis:
    return Diagnosis(
        failure_mode=UNDETERMINED,
        group="unknown",
        locus="unknown",
        first_failing_rank=None,
        host=None,
        suspects=(),
        confidence=0.31,
        because="every rank was ended by SIGTERM, and nothing says who sent it",
        evidence=(Quote(file="job.log", line=40, text="Sending process 4711 closing signal SIGTERM", role="effect"),),
        missing=("output of ranks 4-7",),
        fix="",
        scenario=None,
        ruled_out=(
            Finding(mode="slurm-preemption", analyst="exits", likelihood=0.31, because="all ranks ended by SIGTERM at once"),
        ),
        read={"text": 1},
    )


def healthy() -> Diagnosis:
    return Diagnosis(
        failure_mode=HEALTHY,
        group="healthy",
        locus="none",
        first_failing_rank=None,
        host=None,
        suspects=(),
        confidence=0.9,
        because="all 4 ranks ended well and no line tells of a failure",
        evidence=(),
        missing=(),
        fix="",
        scenario=None,
        read={"text": 4},
    )


def bare() -> Diagnosis:
    """Nothing but what must be there."""
    return Diagnosis(
        failure_mode="rank-lost",
        group="process",
        locus="process",
        first_failing_rank=None,
        host=None,
        suspects=(),
        confidence=0.5,
        because="",
        evidence=(),
        missing=(),
        fix="",
        scenario=None,
    )


NASTY = "<script>alert(1)</script> \x1b[31mred\x1b[0m \u202egnp.exe \u05d0\u05d1\u05d2 `x` | **b** [a](javascript:alert(1)) &amp; {{ 7*7 }} \x00\x07\udcff ]]> [bold]x[/bold] "
"""Markup of every kind that we print, escapes of terminals, text that runs backwards, half a character."""


def hostile() -> Diagnosis:
    """Every text comes from an enemy, and is long."""
    text = NASTY + "A" * 5000
    return Diagnosis(
        failure_mode="python-exception-one-rank",
        group="exception",
        locus="code",
        first_failing_rank=1,
        host=NASTY,
        suspects=(1, 2, 3),
        confidence=1.0,
        because=text,
        evidence=tuple(Quote(file=f"{NASTY}/a\nb.log", line=1, text=text, role=role) for role in ("cause", "effect", "confirm")),
        missing=(text,),
        fix=text,
        scenario="python-exception-one-rank",
        timeline=tuple(
            Moment(t_ns=T0 + at * at * S, text=text, rank=at % 3, host=NASTY if at % 2 else "h" * 300, file=NASTY, line=at, uncertainty_ns=at * S)
            for at in range(9)
        ),
        waits=(Waiting(rank=0, awaits=1, operation=text, group=text), Waiting(rank=2, awaits=2, operation="", group="")),
        operations=(Operation(rank=2, name=text, begin_ns=T0, end_ns=T0 - 5, group=text, seq=-1, state=text),),
        ruled_out=(Finding(mode="sigabrt", analyst="a", likelihood=0.2, because=text, host=NASTY),),
        read={NASTY: 1, "text": 3},
        not_proven=text,
    )  # fmt: skip


ALL = {one.__name__: one for one in (lost_gpu, deadlock, big, undetermined, healthy, bare, hostile)}
