"""The safe file store: exclusive claims, checksums, deadlines, and its folder gone at the end."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from datetime import timedelta

import pytest
import torch.distributed as dist

from dtprobe.errors import UsageError
from dtprobe.framework.errors import FrameworkError
from dtprobe.framework.filestore import SafeFileStore, StaleStore, TornRecord


def opened(folder, rank=0, world_size=1, **options):
    return SafeFileStore(folder, run="r", rank=rank, world_size=world_size, **{"timeout_s": 5, **options})


def test_it_answers_as_a_c10d_store_does(tmp_path):
    with opened(tmp_path) as store:
        reference = dist.HashStore()
        for each in (store, reference):
            each.set("a", "1")
            each.append("a", "23")
            assert each.get("a") == b"123"
            assert [each.add("n", 2), each.add("n", -5)] == [2, -3]
            assert each.compare_set("c", "", "first") == b"first"
            assert each.compare_set("c", "wrong", "second") == b"first"
            assert each.compare_set("c", "first", "second") == b"second"
            assert each.check(["a", "n"]) and not each.check(["a", "absent"])
            assert each.multi_get(["a", "c"]) == [b"123", b"second"]
            each.multi_set(["x", "y"], ["\x00\xff", ""])
            assert each.get("y") == b""
            assert each.delete_key("x") and not each.delete_key("x")
            assert not each.check(["x"])
        assert store.num_keys() == 4


def test_the_folder_is_gone_after_the_last_rank_closed(tmp_path):
    first = opened(tmp_path, 0, 2)
    second = opened(tmp_path, 1, 2)
    first.set("k", "v")
    assert second.get("k") == b"v"
    closing = threading.Thread(target=first.close)
    closing.start()
    second.close()
    closing.join()
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(FrameworkError, match="closed"):
        second.get("k")


def test_the_folder_of_a_killed_run_is_refused_with_who_took_the_rank(tmp_path):
    program = f"""
import os
from dtprobe.framework.filestore import SafeFileStore
SafeFileStore({str(tmp_path)!r}, run="r", rank=0, world_size=1).set("k", "stale")
os.kill(os.getpid(), 9)
"""
    killed = subprocess.run([sys.executable, "-c", program], check=False)
    assert killed.returncode == -signal.SIGKILL
    with pytest.raises(StaleStore, match=r"rank 0 of run 'r' is taken in .* by rank 0 of 1, pid"):
        opened(tmp_path)
    with opened(tmp_path, attempt=1) as store:
        assert not store.check(["k"])


def test_two_jobs_with_one_run_id_never_share_a_store(tmp_path):
    with opened(tmp_path, 0, 2, timeout_s=0.5), opened(tmp_path, 1, 2):
        with pytest.raises(StaleStore):
            opened(tmp_path, 0, 2)
        with pytest.raises(StaleStore, match="rank 1 of run 'r' is taken"):
            opened(tmp_path, 1, 2)
        with pytest.raises(StaleStore, match="world sizes differ"):
            opened(tmp_path, 1, 3)


def test_of_many_processes_that_claim_one_rank_exactly_one_wins(tmp_path):
    program = f"""
from dtprobe.framework.filestore import SafeFileStore, StaleStore
import sys
try:
    SafeFileStore({str(tmp_path)!r}, run=sys.argv[1], rank=0, world_size=1)
except StaleStore:
    sys.exit(7)
"""
    fork = f"import os, sys\nsys.argv = ['', 'r0']\n{program}"
    assert subprocess.run([sys.executable, "-c", fork], check=False).returncode == 0
    racers = f"""
import os, sys
from dtprobe.framework.filestore import SafeFileStore, StaleStore
for round in range(30):
    children = []
    for _ in range(6):
        pid = os.fork()
        if pid == 0:
            try:
                SafeFileStore({str(tmp_path)!r}, run=f"race{{round}}", rank=0, world_size=1)
            except StaleStore:
                os._exit(7)
            os._exit(0)
        children.append(pid)
    codes = sorted(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children)
    assert codes == [0, 7, 7, 7, 7, 7], codes
