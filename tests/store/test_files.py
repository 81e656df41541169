"""Files that are whole or absent, whoever looks and whenever the writer dies."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from dtprobe.errors import DtprobeError
from dtprobe.store.files import human_bytes, plain, write_json, write_text, write_with

REWRITER = """
import sys
from pathlib import Path
from dtprobe.store.files import write_json
for number in range(10**6):
    write_json(Path(sys.argv[1]), {"number": number, "filling": "x" * 2_000_000, "end": number})
    if number == 0:
        print("go", flush=True)
"""

HALF_WAY = """
import os, signal, sys
from pathlib import Path
from dtprobe.store.files import write_with
def write(file):
    file.write(b"new")
    file.flush()
    os.kill(os.getpid(), signal.SIGKILL)
write_with(Path(sys.argv[1]), write)
"""


def test_a_reader_beside_a_busy_writer_always_sees_a_whole_document(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    writer = subprocess.Popen((sys.executable, "-c", REWRITER, str(path)), stdout=subprocess.PIPE)
    try:
        assert writer.stdout is not None
        assert writer.stdout.readline() == b"go\n"
        seen = set()
        for _ in range(200):
            document = json.loads(path.read_bytes())
            assert document["number"] == document["end"]
            seen.add(document["number"])
        assert len(seen) > 1
        assert writer.poll() is None
    finally:
        writer.kill()
        writer.communicate()


def test_a_writer_killed_half_way_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_text(path, "old")
    done = subprocess.run((sys.executable, "-c", HALF_WAY, str(path)), timeout=60, check=False)
    assert done.returncode == -signal.SIGKILL
    assert path.read_text() == "old"


def test_a_write_that_fails_leaves_the_old_file_and_no_temporary_one(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_text(path, "old")

    def fail(file: object) -> None:
        raise OSError(5, os.strerror(5))

    with pytest.raises(DtprobeError, match="cannot be written: Input/output error"):
        write_with(path, fail)
    with pytest.raises(TypeError, match="has no JSON form"):
        write_json(path, {"x": object()})
    assert [(one.name, one.read_text()) for one in tmp_path.iterdir()] == [("file", "old")]


def test_files_get_the_users_own_permissions(tmp_path: Path) -> None:
    old = os.umask(0o027)
    try:
        write_text(tmp_path / "file", "x")
    finally:
        os.umask(old)
    assert (tmp_path / "file").stat().st_mode & 0o777 == 0o640


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (2**30, "1.0 GiB"), (2**53, "8192.0 TiB")]
)
def test_bytes_are_told_in_a_fitting_unit(count: int, text: str) -> None:
    assert human_bytes(count) == text


def test_plain_keeps_what_json_has() -> None:
    value = {"a": [1, 2.5, None, True, "x"], "b": {"c": (1, 2)}}
    assert plain(value) == {"a": [1, 2.5, None, True, "x"], "b": {"c": [1, 2]}}
    assert plain({1: float("nan")}) == {"1": None}
