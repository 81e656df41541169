"""NCCL's log and stacks of small jobs, in the wordings of the software."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import pytest

Calls = Mapping[int, Sequence[str]]
MakeLogs = Callable[..., dict[str, list[str]]]
COMMS = {"W": "0x5500aa11", "A": "0x6600aa11", "B": "0x7700aa11"}


@pytest.fixture
def nccl_logs() -> MakeLogs:
    """`nccl_logs({0: ["W AllReduce 64", "A Broadcast 8 root=1"], 1: [...]})`: a log with communicators made and calls, a file a rank.

    A call is its communicator, name and count, then what differs from float32, sum and root 0.
    """

    def make(calls: Calls, *, made: Sequence[str] = ("W",)) -> dict[str, list[str]]:
        return {f"nccl.{900 + rank}.log": _log(rank, len(calls), made, own) for rank, own in calls.items()}

    return make


def _log(rank: int, ranks: int, made: Sequence[str], calls: Sequence[str]) -> list[str]:
    head = f"box:{900 + rank}:{950 + rank} [{rank}] NCCL INFO "
    lines = [head + "NCCL version 2.27.3+cuda12.9"]
    for number, name in enumerate(made):
        about = f"comm 0x{number + 1}f{rank} rank {rank} nranks {ranks} cudaDev {rank} nvmlDev {rank} busId {rank + 1}b000 commId {COMMS[name]}"
        lines += [head + f"{about} - Init START", head + f"{about} - Init COMPLETE"]
    for call in calls:
        comm, name, count, *more = call.split()
        fields = {"datatype": "7", "op": "0", "root": "0"} | dict(one.split("=") for one in more)
        lines.append(
            head
            + f"{name}: opCount 0 sendbuff 0x1 recvbuff 0x2 count {count} datatype {fields['datatype']} op {fields['op']} root {fields['root']}"
            f" comm 0x{list(made).index(comm) + 1}f{rank} [nranks={ranks}] stream 0x3"
        )
    return lines
