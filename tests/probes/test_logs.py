from __future__ import annotations

import json
import time

from dtprobe.probes.logs import Logs

PROGRAM = """
import os, sys, time
print("first", flush=True)
while not os.path.exists(os.environ["STORE"]):
    time.sleep(0.01)
print("second", flush=True)
sys.stderr.write("trouble\\n")
"""


def test_each_growth_of_a_log_gets_the_time_at_which_it_was_seen(ranks):
    job = ranks(1)
    began_ns = time.time_ns()
    job.under(Logs(interval_s=0.02))
    job.run(PROGRAM)
    times = job.rank(0) / "log-times.jsonl"
    job.until(lambda: times.exists() and times.read_text().count("\n") >= 1, "the first growth")
    between_ns = time.time_ns()
    job.folder.joinpath("store").touch()
    assert job.wait() == [0]
    recorded = job.stop()
    lines = [json.loads(line) for line in times.read_text().splitlines()]
    out = [line for line in lines if line["stream"] == "stdout"]
    assert [line["size"] for line in out] == [len("first\n"), len("first\nsecond\n")]
    assert began_ns < out[0]["t_ns"] < between_ns < out[1]["t_ns"] < time.time_ns()
    assert [line["size"] for line in lines if line["stream"] == "stderr"] == [len("trouble\n")]
    assert recorded.files == (times,) and not recorded.problems
