"""Dumps as columns: of every version, in parts, damaged and hostile ones; and the whole postmortem on real and made-up sets."""

from __future__ import annotations

import copy
import json
import pickle
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
from flight_jobs import Look, ddp, edited, frozen, mesh, run, without, write
from hypothesis import given, settings
from hypothesis import strategies as st

from dtprobe.diagnose import diagnose, intake
from dtprobe.diagnose.analysts.collectives.recording import gather, spans
from dtprobe.readers.artifact import Problem
from dtprobe.readers.flight_calls import read_calls
from dtprobe.readers.flight_columns import DONE, SCHEDULED, STARTED, Lane, RankCalls, Status, Tables

CORPUS = Path(__file__).parents[2] / "corpus" / "flight_recorder"


def entry(**changes: Any) -> dict[str, Any]:
    return {
        "record_id": 0, "pg_id": 0, "process_group": ("0", "default_pg"), "collective_seq_id": 1, "p2p_seq_id": 0, "op_id": 1,
        "profiling_name": "nccl:all_reduce", "time_created_ns": 1_790_000_000_000_000_000, "input_sizes": [[4, 3]],
        "input_dtypes": ["Float"], "output_sizes": [[4, 3]], "output_dtypes": ["Float"], "state": "completed",
        "time_discovered_started_ns": None, "time_discovered_completed_ns": None, "retired": True, "timeout_ms": 600_000, "is_p2p": False,
    } | changes  # fmt: skip


def read(tmp_path: Path, *entries: dict[str, Any], **more: Any) -> tuple[RankCalls, Tables]:
    path = tmp_path / "nccl_trace_rank_0"
    path.write_bytes(pickle.dumps({"version": "2.10", "entries": list(entries), **more}, 2))
    tables = Tables()
    return read_calls(path, tables, path.name), tables


def test_pickle_and_json_of_one_moment_say_the_same() -> None:
    tables = Tables()
    one, other = (read_calls(CORPUS / f"gloo_trace_rank_1{end}", tables, "x") for end in ("", ".json"))
    assert one.columns.keys() == other.columns.keys() == {Lane("0"), Lane("1")}
    for lane, column in one.columns.items():
        assert all(
            getattr(column, name) == getattr(other.columns[lane], name) for name in ("seq", "kind", "state", "created", "order")
        )
    assert one.status == other.status == {"0": Status(3, None, 3), "1": Status(3, None, 3)}


def test_the_parts_of_a_batch_are_as_its_end_is(tmp_path: Path) -> None:
    parts = [
        entry(profiling_name=f"nccl:{name}", is_p2p=True, p2p_seq_id=7, state="scheduled", retired=False)
        for name in ("send 0->1", "recv 0<-3")
    ]
    end = entry(profiling_name="nccl:coalesced", is_p2p=True, p2p_seq_id=7, input_sizes=[], duration_ms=1.5)
    calls, _ = read(tmp_path, *parts, end)
    assert {lane: (list(column.state), list(column.took)) for lane, column in calls.columns.items()} == {
        Lane("0", 0, 1): ([DONE], [1.5]),
        Lane("0", 3, 0): ([DONE], [1.5]),
    }


def test_collectives_of_one_batch_are_one_call(tmp_path: Path) -> None:
    parts = [entry(state="scheduled", retired=False, input_sizes=[[size]]) for size in (3, 5)]
    end = entry(profiling_name="nccl:coalesced", state="started", retired=False, input_sizes=[])
    calls, tables = read(tmp_path, *parts, end, entry(collective_seq_id=2))
    column = calls.columns[Lane("0")]
    assert (list(column.seq), list(column.state)) == ([1, 2], [STARTED, DONE])
    kind = tables.kinds[column.kind[0]]
    assert (kind.op, kind.ins) == ("coalesced all_reduce", (3, 5))


