from __future__ import annotations

import json
import signal

from dtprobe.probes.proc import Proc

PROGRAM = """
import os, socket, sys, threading, time, mmap
def sleeper():
    with open("/proc/thread-self/comm", "w") as file:
        file.write("dt-sleeper")
    time.sleep(600)
print("ready", flush=True)
def step(name):
    while not os.path.exists(os.environ["STORE"] + name):
        time.sleep(0.01)
    print("did", name, flush=True)
step("grow")
kept = [threading.Thread(target=sleeper, daemon=True) for _ in range(3)]
for one in kept: one.start()
pairs = [socket.socketpair() for _ in range(5)]
pipe = os.pipe()
maps = [mmap.mmap(-1, 4096, prot=mmap.PROT_READ if i % 2 else mmap.PROT_READ | mmap.PROT_WRITE) for i in range(64)]
print("grown", flush=True)
step("end")
"""


def rows(ranks, rank):
    return [json.loads(line) for line in (ranks.rank(rank) / "proc.jsonl").read_text().splitlines()]


def test_threads_by_name_descriptors_by_kind_and_mappings_that_a_rank_makes_are_seen(ranks):
    job = ranks(1)
    job.under(Proc(hz=50))
    job.run(PROGRAM)
    job.until(job.says(0, "ready"), "ready")
    settled = len(rows(job, 0)) + 2
    job.until(lambda: len(rows(job, 0)) > settled, "samples of the settled rank")
    before = rows(job, 0)[-1]
    job.folder.joinpath("storegrow").touch()
    job.until(lambda: rows(job, 0)[-1]["thread_names"].get("dt-sleeper") == 3, "the named threads in a sample")
    job.until(job.says(0, "grown"), "grown")
    recorded = job.stop()
    after = rows(job, 0)[-1]
    assert after["threads"] == before["threads"] + 3
    assert after["sockets"] - before["sockets"] == 10
    assert after["pipes"] - before["pipes"] == 2
    assert after["fds"] - before["fds"] == 12
    with_maps = [row["maps"] for row in rows(job, 0) if row.get("maps")]
    assert after["maps"] >= with_maps[0] + 32
    assert {"rss_bytes", "cpu_user_s", "cpu_system_s", "voluntary", "involuntary", "state", "wchan"} <= set(after)
    assert after["rank"] == 0 and after["pid"] == job.children[0].pid
    assert recorded.files == (job.rank(0) / "proc.jsonl",) and not recorded.problems
    assert "samples a second" in recorded.facts["rate"]


def test_a_stopped_rank_is_seen_stopped_and_the_last_sample_is_taken_at_the_end(ranks):
    job = ranks(2)
    job.under(Proc())
    job.run(PROGRAM)
    job.until(job.says(1, "ready"), "ready")
    job.children[1].send_signal(signal.SIGSTOP)
    job.until(lambda: rows(job, 1)[-1]["state"] == "T", "state T")
    count = len(rows(job, 0))
    recorded = job.stop()
    assert len(rows(job, 0)) > count or recorded.cpu_s > 0
    assert rows(job, 1)[-1]["state"] == "T" and "maps" in rows(job, 1)[-1]
    assert rows(job, 0)[-1]["state"] != "T"


def test_a_rank_that_ended_ends_its_samples_and_nothing_else(ranks):
    job = ranks(2)
    job.under(Proc())
    job.run(PROGRAM)
    for rank in (0, 1):
        job.until(job.says(rank, "ready"), "ready")
    job.children[0].kill()
    job.children[0].wait()
    seen = len(rows(job, 1))
    job.until(lambda: len(rows(job, 1)) > seen + 2, "samples of the other rank")
    ended_with = len(rows(job, 0))
    recorded = job.stop()
    assert len(rows(job, 0)) == ended_with
    assert not recorded.problems and len(recorded.files) == 2


def test_its_own_cost_stays_within_a_percent_of_a_core_at_any_asked_rate(ranks):
    job = ranks(2)
    recorder = job.under(Proc(hz=10_000))
    job.run(PROGRAM)
    job.until(lambda: (job.rank(1) / "proc.jsonl").exists() and len(rows(job, 1)) > 60, "60 samples")
    sampler = recorder._sampler
    lasted_s = recorder._clock.monotonic() - sampler._began
    assert sampler.cpu_s <= 0.01 * lasted_s + 0.05
    assert sampler.rate_hz < 1000
