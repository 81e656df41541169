"""Whatever a folder holds, the answer is an answer: no exception, nothing run, what is missing said."""

from __future__ import annotations

import gzip
import io
import json
import os
import pickle
import random
import string
import subprocess
import sys
import tarfile
import time
import zipfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dtprobe.diagnose import diagnose
from dtprobe.diagnose.case import Artifact
from dtprobe.diagnose.decide import modes
from dtprobe.diagnose.diagnosis import UNDETERMINED
from dtprobe.diagnose.intake.kinds import kind_of
from dtprobe.diagnose.lines import read_lines

MARKER = "dtprobe-ran-code"


class _Hostile:
    def __reduce__(self) -> tuple[object, ...]:
        return (os.system, (f"touch {MARKER}",))


def _dump(rank: int) -> dict[str, object]:
    entry = {
        "record_id": 0, "pg_id": 0, "process_group": ("0", "default_pg"), "collective_seq_id": 1, "p2p_seq_id": 0, "op_id": 1,
        "profiling_name": "nccl:all_reduce", "time_created_ns": 1_700_000_000_000_000_000, "input_sizes": ((4,),), "input_dtypes": ["Float"],
        "output_sizes": ((4,),), "output_dtypes": ["Float"], "state": "scheduled" if rank else "completed", "timeout_ms": 600000,
        "is_p2p": False, "retired": not rank, "frames": [{"name": "step", "filename": "t.py", "line": 3}],
    }  # fmt: skip
    return {
        "version": "2.10",
        "pg_config": {"0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1]"}},
        "pg_status": {},
        "entries": [entry],
    }


SEEDS: dict[str, bytes] = {
    "train.log": (
        b"[rank0]: 2025-01-01 00:00:00,001 - root - INFO - step 1 loss 2.0 world_size=2\n"
        b"n1:10:11 [0] NCCL INFO comm 0x1 rank 0 nranks 2 cudaDev 0 nvmlDev 0 busId 1b000 commId 0xaa - Init START\n"
        b"n1:12:13 [1] NCCL INFO comm 0x1 rank 1 nranks 2 cudaDev 1 nvmlDev 1 busId 43000 commId 0xaa - Init START\n"
        b'[rank1]: Traceback (most recent call last):\n[rank1]:   File "t.py", line 3, in step\n[rank1]: ValueError: bad batch\n'
        b"[rank0]:[E101 00:10:05.000000 ProcessGroupNCCL.cpp:1] [Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7, "
        b"OpType=ALLREDUCE, NumelIn=1, NumelOut=1, Timeout(ms)=600000) ran for 600000 milliseconds before timing out.\n"
        b"Root Cause (first observed failure):\n[0]:\n  time      : 2025-01-01_00:00:09\n  host      : n1\n  rank      : 1 (local_rank: 1)\n"
        b"  exitcode  : 1 (pid: 12)\n"
    ),
    "dmesg": b"[Jan 1 00:00] NVRM: Xid (PCI:0000:43:00): 79, pid=12, name=python, GPU has fallen off the bus.\n[  +0.000003] more\n",
    "ras.json": b'{"nccl_version": "2.28.9", "communicators_count": 1, "communicators": [{"hash": "0x1", "size": 2, "ranks": [{"rank": 0, "pid": 10, '
    b'"collective_counts": {"AllReduce": 3}}], "missing_ranks": [{"rank": 1}]}]}',
    "ras.txt": b"NCCL version 2.28.9 compiled with CUDA 13.0\n\nJob summary\n===========\n\n#0-0 (94e4) MISMATCH\n  Communicator ranks have different "
    b"AllReduce operation counts\n  Rank 1 has launched up to operation 1 -- GPU 1 managed by process 12 on node 10.0.0.2\n",
    "stack": b'Process 12: python t.py\nPython v3.12.3\n\nThread 12 (idle): "MainThread"\n    all_reduce (torch/distributed/distributed_c10d.py:3007)\n',
    "strace.txt": b'10:41:02.118733 write(7, "x", 1) = 1 <0.1>\n10:41:03.118733 read(7, <unfinished ...>\n',
    "nccl_trace_rank_0": pickle.dumps(_dump(0), protocol=2),
    "nccl_trace_rank_1": pickle.dumps(_dump(1), protocol=2),
    "nccl_trace_rank_2": json.dumps(_dump(1)).encode(),
    "pod.log": b'{"log":"[rank7]: boom\\n","stream":"stderr","time":"2026-02-18T10:20:10.1Z"}\n{"log":"x","time":"2026-02-18T10:20:11Z"}\n',
}
_WORDS = (
    b"\0",
    b"\n",
    b"\r",
    b"\x1b[",
    b"[rank",
    b"]:",
    b"{",
    b"}",
    b"9" * 40,
    b"rank 99999999",
    b"-1",
    b"\xff\xfe",
    b"%s",
    b"PK\3\4",
    b"\x1f\x8b",
    b"0000-99-99 99:99:99 ",
)