@pytest.mark.parametrize(
    "old",
    [
        {"pg_name": "0", "seq_id": 1, "time_created_us": 1_790_000_000_000_000},
        {"pg_name": ("0", "default_pg"), "seq_id": 1, "time_created_ns": 1_790_000_000_000_000_000},
        {"seq_id": 1, "time_created_ns": 1_790_000_000_000_000_000},
    ],
)
def test_the_names_of_older_versions(tmp_path: Path, old: dict[str, Any]) -> None:
    new = ("process_group", "collective_seq_id", "p2p_seq_id", "time_created_ns", "input_dtypes", "retired", "is_p2p")
    row = {key: value for key, value in entry().items() if key not in new} | old
    calls, tables = read(tmp_path, row)
    column = calls.columns[Lane("0")]
    assert (list(column.seq), list(column.state), list(column.created)) == ([1], [DONE], [1_790_000_000_000_000_000])
    assert tables.kinds[column.kind[0]].dtypes is None


def test_the_status_is_of_the_group_that_the_entries_tie_to_its_number(tmp_path: Path) -> None:
    last = {"last_enqueued_collective": 9, "last_started_collective": -1, "last_completed_collective": 8}
    calls, _ = read(tmp_path, entry(pg_id=3, process_group=("17", "tp")), pg_status={"3": last, "4": last})
    assert calls.status == {"17": Status(9, None, 8)}


def test_a_dump_without_entries_still_tells_how_far_its_groups_came(tmp_path: Path) -> None:
    last = {"last_enqueued_collective": 9, "last_started_collective": 9, "last_completed_collective": 9}
    calls, _ = read(tmp_path, pg_status={"0": last}, pg_config={"5": {"name": "5", "desc": "x", "ranks": "[0, 1]"}})
    assert calls.status == {"5": Status(9, 9, 9)}


def test_nonsense_in_entries_is_left_out(tmp_path: Path) -> None:
    rows: list[Any] = [
        entry(collective_seq_id="1"), entry(collective_seq_id=2**70), entry(process_group=None, pg_id=None), entry(profiling_name=[]),
        entry(time_created_ns=-1), entry(process_group=[]), {"a": 1}, entry(collective_seq_id=2, input_sizes="x", frames=[3, {}], state="scheduled", retired=None),
    ]  # fmt: skip
    calls, _ = read(tmp_path, *rows)
    assert [list(column.state) for column in calls.columns.values() if len(column)] == [[DONE, SCHEDULED]]


@pytest.mark.parametrize(
    "name", ["nccl_trace_rank_3", "_dump_3", "rank3/fr-0.json", "mine_3", "comm_lib_trace_rank_3.json", "node1/dump.rank3"]
)
def test_the_rank_is_in_the_name(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps({"entries": [entry()], "version": "2.10"}))
    with intake.taken([tmp_path]) as taken:
        recording = gather(taken.artifacts, [])
    assert recording is not None and list(recording.ranks) == [3]


def test_the_rank_of_a_nameless_dump_is_the_one_that_all_its_groups_share(tmp_path: Path) -> None:
    config = {
        name: {"name": name, "desc": "", "ranks": ranks}
        for name, ranks in (("0", "[0, 1, 2]"), ("1", "[1, 2]"), ("2", "[0, 2]"))
    }
    (tmp_path / "dump.bin").write_bytes(pickle.dumps({"entries": [entry()], "version": "2.10", "pg_config": config}, 2))
    with intake.taken([tmp_path]) as taken:
        recording = gather(taken.artifacts, [])
    assert recording is not None and list(recording.ranks) == [2] and recording.absent == (0, 1)


class Bomb:
    def __init__(self, marker: Path) -> None:
        self._marker = str(marker)

    def __reduce__(self) -> Any:
        return open, (self._marker, "w")


