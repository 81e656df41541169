"""A run from the command line to its folder: verdicts, kills at any moment, and bad input."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

CONTENT = Path(__file__).parent / "content"
MARK = "DTPROBE_RUN_ID"


def dtprobe(*words, **options):
    command = [sys.executable, "-m", "dtprobe", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, check=False, **options)


def run(name, out, *words, **options):
    return dtprobe("run", name, "--path", CONTENT, "--out", out, "--json", *words, **options)


def folder_of(out):
    (found,) = out.glob("*/*-*/run.json")
    return found.parent


def marked(run_id):
    """Processes that carry the run's mark in their environment."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == run_id:
                found.append(process)
        except (psutil.Error, OSError):
            continue
    return found


def assert_nothing_left(run_id, temporary):
    deadline = time.monotonic() + 20
    while (alive := marked(run_id)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not alive, [(process.pid, process.cmdline()) for process in alive]
    while (left := list(temporary.iterdir())) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert left == []
    mounts = Path("/proc/self/mountinfo").read_text()
    assert run_id not in mounts
    assert not [path for path in Path("/dev/shm").iterdir() if run_id in path.name]


@pytest.fixture
def seam(tmp_path):
    """An environment whose temporary folder and journal are this test's own."""
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    return temporary, {**os.environ, "TMPDIR": str(temporary), "XDG_STATE_HOME": str(tmp_path / "state")}


def test_three_arms_a_verdict_as_pinned_and_a_report(tmp_path):
    done = run("quick", tmp_path)
    assert done.returncode == 0, done.stderr
    verdict = json.loads(done.stdout)
    assert (verdict["schema"], verdict["scenario"], verdict["verdict"]) == ("dtprobe.verdict/1", "quick:plain", "reproduced")
    assert (verdict["mitigation"], verdict["expected"], verdict["as_expected"]) == ("held", "reproduced", True)
    step = verdict["metrics"]["step"]
    assert step["control"] < step["mitigated"] < step["fault"]
    folder = folder_of(tmp_path)
    facts = json.loads((folder / "run.json").read_text())
    assert facts["state"] == "finished"
    assert {"report.html", "report.md", "verdict.json"} <= {path.name for path in folder.iterdir()}
    assert (folder / "frames" / "events.parquet").is_file()
    assert [entry["arm"] for entry in facts["arm_runs"]][:3] == ["control", "control", "fault"]
    assert verdict["overhead"]


def test_progress_goes_to_standard_error_and_json_alone_to_standard_output(tmp_path):
    done = run("quick", tmp_path, "--repeats", "1")
    json.loads(done.stdout)
    assert "control 1" in done.stderr


def test_without_all_arms_nothing_is_claimed(tmp_path):
    done = run("quick", tmp_path, "--arm", "fault", "--repeats", "1")
    assert done.returncode == 1
    verdict = json.loads(done.stdout)
    assert verdict["verdict"] == "inconclusive"
    assert "only fault ran" in verdict["because"]


def test_an_unhealthy_control_is_inconclusive_whatever_fault_showed(tmp_path):
    done = run("quick:crashes", tmp_path, "--repeats", "1")
    verdict = json.loads(done.stdout)
    assert (done.returncode, verdict["verdict"]) == (1, "inconclusive")
    assert "control is not healthy" in verdict["because"]


def test_a_judge_that_raises_is_an_error_and_never_a_claim(tmp_path):
    done = run("quick:misjudged", tmp_path, "--repeats", "1")
    verdict = json.loads(done.stdout)
    assert (done.returncode, verdict["verdict"]) == (1, "error")
    assert "ZeroDivisionError: the judge cannot divide" in verdict["because"]
    assert "Traceback" not in done.stderr


def test_unmet_needs_are_unsupported_with_the_reason_and_never_a_pass(tmp_path):
    done = run("quick:needy", tmp_path)
    verdict = json.loads(done.stdout)
    assert (done.returncode, verdict["verdict"], verdict["as_expected"]) == (1, "unsupported", False)
    assert "cuda:64" in verdict["because"]


def test_an_arm_that_hangs_is_ended_at_its_deadline_and_said_to_be(tmp_path):
    done = run("quick:hangs", tmp_path, "--repeats", "1")
    assert json.loads(done.stdout)["verdict"] == "reproduced"
    facts = json.loads((folder_of(tmp_path) / "run.json").read_text())
    assert {entry["arm"]: entry["timed_out"] for entry in facts["arm_runs"] if entry["probed"]} == {
        "control": False,
        "fault": True,
        "mitigated": False,
    }


def test_what_ranks_leave_behind_is_gone_after_a_normal_end(tmp_path, seam):
    temporary, env = seam
    done = run("quick:leaves", tmp_path / "out", "--repeats", "1", env=env)
    assert done.returncode == 0, done.stderr
    assert_nothing_left(folder_of(tmp_path / "out").name, temporary)


def test_show_prints_a_finished_run_again(tmp_path):
    ran = run("quick", tmp_path, "--repeats", "1")
    shown = dtprobe("show", "latest", "--out", tmp_path, "--json")
    assert json.loads(shown.stdout) == json.loads(ran.stdout)
    assert dtprobe("show", folder_of(tmp_path).name[:12], "--out", tmp_path).returncode == 0


def start(out, env, name="quick:leaves"):
    words = ["run", name, "--path", CONTENT, "--out", out, "--repeats", "2"]
    return subprocess.Popen(
        [sys.executable, "-m", "dtprobe", *map(str, words)],
        env=env,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_for_folder(harness, out, deadline_s=60):
    give_up = time.monotonic() + deadline_s
    while time.monotonic() < give_up and harness.poll() is None:
        if found := list(out.glob("*/[0-9]*-*/run.json")):  # one that is being made has a name with a dot
            return found[0].parent
        time.sleep(0.01)
    raise AssertionError("no run folder appeared")


def kill_and_check(tmp_path, seam, delay_s):
    temporary, env = seam
    out = tmp_path / "out"
    harness = start(out, env)
    try:
        folder = wait_for_folder(harness, out)
        time.sleep(delay_s)
        harness.kill()
        harness.wait(timeout=10)
    finally:
        harness.kill()
        harness.communicate()
    state = json.loads((folder / "run.json").read_text())["state"]
    assert state in ("unfinished", "finished")
    assert_nothing_left(folder.name, temporary)
    shown = dtprobe("show", "latest", "--out", out, env=env)
    assert state == "finished" or state in shown.stdout
    assert "Traceback" not in shown.stderr
    return state


@pytest.mark.parametrize("delay_s", [0.0, 0.4, 1.3])
def test_sigkill_of_the_harness_leaves_an_unfinished_folder_and_nothing_else(tmp_path, seam, delay_s):
    kill_and_check(tmp_path, seam, delay_s)


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(20))
def test_sigkill_of_the_harness_at_twenty_random_moments(tmp_path, seam, seed):
    kill_and_check(tmp_path, seam, random.Random(seed).uniform(0, 4))


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_ends_at_once_and_says_so(tmp_path, seam, signum):
    temporary, env = seam
    out = tmp_path / "out"
    harness = start(out, env, "quick:lasts")
    folder = wait_for_folder(harness, out)
    while not marked(folder.name) and harness.poll() is None:
        time.sleep(0.02)
    harness.send_signal(signum)
    _, said = harness.communicate(timeout=30)
    assert harness.returncode == 130
    assert "interrupted" in said.splitlines()[-1]
    assert "Traceback" not in said
    assert json.loads((folder / "run.json").read_text())["state"] == "interrupted"
    assert_nothing_left(folder.name, temporary)


def bad(done, code, says):
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr + done.stdout
    last = [line for line in done.stderr.splitlines() if line.startswith("dtprobe: ")]
    assert len(last) == 1, done.stderr
    assert says in last[0]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["quik"], "did you mean quick"),
        (["quick:plan"], "did you mean plain"),
        (["quick", "--arm", "faulty"], "its arms are control, fault, mitigated"),
        (["quick", "--repeats", "0"], "use 1 to 1000"),
        (["quick", "--world-size", "100000"], "world size 100000 is out of range"),
        (["quick", "--world-size", "0"], "world size 0 is out of range"),
        (["quick", "--sed", "1"], "No such option"),
        (["quick", "--seed", "one"], "--seed"),
        (["quick", "--path", "/nowhere"], "no such folder"),
    ],
)
def test_wrong_words_are_one_line_and_start_nothing(tmp_path, words, says):
    bad(run(words[0], tmp_path / "out", *words[1:]), 2, says)
    assert not (tmp_path / "out").exists()


def test_a_program_that_cannot_be_executed_is_one_line(tmp_path, seam):
    temporary, env = seam
    done = run("never-starts", tmp_path / "out", env=env)
    bad(done, 3, "worker.bin")
    assert_nothing_left(folder_of(tmp_path / "out").name, temporary)
    assert json.loads((folder_of(tmp_path / "out") / "run.json").read_text())["state"] == "unfinished"


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("")
    bad(run("quick", blocked / "out"), 2, str(blocked))
