"""Flight Recorder dumps: torch's own of this machine, older versions made up, damaged and hostile ones."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from dtprobe.readers import flight_recorder
from dtprobe.readers.artifact import Problem, ReaderError
from dtprobe.readers.flight_recorder import GROUPS, SCHEMA, Dump, members, read_dump, read_flight_recorder

CORPUS = Path(__file__).parents[1] / "corpus" / "flight_recorder"


def entry(**changes: Any) -> dict[str, Any]:
    return {
        "record_id": 0, "pg_id": 0, "process_group": ("0", "default_pg"), "collective_seq_id": 1, "p2p_seq_id": 0, "op_id": 1,
        "profiling_name": "nccl:all_reduce", "time_created_ns": 1_790_000_000_000_000_000, "input_sizes": [[4, 3]], "input_dtypes": ["Float"],
        "output_sizes": [[4, 3]], "output_dtypes": ["Float"], "state": "completed", "time_discovered_started_ns": 1_790_000_000_000_000_001,
        "time_discovered_completed_ns": 1_790_000_000_000_000_002, "retired": True, "timeout_ms": 600_000, "is_p2p": False,
    } | changes  # fmt: skip


def read(tmp_path: Path, value: Any, name: str = "nccl_trace_rank_0") -> tuple[Dump, list[Problem]]:
    path = tmp_path / name
    path.write_bytes(value if isinstance(value, bytes) else pickle.dumps(value, 2))
    problems: list[Problem] = []
    dump = read_dump(path, problems=problems)
    SCHEMA.check(dump.collectives)
    GROUPS.check(dump.groups)
    return dump, problems


@pytest.mark.parametrize("name", ["gloo_trace_rank_0", "gloo_trace_rank_0.json", "gloo_frames_rank_0"])
def test_torchs_own_dump_of_gloo(name: str) -> None:
    frame = read_flight_recorder(CORPUS / name)
    assert frame["op"].tolist() == ["all_reduce", "broadcast"] * 3 + ["all_reduce"]
    assert frame["group"].tolist() == ["0", "1"] * 3 + ["0"]
    assert frame["group_desc"].tolist() == ["default_pg", "data"] * 3 + ["default_pg"]
    assert frame["seq"].tolist() == [1, 1, 2, 2, 3, 3, 4]
    assert frame["sizes"].tolist() == ["[[4,3]]", "[[2]]"] * 3 + ["[[5]]"]
    assert frame["retired"].tolist() == [True] * 6 + [False]
    assert set(frame["backend"]) == {"gloo"} and set(frame["kind"]) == {"collective"} and set(frame["rank"]) == {0}
    assert frame["t_started_ns"].isna().all() and frame["t_completed_ns"].isna().all()
    assert frame["t_ns"].is_monotonic_increasing and (frame["t_ns"] > 1_700_000_000_000_000_000).all()


def test_pickle_and_json_of_one_moment_say_the_same() -> None:
    frames = [read_flight_recorder(CORPUS / f"gloo_trace_rank_1{end}") for end in ("", ".json")]
    pd.testing.assert_frame_equal(*(frame.drop(columns="source") for frame in frames))


def test_the_call_site_is_the_innermost_frame_outside_torch() -> None:
    frame = read_flight_recorder(CORPUS / "gloo_frames_rank_0")
    assert frame["call_site"].str.fullmatch(r"\S*collectives\.py:\d+ <module>").all()
    assert frame["frames"].str.startswith("all_reduce (").sum() == 4
    assert frame["frames"].str.contains("distributed_c10d.py").all()


def test_gloos_broken_configuration_is_rebuilt_from_the_entries_of_all_ranks() -> None:
    dumps = [read_dump(CORPUS / f"gloo_trace_rank_{rank}") for rank in (0, 1)]
    groups = dumps[0].groups
    assert groups["group"].tolist() == ["0", "1"]
    assert groups["group_desc"].tolist() == ["default_pg", "data"]
    assert not groups["listed"].any() and groups["ranks"].isna().all()
    assert groups["last_enqueued"].tolist() == [4, 3]
    assert groups["last_completed"].tolist() == [3, 3]
    assert groups["last_started"].isna().all()
    assert members(pd.concat([dump.collectives for dump in dumps])) == {"0": (0, 1), "1": (0, 1)}


def test_a_listed_configuration_is_kept(tmp_path: Path) -> None:
    config = {
        "0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1, 2]"},
        "7": {"name": "7", "desc": "mesh_tp", "ranks": "[1, 2]"},
    }
    status = {"0": {"last_enqueued_collective": 5, "last_started_collective": -1, "last_completed_collective": 4}}
    dump, _ = read(
        tmp_path,
        {"version": "2.10", "pg_config": config, "pg_status": status, "comm_lib_version": "2.28.9", "entries": [entry()]},
    )
    assert dump.groups[["group", "ranks", "listed"]].values.tolist() == [["0", "[0, 1, 2]", True], ["7", "[1, 2]", True]]
    assert dump.groups["last_enqueued"].tolist()[0] == 5 and pd.isna(dump.groups["last_enqueued"][1])
    assert set(dump.groups["comm_version"]) == {"2.28.9"}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("nccl:send 0->3", ("nccl", "send", 0, 3)),
        ("nccl2:recv 5<-4", ("nccl2", "recv", 4, 5)),
        ("gloo:all_reduce", ("gloo", "all_reduce", None, None)),
        ("xccl:something_new_fp8", ("xccl", "something_new_fp8", None, None)),
        ("all_gather", (None, "all_gather", None, None)),
        (None, (None, None, None, None)),
    ],
)
def test_any_backend_and_operation_is_read(tmp_path: Path, name: str | None, expected: tuple) -> None:
    frame = read(tmp_path, {"version": "9.1", "entries": [entry(profiling_name=name, is_p2p=expected[2] is not None)]})[
        0
    ].collectives
    row = frame.astype(object).where(frame.notna(), None).iloc[0]
    assert (row["backend"], row["op"], row["src"], row["dst"]) == expected
    assert row["kind"] == ("p2p" if expected[2] is not None else "collective")
    assert row["version"] == "9.1"


def test_older_names_of_fields_are_known(tmp_path: Path) -> None:
    old = {
        "seq_id": 4,
        "pg_id": 0,
        "process_group": "default",
        "profiling_name": "nccl:all_reduce",
        "time_created_us": 1_700_000_000_000_000,
        "state": "started",
    }
    for value in ([old], {"version": "1.1", "entries": [old]}):
        row = read(tmp_path, value)[0].collectives.iloc[0]
        assert (row["seq"], row["group"], row["t_ns"], row["state"]) == (4, "default", 1_700_000_000_000_000_000, "started")
        assert pd.isna(row["group_desc"]) and pd.isna(row["retired"])


def test_values_of_odd_types_are_null_not_fatal(tmp_path: Path) -> None:
    odd = entry(
        time_created_ns="now",
        collective_seq_id=1 << 80,
        op_id=True,
        process_group=None,
        input_sizes=[["x"]],
        output_sizes=[[1 << 80]],
        state=3,
        frames=[1, {}],
        input_dtypes="Float",
        retired=0,
    )
    dump, problems = read(tmp_path, {"version": 2, "entries": [odd, "no entry", {}, entry()]})
    row = dump.collectives.iloc[0]
    for name in ("t_ns", "seq", "op_id", "group", "sizes", "out_sizes", "state", "dtypes", "retired", "version"):
        assert pd.isna(row[name]), name
    assert len(dump.collectives) == 2
    assert [(one.kind, one.text) for one in problems] == [("noise", "2 of 4 entries are not records")]


def test_shared_lists_do_not_multiply(tmp_path: Path) -> None:
    shapes = [[1 << 40] * 8] * 100_000
    frame = {"name": "f" * 1000, "filename": "g", "line": 1}
    dump, problems = read(
        tmp_path, {"version": "2.10", "entries": [entry(input_sizes=shapes, frames=[frame] * 100_000)] * 100_000}
    )
    assert [one.kind for one in problems] == ["refused"]
    assert dump.collectives["sizes"].str.len().max() == flight_recorder.MAX_TEXT
    assert dump.collectives["frames"].str.len().max() == flight_recorder.MAX_TEXT


def test_of_a_cut_pickle_the_complete_entries_are_read(tmp_path: Path) -> None:
    whole = pickle.dumps(
        {"version": "2.10", "pg_config": {}, "entries": [entry(op_id=at, record_id=at) for at in range(20)]}, 2
    )
    counts = set()
    for at in range(200, len(whole), 7):
        try:
            dump, problems = read(tmp_path, whole[:at])
        except ReaderError:
            continue
        assert [one.kind for one in problems] == ["cut"]
        assert dump.collectives["op_id"].tolist() == list(range(len(dump.collectives)))
        assert dump.collectives["retired"].notna().all() and (dump.collectives["version"] == "2.10").all()
        counts.add(len(dump.collectives))
    assert counts >= set(range(1, 19))


def test_of_cut_json_the_complete_entries_are_read(tmp_path: Path) -> None:
    text = (CORPUS / "gloo_trace_rank_0.json").read_text()
    dump, problems = read(tmp_path, text[: len(text) // 2].encode(), "fr-0.json")
    assert 1 <= len(dump.collectives) < 7 and [one.kind for one in problems] == ["cut"]
    assert dump.collectives["seq"].tolist() == [1, 1, 2, 2, 3, 3, 4][: len(dump.collectives)]


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"", "is empty"),
        (b"\x80\x02cposix\nsystem\nX\x02\x00\x00\x00ls\x85R.", r"refused: it asks for posix\.system"),
        (pickle.dumps({"a": 1}, 2), "no list of entries"),
        (pickle.dumps(3, 2), "holds int"),
        (b"1", "holds int"),
        (b'{"ras": []}', "no list of entries"),
        (b"\x7fELF\x00\x01", "not a Flight Recorder dump"),
        (b"[" * 200_000, "nested too deeply"),
    ],
    ids=["empty", "code", "other pickle", "number", "json number", "other json", "binary", "nested"],
)
def test_what_is_no_dump_is_one_clear_line(tmp_path: Path, data: bytes, text: str) -> None:
    with pytest.raises(ReaderError, match=text) as caught:
        read(tmp_path, data)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "rank"),
    [
        ("nccl_trace_rank_12", 12),
        ("node01/_dump_9", 9),
        ("fr_end_1.json", 1),
        ("rank4/fr-0.json", 4),
        ("comm_lib_trace_rank_3", 3),
        ("dump", None),
    ],
)
def test_the_rank_is_in_the_name(tmp_path: Path, name: str, rank: int | None) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    data = json.dumps({"version": "2.10", "entries": [entry()]}).encode()
    found = read(tmp_path, data, name)[0].collectives["rank"][0]
    assert found == rank if rank is not None else pd.isna(found)