def _mutated(draw: random.Random, data: bytes) -> bytes:
    out = bytearray(data)
    for _ in range(draw.choice((0, 1, 3, 20))):
        at = draw.randrange(len(out) + 1)
        kind = draw.randrange(5)
        if kind == 0 and out:
            out[at % len(out)] = draw.randrange(256)
        elif kind == 1:
            out[at:at] = draw.choice(_WORDS)
        elif kind == 2:
            del out[at : at + draw.randrange(1, 40)]
        elif kind == 3:
            start = draw.randrange(len(out) + 1)
            out[at:at] = out[start : start + draw.randrange(200)]
        else:
            del out[at:]
    return bytes(out)


def _packed(draw: random.Random, files: dict[str, bytes]) -> dict[str, bytes]:
    out = io.BytesIO()
    form = draw.randrange(4)
    if form == 0:
        with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, data in files.items():
                archive.writestr(name, data)
    elif form == 1:
        with tarfile.open(fileobj=out, mode="w:gz") as tar:
            for name, data in files.items():
                info = tarfile.TarInfo(name)
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))
    else:
        return {name + ".gz": gzip.compress(data) if form == 2 else data for name, data in files.items()}
    return {"all": out.getvalue()}


def _holds(folder: Path, seed: int) -> None:
    draw = random.Random(seed)
    files = {name: _mutated(draw, data) for name, data in SEEDS.items() if draw.random() < 0.7}
    if draw.random() < 0.3:
        files = {name: _mutated(draw, data) if draw.random() < 0.5 else data for name, data in _packed(draw, files).items()}
    job = folder / f"{seed}"
    job.mkdir()
    for name, data in files.items():
        (job / name).write_bytes(data)
    try:
        answer = diagnose([job])
        json.dumps(answer.json)
        assert answer.failure_mode in modes() and 0 <= answer.confidence <= 1
    finally:
        for file in job.iterdir():
            file.unlink()
        job.rmdir()


def test_damaged_artifacts_are_answered(tmp_path: Path) -> None:
    for seed in range(60):
        _holds(tmp_path, seed)


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_damaged_artifacts_are_answered_for_ten_minutes(tmp_path: Path) -> None:
    seed, end = 1_000, time.monotonic() + 600
    while time.monotonic() < end:
        try:
            _holds(tmp_path, seed)
        except Exception as error:
            raise AssertionError(f"seed {seed}") from error
        seed += 1


@given(
    st.binary(max_size=400)
    | st.text(alphabet=string.printable + "\0\x1b\r\u2588", max_size=400).map(lambda text: text.encode())
)
@settings(max_examples=150)
def test_any_bytes_have_a_kind_and_lines(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "any"
    path.write_bytes(data)
    assert kind_of(data, len(data))
    numbers = [line.number for line in read_lines(Artifact(name="any", path=path, kind="text", size=len(data)))]
    assert numbers == sorted(numbers) and all(1 <= number <= data.count(b"\n") + 1 for number in numbers)


def test_a_pickle_that_would_run_code_is_refused_and_that_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    job = tmp_path / "job"
    job.mkdir()
    (job / "nccl_trace_rank_0").write_bytes(pickle.dumps(_Hostile(), protocol=2))
    (job / "nccl_trace_rank_1").write_bytes(SEEDS["nccl_trace_rank_1"])
    answer = diagnose([job])
    assert not list(tmp_path.rglob(MARKER))
    assert any("nccl_trace_rank_0" in one and "system" in one for one in answer.missing)


def test_nothing_to_read_is_undetermined(tmp_path: Path) -> None:
    assert diagnose([tmp_path]).failure_mode == UNDETERMINED
    (tmp_path / "empty").touch()
    (tmp_path / "noise").write_bytes(bytes(range(256)) * 40)
    assert diagnose([tmp_path]).failure_mode == UNDETERMINED


@pytest.mark.parametrize(("what", "code"), [("job", 1), ("absent", 2), ("pipe", 1)])
def test_the_command_ends_with_an_answer_or_one_line_about_the_path(tmp_path: Path, what: str, code: int) -> None:
    (tmp_path / "job").mkdir()
    (tmp_path / "job" / "a\nb.log").write_bytes(b"\xff\x00[rank0]: \x1b[31mboom")
    os.mkfifo(tmp_path / "pipe")
    done = subprocess.run(
        [sys.executable, "-m", "dtprobe", "postmortem", str(tmp_path / what), "--json", "--out", str(tmp_path / "out")],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == code and "Traceback" not in done.stderr
    if code == 2:
        assert "does not exist" in done.stderr and len(done.stderr.splitlines()) == 1
    else:
        assert json.loads(done.stdout)["failure_mode"] == UNDETERMINED
