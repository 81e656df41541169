"""Lines of NCCL's log, in the wordings of several releases."""

from __future__ import annotations

import pytest

from dtprobe.readers import nccl_log


@pytest.mark.parametrize(
    ("line", "where", "level"),
    [
        ("node7:812:990 [3] NCCL INFO Connected all rings", None, "INFO"),
        ("[2026-03-01 10:11:12] node7:812:990 [3] transport/net.cc:20 NCCL WARN net failed", "transport/net.cc:20", "WARN"),
        ("[1,3]<stdout>:node7:812:990 [3] misc/socket.cc:5 NCCL WARN no answer", "misc/socket.cc:5", "WARN"),
    ],
)
def test_the_prefix_tells_host_process_and_place(line: str, where: str | None, level: str) -> None:
    found = nccl_log.split(line)
    assert found is not None
    assert (found.host.rpartition(":")[2], found.pid, found.tid, found.where, found.level) == ("node7", 812, 990, where, level)


@pytest.mark.parametrize(
    ("text", "comm_id", "phase"),
    [
        ("comm 0x7f12 rank 2 nranks 4 cudaDev 2 busId 3b000 - Init COMPLETE", None, "Init COMPLETE"),
        ("comm 0x7f12 rank 2 nranks 4 cudaDev 2 nvmlDev 2 busId 3b000 commId 0xabc1 - Init START", "0xabc1", "Init START"),
        (
            "ncclCommInitRankConfig comm 0x7f12 rank 2 nranks 4 cudaDev 2 nvmlDev 2 busId 3b000 commId 0xabc1 - Init COMPLETE",
            "0xabc1",
            "Init COMPLETE",
        ),
        ("comm 0x7f12 rank 2 nRanks 4 cudaDev 2 busId 3b000 - Abort START", None, "Abort START"),
    ],
)
def test_a_communicator_s_life(text: str, comm_id: str | None, phase: str) -> None:
    made = nccl_log.making(text)
    assert made is not None
    assert (made.rank, made.nranks, made.bus, made.comm_id, made.phase) == (2, 4, "3b000", comm_id, phase)


def test_a_split_names_its_parent() -> None:
    made = nccl_log.making(
        "ncclCommSplit comm 0x9a rank 0 nranks 2 cudaDev 0 nvmlDev 0 busId 1a000 parent 0x7f12 splitCount 1 color 3 key 0- Init START"
    )
    assert made is not None and made.parent == "0x7f12"


def test_a_call_with_what_only_this_log_holds() -> None:
    call = nccl_log.call(
        "Broadcast: opCount 1f sendbuff 0x1 recvbuff 0x2 count 96 datatype 9 op 0 root 3 comm 0x7f12 [nranks=4] stream 0x5"
    )
    assert call is not None
    assert (call.name, call.op_count, call.count, call.root, call.comm) == ("Broadcast", 31, 96, 3, "0x7f12")
    assert str(call) == "Broadcast count 96 of bfloat16 root 3"


def test_other_lines_are_none() -> None:
    assert nccl_log.split("NCCL version 2.28.9+cuda13.0") is None
    assert nccl_log.call("Channel 00/24 : 0 1") is None
    assert nccl_log.making("Connected all trees") is None
    assert nccl_log.version("NCCL version 2.21.5+cuda12.4") == "2.21.5"


@pytest.mark.parametrize("more", ["", "acc (nil) ", "commName world "])
def test_a_call_is_read_by_the_words_of_its_fields(more: str) -> None:
    call = nccl_log.call(
        f"AllReduce: opCount 2e sendbuff 0x1 recvbuff 0x2 {more}count 96 datatype 7 op 2 root 0 comm 0x7f12 [nranks=4] stream 0x5"
    )
    assert call is not None
    assert (call.op_count, call.count, call.datatype, call.op, call.comm, call.nranks) == (46, 96, 7, 2, "0x7f12", 4)


def test_a_call_cut_before_its_communicator_is_none() -> None:
    assert nccl_log.call("AllReduce: opCount 2e sendbuff 0x1 recvbuff 0x2 count 96 datatype 7") is None
