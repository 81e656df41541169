"""Ring files as the shim writes them, and as accidents and enemies leave them."""

from __future__ import annotations

import os
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dtprobe.readers.artifact import ReaderError
from dtprobe.readers.nccl_ring import SCHEMA, read_nccl_header, read_nccl_ring

HEADER_BYTES, ENTRY_BYTES = 12800, 128
NONE = -(2**31)
NAMES = [("ncclCommInitRank", "i"), ("ncclAllReduce", "c"), ("ncclSend", "p"), ("ncclGroupEnd", "g")]


def header(*, entries=4, version=1, header_bytes=HEADER_BYTES, entry_bytes=ENTRY_BYTES, faults=1, calls=4, rank=3, flags=0):
    """`struct ring_header` of injectors/nccl/shim.h, packed independently of the reader."""
    fixed = struct.pack(
        "<8sIIIIiiQqQQiIII48x64s832s",
        *(
            b"DTPNCCL1",
            version,
            header_bytes,
            entry_bytes,
            entries,
            77,
            rank,
            1000,
            5_000_000,
            9,
            2,
            22809,
            faults,
            calls,
            flags,
        ),
        *(b"node1", b"/opt/libnccl.so.2"),
    )
    called = struct.pack("<64Q", 1, 2, *[0] * 62)
    fired = struct.pack("<64Q", 1, *[0] * 63)
    matched = struct.pack("<64Q", 5, *[0] * 63)
    names = b"".join(name.encode().ljust(31, b"\0") + kind.encode() for name, kind in NAMES).ljust(64 * 32, b"\0")
    labels = b"nccl:drop,rank=3".ljust(64 * 128, b"\0")
    return fixed + called + fired + matched + names + labels


def entry(
    ticket, *, state=3, call=1, enter=2000, leave=3000, count=8, comm=0xAB, seq=1, asked=0, result=0, dtype=7, root=NONE, op=0,
    fault=-1, group=0,
):  # fmt: skip
    """`struct ring_entry` of injectors/nccl/shim.h."""
    return struct.pack(
        "<7QqI9iI20x",
        *(ticket << 2 | state, enter, leave, count, 0x7F00, comm, seq, asked),
        *(call, result, 2, 1, 0, dtype, root, op, 88, fault, group),
    )


def written(tmp_path, *entries, name="nccl-77.ring", **fields):
    path = tmp_path / name
    path.write_bytes(header(entries=max(4, len(entries)), **fields) + b"".join(entries).ljust(4 * ENTRY_BYTES, b"\0"))
    return path


def test_the_samples_have_the_layout_s_size():
    assert len(header()) == HEADER_BYTES and len(entry(1)) == ENTRY_BYTES


def test_a_call_becomes_a_row(tmp_path):
    path = written(tmp_path, entry(1, fault=0, asked=16))
    frame = SCHEMA.check(read_nccl_ring(path))
    assert frame.iloc[0].drop(["root", "peer"]).to_dict() == {
        "t_ns": 5_002_000, "host": "node1", "rank": 3, "pid": 77, "tid": 88, "source": str(path), "kind": "collective",
        "call": "ncclAllReduce", "comm": "00000000000000ab", "comm_index": 0, "seq": 1, "nranks": 2, "comm_rank": 1, "count": 8,
        "dtype": "float32", "redop": "sum", "stream": "0x7f00",
        "result": "ncclSuccess", "in_group": False, "duration_s": 1e-6, "in_flight": False, "fired": "nccl:drop,rank=3", "asked": 16,
    }  # fmt: skip
    assert frame[["root", "peer"]].isna().all(axis=None)


def test_a_call_under_way_has_neither_result_nor_duration(tmp_path):
    frame = read_nccl_ring(written(tmp_path, entry(1), entry(2, state=2, enter=4000, leave=0, result=NONE, seq=2)))
    assert frame["in_flight"].tolist() == [False, True]
    assert frame.iloc[1][["result", "duration_s"]].isna().all()


def test_a_peer_is_not_a_root(tmp_path):
    frame = read_nccl_ring(written(tmp_path, entry(1, call=2, root=1), entry(2, call=1, root=1, enter=4000)))
    assert frame["peer"].fillna(-1).tolist() == [1, -1] and frame["root"].fillna(-1).tolist() == [-1, 1]


def test_rows_are_in_the_order_of_their_beginning_however_the_ring_has_turned(tmp_path):
    frame = read_nccl_ring(
        written(tmp_path, entry(5, enter=5000), entry(6, enter=6000), entry(3, enter=3000), entry(4, enter=4000))
    )
    assert frame["t_ns"].is_monotonic_increasing and len(frame) == 4


