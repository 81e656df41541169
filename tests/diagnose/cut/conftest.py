"""Cases read whole and in shares, and what must be equal of them."""

from __future__ import annotations

import importlib.util
import json
import os
import pickle
import re
import shutil
import sys
import tarfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from dtprobe.diagnose import diagnose, opened
from dtprobe.diagnose.cut import OnEngine
from dtprobe.diagnose.cut.task import work
from dtprobe.diagnose.diagnosis import Diagnosis
from dtprobe.engines import Done, Task, named
from dtprobe.readers import safe_pickle
from dtprobe.readers.flight_columns import Column
from dtprobe.readers.hosts import Host, Hosts, Reading

if "flight_jobs" not in sys.modules:
    spec = importlib.util.spec_from_file_location("flight_jobs", Path(__file__).parents[1] / "collectives" / "jobs.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["flight_jobs"] = module
    spec.loader.exec_module(module)


class Inside:
    """An engine whose tasks run in this very process: for the many cases in which only the answer matters."""

    name = "inside"

    def probe(self) -> None:
        return None

    def run(self, tasks: Sequence[Task], *, into: Path, ended: Callable[[Done], None]) -> None:
        for task in reversed(tasks):  # in no case in the order of the artifacts
            shutil.rmtree(into / task.id, ignore_errors=True)
            work(task.argv[1], into / task.id)
            ended(Done(task=task.id, exit_code=0, host="here"))


def in_shares(paths: Sequence[Path], base: Path, pieces: int | None, engine: Any = None) -> Diagnosis:
    return diagnose(paths, reader=OnEngine(engine=engine or Inside(), roots=paths, base=base, pieces=pieces))


def told(answer: Diagnosis) -> str:
    """All that is told of an answer, to the letter, with the bars of its timeline."""
    return json.dumps([answer.json, [str(one) for one in answer.operations]])


def everything(paths: Sequence[Path], **how: Any) -> dict[str, Any]:
    """What was read, down to each call. What came out of archives lies elsewhere each time."""
    with opened(paths, **how) as case:
        found: dict[str, Any] = {
            "lines": [_ARCHIVE.sub("", repr(one)) for one in case.lines],
            "events": [_ARCHIVE.sub("", repr(one)) for one in case.events],
            "problems": list(case.problems),
            "missing": case.missing,
        }
        if (recording := case.recording) is not None:
            found["tables"] = recording.tables.kinds, recording.tables.sites
            found["calls"] = {
                rank: {**vars(calls), "columns": {lane: _slots(column) for lane, column in calls.columns.items()}}
                for rank, calls in recording.ranks.items()
            }
        return found


_ARCHIVE = re.compile(r"dtprobe-postmortem-\w+")


def _slots(column: Column) -> list[tuple[str, str, bytes]]:
    return [(name, type(getattr(column, name)).__name__, bytes(getattr(column, name))) for name in column.__slots__]


def local() -> Any:
    return named("local:jobs=2", os.environ)


TRACEBACK = (
    "Traceback (most recent call last):\n",
    '  File "train.py", line 12, in step\n',
    "    loss = model(batch)\n",
    "ValueError: a batch without examples\n",
)


@pytest.fixture
def mixed(tmp_path: Path) -> list[Path]:
    """Two folders with files of equal names: logs with and without a year, one too large to be read whole, dumps damaged in several
    ways and with calls made in parts, clocks that were compared, an archive."""
    from flight_jobs import Look, ddp, edited, run, without, write

    job = edited(ddp(6, 8), 3, without(17))
    one, other = tmp_path / "a", tmp_path / "b"
    write(one, job, run(job), Look(cut=(4,), missing=(5,)))
    write(other, job, run(job), Look(prefix="second_", as_json=True))
    (one / "nccl_trace_rank_1").write_bytes(b"\x80\x02cos\nsystem\nX\x04\x00\x00\x00true\x85R.")  # asks for code
    strange = safe_pickle.loads((one / "nccl_trace_rank_0").read_bytes())
    strange["entries"][3]["frames"] = [{"name": "f\udc80\ud83d\ude00", "filename": "/srv/\u2028x.py", "line": 10**40}]
    strange["entries"][4] |= {"input_sizes": [[10**30, 10**12]], "timeout_ms": 10**50}
    (one / "nccl_trace_rank_0").write_bytes(pickle.dumps(strange, 2))
    for rank, parts in ((2, (3, 5)), (3, (7, 3, 5))):
        batched = safe_pickle.loads((one / f"nccl_trace_rank_{rank}").read_bytes())
        last = batched["entries"][-1]
        batched["entries"] += [last | {"collective_seq_id": 900, "input_sizes": [[size]]} for size in parts]
        (one / f"nccl_trace_rank_{rank}").write_bytes(pickle.dumps(batched, 2))
    (other / "second_dump").write_bytes((one / "nccl_trace_rank_2").read_bytes())  # no name tells its rank
    for folder in (one, other):
        for rank in range(4):
            lines = [f"Mar  3 10:00:{at:02} n{rank // 2} train[{70 + rank}]: step {at} loss {at / 7:.3f}\n" for at in range(40)]
            tail = "".join(f"[rank{rank}]: {line}" for line in TRACEBACK) if (rank, folder) == (2, one) else ""
            (folder / f"rank{rank}.log").write_text("".join(lines) + tail)
    step = "2025-03-03 10:00:00 [rank1]: step loss 1.0 and so on and so on and so on\n"
    (one / "large.log").write_text(step * 30_000 + "[rank1]: RuntimeError: NCCL error: unhandled system error\n" + step * 4000)
    (one / "bad\udcff.log").write_text("\x1b[31m[rank0]: done\x1b[0m\r 10%|##   | 1/10\r 20%|##   | 2/10\n")
    (other / "error.json").write_text(
        json.dumps({"message": {"message": "KeyError: '\ud800'", "extraInfo": {"py_callstack": "x"}}})
    )
    (other / "nccl_trace_rank_7").write_bytes(b"")
    with tarfile.open(one / "more.tar.gz", "w:gz") as archive:
        archive.add(other / "rank3.log", "node9/rank9.log")
        archive.add(one / "nccl_trace_rank_2", "node9/nccl_trace_rank_5")
    reading = Reading(t_ns=1_741_000_000_000_000_000, offset_ns=-3_000_000_000, uncertainty_ns=1000)
    later = Reading(t_ns=reading.t_ns + 10**12, offset_ns=-3_000_100_000, uncertainty_ns=1000)
    host = Host(name="n0", node=0, ranks=(0, 2), address="", before=reading, after=later)
    Hosts(reference="n1", hosts=(host,)).write(one)
    return [one, other]