def test_a_hostile_dump_is_refused_never_run_and_its_rank_is_said_to_be_missing(tmp_path: Path) -> None:
    job = tmp_path / "job"
    paper = edited(ddp(6, 5), 4, without(13))
    write(job, paper, run(paper), Look())
    marker = tmp_path / "ran"
    (job / "nccl_trace_rank_2").write_bytes(pickle.dumps(Bomb(marker), 2))
    pickle.loads(pickle.dumps(Bomb(tmp_path / "proof"), 2)).close()  # noqa: S301 - what a plain load would do
    assert (tmp_path / "proof").exists()
    found = diagnose([job])
    assert not marker.exists()
    assert (found.failure_mode, found.first_failing_rank, found.suspects) == ("collective-skipped", 4, (4,))
    assert any("rank 2" in text for text in found.missing) and any("refused" in text for text in found.missing)


def test_an_empty_dump_is_of_a_rank_that_was_there(tmp_path: Path) -> None:
    paper = edited(ddp(6, 5), 1, frozen(13))
    write(tmp_path, paper, run(paper), Look(missing=(1,)))
    (tmp_path / "nccl_trace_rank_1").touch()
    problems: list[Problem] = []
    with intake.taken([tmp_path]) as taken:
        recording = gather(taken.artifacts, problems)
    assert recording is not None and list(recording.unread) == [1] and not recording.absent
    assert diagnose([tmp_path]).failure_mode == "undetermined"


def test_dumps_that_torch_wrote_name_the_rank_that_is_behind(tmp_path: Path) -> None:
    for rank in (0, 1):
        (tmp_path / f"gloo_trace_rank_{rank}").write_bytes((CORPUS / f"gloo_trace_rank_{rank}").read_bytes())
    found = diagnose([tmp_path])
    assert (found.failure_mode, found.first_failing_rank) == ("collective-skipped", 1)
    assert any("all_reduce seq 4 of default_pg" in one.text for one in found.evidence)
    assert [(edge.rank, edge.awaits, edge.operation) for edge in found.waits] == [(0, 1, "all_reduce seq 4")]


def test_no_table_library_is_imported_for_dumps(tmp_path: Path) -> None:
    write(tmp_path, ddp(3, 2), run(ddp(3, 2)), Look())
    program = (
        "import sys, pathlib\nfrom dtprobe.diagnose import diagnose\n"
        f"assert diagnose([pathlib.Path({str(tmp_path)!r})]).failure_mode == 'healthy'\n"
        "sys.exit(' '.join({'pandas', 'pyarrow', 'polars', 'numpy', 'torch'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, "") or done.stderr == "\n"


@pytest.mark.parametrize(
    ("ranks", "text"), [((3,), "3"), ((1, 4), "1, 4"), ((0, 1), "0, 1"), ((8, 9, 10, 11, 20), "8-11, 20"), ((), "")]
)
def test_ranks_in_words(ranks: tuple[int, ...], text: str) -> None:
    assert spans(ranks) == text


JUNK: list[Any] = [
    None,
    -1,
    0,
    2**31,
    2**63,
    2**70,
    1.5,
    True,
    "",
    "x",
    "[0, 9999999]",
    [],
    [[]],
    [[-1]],
    [["a"]],
    {},
    {"a": 1},
    ("0",),
]


@settings(max_examples=40, deadline=None)
@given(st.randoms(use_true_random=False))
def test_whatever_stands_in_the_dumps_there_is_an_answer(draw: random.Random) -> None:
    job = draw.choice([ddp(3, 3), mesh(2, 2, 2, 2)])
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write(folder, job, run(edited(job, 1, frozen(7))), Look())
        for path in folder.iterdir():
            whole = pickle.loads(path.read_bytes())  # noqa: S301 - written just now
            rows = [whole, *whole["entries"], *whole["pg_config"].values(), *whole["pg_status"].values()]
            for _ in range(draw.randint(0, 12)):
                row = draw.choice(rows)
                row[draw.choice(list(row))] = copy.deepcopy(draw.choice(JUNK))
            path.write_bytes(pickle.dumps(whole, 2))
        assert diagnose([folder]).failure_mode
