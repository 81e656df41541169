from __future__ import annotations

import json
import sys

import pytest

from dtprobe.errors import UsageError
from dtprobe.probes.inotify import Inotify
from dtprobe.readers.inotify import read_inotify

PROGRAM = """
import os, time
place = os.environ["PLACE"]
os.makedirs(place + "/deep er")
time.sleep(0.3)
file = open(place + "/deep er/a file", "w")
file.write("x"); file.flush()
print("open", flush=True)
while not os.path.exists(os.environ["STORE"]):
    file.write("x"); file.flush(); time.sleep(0.06)
file.close()
os.rename(place + "/deep er/a file", place + "/b")
os.unlink(place + "/b")
print("done", flush=True)
time.sleep(600)
"""
pytestmark = pytest.mark.needs("inotify")


def test_what_a_rank_does_to_a_file_and_that_it_holds_it_is_recorded(ranks):
    job = ranks(1)
    job.under(Inotify())
    job.run(PROGRAM, {"PLACE": str(job.scratch)})
    text = job.folder / "inotify.txt"
    pid = job.children[0].pid
    job.until(lambda: text.exists() and f'[{pid},"' in text.read_text(), "the holder")
    job.folder.joinpath("store").touch()
    job.until(job.says(0, "done"), "done")
    recorded = job.stop()
    assert recorded.files == (text,) and not recorded.problems
    frame = read_inotify(text)
    mine = frame[frame["path"] == f"{job.scratch}/deep er/a file"]
    assert {"modify", "close_write", "moved_from"} <= set(mine["kind"])
    assert set(frame[frame["path"] == f"{job.scratch}/b"]["kind"]) == {"moved_to", "delete"}
    held = [json.loads(holders) for holders in mine["holders"].dropna()]
    assert pid in [holder[0] for one in held for holder in one]
    assert frame["t_ns"].is_monotonic_increasing


def test_a_folder_that_is_not_there_yet_is_made_and_watched_and_dead_ranks_do_not_matter(ranks, tmp_path):
    job = ranks(1)
    job.under(Inotify(paths=(str(tmp_path / "store"),)))
    job.run("import os; open(os.environ['PLACE'] + '/f', 'w').close()", {"PLACE": str(tmp_path / "store")})
    assert job.wait() == [0]
    job.stop()
    assert {"create", "open", "close_write"} <= set(read_inotify(job.folder / "inotify.txt")["kind"])


def test_an_unknown_placeholder_is_refused():
    with pytest.raises(UsageError, match="unknown placeholder"):
        Inotify(paths=("{store}/x",))


def test_it_is_available_here_under_this_python():
    assert Inotify().probe() is None or sys.version_info >= (3, 12)