def test_an_entry_that_stays_half_written_is_left_out_and_counted(tmp_path):
    problems = []
    frame = read_nccl_ring(written(tmp_path, entry(1), entry(2, state=1)), problems=problems)
    assert len(frame) == 1
    assert any("1 entries were being written" in problem.text for problem in problems)


def test_calls_that_found_no_room_are_said(tmp_path):
    problems = []
    read_nccl_ring(written(tmp_path, entry(1)), problems=problems)
    assert [problem.text for problem in problems] == ["2 calls found no room in the ring"]


def test_the_ring_s_own_rank_counts_before_the_folder_s_and_the_caller_s_before_both(tmp_path):
    folder = tmp_path / "rank6"
    folder.mkdir()
    path = written(folder, entry(1), rank=-1)
    assert read_nccl_ring(path)["rank"].tolist() == [6]
    assert read_nccl_ring(written(folder, entry(1)))["rank"].tolist() == [3]
    assert read_nccl_ring(path, rank=1)["rank"].tolist() == [1]


def test_values_that_are_not_known_keep_their_numbers(tmp_path):
    frame = read_nccl_ring(written(tmp_path, entry(1, dtype=99, op=7, result=42)))
    assert frame.iloc[0][["dtype", "redop", "result"]].tolist() == ["99", "7", "42"]


def test_the_header_says_what_the_process_did(tmp_path):
    one = read_nccl_header(written(tmp_path, flags=1 | 4))
    assert one.called == {"ncclCommInitRank": 1, "ncclAllReduce": 2}
    assert (one.matched, one.fired) == ({"nccl:drop,rank=3": 5}, {"nccl:drop,rank=3": 1})
    assert (one.pid, one.rank, one.host, one.library, one.lost) == (77, 3, "node1", "/opt/libnccl.so.2", 2)
    assert one.plan_refused and one.forked and not one.exited


def test_a_ring_without_calls_is_an_empty_frame(tmp_path):
    assert SCHEMA.check(read_nccl_ring(written(tmp_path))).empty


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"version": 2}, "version 2"),
        ({"header_bytes": 64}, "this reader knows"),
        ({"entry_bytes": 0}, "0 bytes"),
        ({"faults": 65}, "damaged"),
        ({"calls": 2**32 - 1}, "damaged"),
    ],
)
def test_another_layout_is_refused_in_one_line(tmp_path, fields, words):
    with pytest.raises(ReaderError, match=words) as told:
        read_nccl_ring(written(tmp_path, entry(1), **fields))
    assert "\n" not in str(told.value)


@pytest.mark.parametrize("many", [0, 2**20 + 1, 2**32 - 1])
def test_an_impossible_number_of_entries_is_refused(tmp_path, many):
    path = tmp_path / "nccl-1.ring"
    path.write_bytes(header(entries=many) + entry(1))
    with pytest.raises(ReaderError):
        read_nccl_ring(path)


@pytest.mark.parametrize("kept", [0, 7, 100, HEADER_BYTES - 1])
def test_a_cut_header_is_refused(tmp_path, kept):
    path = tmp_path / "nccl-1.ring"
    path.write_bytes((header() + entry(1))[:kept])
    with pytest.raises(ReaderError):
        read_nccl_ring(path)


def test_of_a_cut_file_the_whole_entries_are_read(tmp_path):
    path = tmp_path / "nccl-1.ring"
    path.write_bytes((header() + entry(1) + entry(2, enter=9000))[:-5])
    problems = []
    assert len(read_nccl_ring(path, problems=problems)) == 1
    assert any(problem.kind == "cut" and "1 of 4 entries" in problem.text for problem in problems)


@pytest.mark.parametrize("kind", ["missing", "folder", "fifo", "other"])
def test_what_is_no_ring_is_refused(tmp_path, kind):
    path = tmp_path / "x.ring"
    if kind == "folder":
        path.mkdir()
    elif kind == "fifo":
        os.mkfifo(path)
    elif kind == "other":
        path.write_text("{}" * 10000)
    with pytest.raises(ReaderError):
        read_nccl_ring(path)


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_any_damage_gives_a_conforming_frame_or_a_reader_error(tmp_path_factory, data):
    whole = bytearray(header() + b"".join(entry(ticket, seq=ticket, fault=0) for ticket in range(1, 5)))
    for _ in range(data.draw(st.integers(1, 8))):
        at = data.draw(st.integers(0, len(whole) - 1))
        patch = data.draw(st.binary(min_size=1, max_size=16))
        whole[at : at + len(patch)] = patch
    path = tmp_path_factory.getbasetemp() / f"damaged-{os.getpid()}.ring"
    path.write_bytes(bytes(whole[: data.draw(st.integers(0, len(whole)))] if data.draw(st.booleans()) else whole))
    try:
        SCHEMA.check(read_nccl_ring(path))
        read_nccl_header(path)
    except ReaderError:
        pass
    finally:
        path.unlink()
