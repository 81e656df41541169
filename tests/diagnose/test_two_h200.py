"""What a watchdog and a flight recorder of NCCL left of real faults: two H200, torch 2.11, NCCL 2.28.9, time-outs of 6 s.

Paths are the job's own no more (`/job`, `/venv`); all else is as it was written.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from dtprobe.diagnose import diagnose

HERE = Path(__file__).with_name("two_h200")

SEEN = {
    "broadcast-root-mismatch": ("broadcast-root-mismatch", None),
    "collective-shape-mismatch": ("collective-shape-mismatch", 1),
    "collective-skipped": ("collective-skipped", 1),
    "collective-type-mismatch": ("collective-type-mismatch", 1),
    "cross-communicator-deadlock": ("cross-communicator-deadlock", None),
    "gil-held": ("gil-held", 1),
    "nccl-init-failure": ("nccl-init-failure", 1),
    "rank-stopped": ("rank-stopped", 1),
    "symmetric-hang": ("symmetric-hang", "all"),
}


@pytest.mark.parametrize("name", SEEN)
def test_the_mode_and_the_rank_are_named(name):
    found = diagnose([HERE / name])
    assert (found.failure_mode, found.first_failing_rank) == SEEN[name], found.because


@pytest.mark.parametrize(
    ("name", "files", "mode"),
    [
        ("collective-skipped", "*.json", "collective-skipped"),
        ("collective-skipped", "stderr.log", "collective-skipped"),
        ("rank-stopped", "stderr.log", "rank-stopped"),
        ("rank-stopped", "fr-*.json", "collective-skipped"),
        ("broadcast-root-mismatch", "fr-*.json", "broadcast-root-mismatch"),
        ("broadcast-root-mismatch", "stderr.log", "broadcast-root-mismatch"),
    ],
)
def test_dumps_alone_and_logs_alone_say_the_same_or_what_looks_alike(tmp_path, name, files, mode):
    for path in (HERE / name).glob(f"rank*/{files}"):
        (tmp_path / path.parent.name).mkdir(exist_ok=True)
        shutil.copy(path, tmp_path / path.parent.name)
    assert diagnose([tmp_path]).failure_mode == mode


def test_a_smaller_size_is_the_call_itself_where_it_is_near_and_a_call_more_where_it_is_a_counter(tmp_path):
    copy = shutil.copytree(HERE / "collective-shape-mismatch", tmp_path / "job")
    dump = copy / "rank1" / "fr-0.json"
    dump.write_text(dump.read_text().replace("[[256]]", "[[1]]").replace("[256]", "[1]"))
    assert diagnose([copy]).failure_mode == "rank-conditional-collective"