"""
    subprocess.run([sys.executable, "-c", racers], check=True)


@pytest.mark.parametrize("cut", [1, 10, 21, 25])
def test_a_torn_record_is_an_error_at_once_where_torchs_own_store_spins_for_ever(tmp_path, cut):
    with opened(tmp_path) as store:
        store.set("whole", "1")
        size = (store.folder / "log").stat().st_size
        store.set("torn", "2345")
        os.truncate(store.folder / "log", size + cut)
        other = opened_again(store)
        begun = time.monotonic()
        with pytest.raises(TornRecord, match=f"the record at byte {size} of {size + cut} is torn"):
            other.get("torn")
        assert time.monotonic() - begun < 4


def test_a_flipped_bit_is_found(tmp_path):
    with opened(tmp_path) as store:
        store.set("key", "value")
        log = store.folder / "log"
        raw = bytearray(log.read_bytes())
        raw[-1] ^= 1
        log.write_bytes(raw)
        with pytest.raises(TornRecord, match="written by rank 0"):
            opened_again(store).get("key")


def opened_again(store: SafeFileStore) -> SafeFileStore:
    """A second view of the same store that has read nothing yet."""
    again = SafeFileStore.__new__(SafeFileStore)
    dist.Store.__init__(again)
    again.__dict__.update(store.__dict__)
    again._known, again._read_to = {}, 0
    return again


def test_a_wait_keeps_its_deadline_and_costs_little_processor_time(tmp_path):
    with opened(tmp_path) as store:
        begun, used = time.monotonic(), time.process_time()
        with pytest.raises(dist.DistStoreError, match="keys: never"):
            store.wait(["never"], timedelta(seconds=1))
        assert 1 <= time.monotonic() - begun < 4
        assert time.process_time() - used < 0.5


def test_a_lock_that_another_process_holds_ends_in_a_timeout_that_names_it(tmp_path):
    with opened(tmp_path, timeout_s=0.5) as store:
        program = "import fcntl, sys, time\nf = open(sys.argv[1])\nfcntl.flock(f, fcntl.LOCK_EX)\nprint('held', flush=True)\nsys.stdin.read()"
        holder = subprocess.Popen(
            [sys.executable, "-c", program, str(store.folder / "log")], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert holder.stdout and holder.stdout.readline() == "held\n"
        try:
            with pytest.raises(dist.DistStoreError, match=f"locked for 0.5 s by pid {holder.pid}"):
                store.set("k", "v")
        finally:
            holder.communicate("")
        store.set("k", "v")


def test_rank_0_that_never_comes_is_named_and_who_waited_leaves_nothing(tmp_path):
    with pytest.raises(dist.DistStoreError, match="rank 0 did not come"):
        opened(tmp_path, 1, 2, timeout_s=0.3)
    assert list(tmp_path.iterdir()) == []


def test_a_log_that_is_removed_in_use_ends_the_close_in_time(tmp_path):
    store = opened(tmp_path, 0, 2)
    shutil.rmtree(store.folder)
    store.close(timeout_s=0.2)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("run", ["", "../up", "a/b", ".hidden", "a b"])
def test_a_run_id_that_is_no_file_name_is_refused(tmp_path, run):
    with pytest.raises(UsageError, match="do not name a store"):
        SafeFileStore(tmp_path, run=run, rank=0, world_size=1)


def test_concurrent_counters_lose_nothing(tmp_path):
    program = """
import os, sys
from dtprobe.framework.filestore import SafeFileStore
store = SafeFileStore(sys.argv[1], run="r", rank=0, world_size=1)
children = []
for worker in range(4):
    pid = os.fork()
    if pid == 0:
        store._file = os.open(store.folder / "log", os.O_RDWR | os.O_APPEND)
        for _ in range(100):
            store.add("n", 1)
        os._exit(0)
    children.append(pid)
for pid in children:
    os.waitpid(pid, 0)
print(store.add("n", 0))
store.close()
"""
    found = subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=True, capture_output=True, text=True)
    assert found.stdout == "400\n"


def test_gloo_and_groups_run_on_it(job, tmp_path):
    shared = tmp_path / "shared"
    ranks = job(
        f"""
from dtprobe.framework.filestore import SafeFileStore
from dtprobe.framework.groups import Groups
from dtprobe.framework.checked import checked
with SafeFileStore({str(shared)!r}, run="r", rank=RANK, world_size=SIZE, timeout_s=30) as store:
    dist.init_process_group("gloo", store=store, rank=RANK, world_size=SIZE, timeout=seconds(30))
    x = torch.ones(1)
    with Groups(timeout_s=30) as groups, groups.scope("g") as g, checked(g) as c:
        dist.all_reduce(x, group=c)
    dist.barrier()
    dist.destroy_process_group()
say(sum=x.item())
""",
        world_size=3,
    )
    assert [rank.only["sum"] for rank in ranks] == [3.0] * 3
    assert list(shared.iterdir()) == []
