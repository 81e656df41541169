"""`dtprobe watch` over real jobs on gloo: hangs of five kinds are found and the cause named, and long waits that are none are let be."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

from dtprobe import processes, watch
from dtprobe.errors import UsageError
from dtprobe.probes.hang import Found
from dtprobe.store import RunFolder

pytestmark = pytest.mark.needs("gloo", "torch>=2.10")

LIMIT_S = 150.0
ROOT = Path(__file__).resolve().parent.parent

LAUNCHER = """
import os, subprocess, sys
world = int(sys.argv[1])
children = []
for rank in range(world):
    env = {**os.environ, "RANK": str(rank), "WORLD_SIZE": str(world)}
    children.append(subprocess.Popen([sys.executable, *sys.argv[2:]], env=env))
sys.exit(max(abs(child.wait()) for child in children))
"""

PREAMBLE = """
import ctypes, datetime, os, random, signal, subprocess, sys, threading, time
from pathlib import Path
rank, world, shared = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), Path(os.environ["SHARED"])
import torch
import torch.distributed as dist
def start():
    timeout = datetime.timedelta(seconds=float(os.environ.get("TIMEOUT_S", 200)))
    dist.init_process_group("gloo", init_method=f"file://{shared}/store", rank=rank, world_size=world, timeout=timeout)
x = torch.ones(64)
def step(group=None):
    dist.all_reduce(x, group=group)
    (shared / f"progress-{rank}").write_text(str(time.time_ns()))
def compute(seconds):
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        torch.mm(torch.ones(64, 64), torch.ones(64, 64))
def checkpoint(seconds):
    until = time.monotonic() + seconds
    with open(shared / f"checkpoint-{rank}", "wb") as file:
        while time.monotonic() < until:
            file.write(os.urandom(1 << 16))
            file.flush()
            os.fsync(file.fileno())
            time.sleep(0.3)
def finish():
    dist.barrier()
    dist.destroy_process_group()
"""

LOOP = """
start()
groups = [dist.new_group(), dist.new_group()]
for number in range(6):
    time.sleep(0.3)
    if rank == 1 and number == 4:
        {fault}
    step(groups[0])
    step(groups[1])
    step()
finish()
"""

SKIPPED = """
start()
for number in range(6):
    time.sleep(0.02)
    if rank != 1 or number != 4:
        step()
finish()
"""

CROSSED = """
start()
groups = [dist.new_group(), dist.new_group()]
for number in range(6):
    wrong = rank == 1 and number == 4
    step(groups[wrong])
    step(groups[not wrong])
finish()
"""

HANGS = {
    "skipped": SKIPPED,
    "stopped": LOOP.format(fault="os.kill(os.getpid(), signal.SIGSTOP)"),
    "gil held": LOOP.format(fault="ctypes.PyDLL(None).sleep(1000)"),
    "crossed groups": CROSSED,
    "stuck after a long history": "start()\nfor _ in range(2100):\n    dist.all_reduce(x)\n"
    "step()\nif rank == 1:\n    threading.Event().wait()\nstep()\nfinish()",
    "skipped and asleep": LOOP.format(fault="time.sleep(1000)"),
}

NAMESPACES = """
import os, subprocess, sys, time
from pathlib import Path
shared = Path(os.environ["SHARED"])
children = []
for rank in (0, 1):
    env = {**os.environ, "RANK": str(rank), "WORLD_SIZE": "2", "GLOO_SOCKET_IFNAME": "veth0"}
    children.append(subprocess.Popen(["unshare", "--net", sys.executable, *sys.argv[1:]], env=env))
def until(path):
    while not path.exists():
        if any(child.poll() is not None for child in children):
            sys.exit("a rank has ended")
        time.sleep(0.05)
def inside(rank, *words):
    subprocess.run(["nsenter", "--net", "-t", str(children[rank].pid), *words], check=True)
for rank in (0, 1):
    until(shared / f"up-{rank}")
ends = [("name", "veth0", "netns", str(child.pid)) for child in children]
subprocess.run(["ip", "link", "add", *ends[0], "type", "veth", "peer", *ends[1]], check=True)
for rank in (0, 1):
    inside(rank, "ip", "addr", "add", f"10.123.0.{rank + 1}/24", "dev", "veth0")
    inside(rank, "ip", "link", "set", "veth0", "up")
    inside(rank, "ip", "link", "set", "lo", "up")
(shared / "linked").write_text("")
until(shared / "cut-now")
for rank in (0, 1):
    inside(rank, "nft", "add", "table", "inet", "cut")
    inside(rank, "nft", "add", "chain", "inet", "cut", "arriving", "{ type filter hook input priority 0; policy drop; }")
(shared / "cut").write_text("")
sys.exit(max(abs(child.wait()) for child in children))
"""

HOLE = """
def until(name):
    while not (shared / name).exists():
        time.sleep(0.05)
(shared / f"up-{rank}").write_text("")
until("linked")
start()
for number in range(6):
    if number == 4:
        (shared / "cut-now").write_text("")
        until("cut")
    step()
finish()
"""


@dataclass
class Told:
    """What a watch said, and when."""

    hangs: list[Found] = field(default_factory=list)
    resumed_: list[Found] = field(default_factory=list)
    then: Callable[[Found], None] = lambda found: None

    def hang(self, found: Found) -> None:
        self.hangs.append(found)
        self.then(found)

    def resumed(self, found: Found) -> None:
        self.resumed_.append(found)


@dataclass
class Jobs:
    """Jobs in a folder of their own, under watch."""

    shared: Path
    told: Told = field(default_factory=Told)
    extra: dict[str, str] = field(default_factory=dict)

    @property
    def environ(self) -> dict[str, str]:
        foreign = ("RANK", "WORLD_SIZE", "LD_PRELOAD", "SLURM_PROCID")
        kept = {name: value for name, value in os.environ.items() if name not in foreign}
        own = {"SHARED": str(self.shared), "XDG_STATE_HOME": str(self.shared / "state"), "OMP_NUM_THREADS": "1"}
        return {**kept, "GLOO_SOCKET_IFNAME": "lo", **own, **self.extra}

    def command(self, code: str, world: int = 2, launcher: str = LAUNCHER) -> list[str]:
        (self.shared / "rank.py").write_text(PREAMBLE + code)
        (self.shared / "launcher.py").write_text(launcher)
        size = [str(world)] if launcher is LAUNCHER else []
        return [sys.executable, str(self.shared / "launcher.py"), *size, str(self.shared / "rank.py")]

    def watch(self, argv: list[str], suspect_s: float, *, end: bool = True, timeout_s: float = LIMIT_S) -> watch.WatchResult:
        out = self.shared / "runs"
        return watch.run(
            argv, out=out, suspect_s=suspect_s, end=end, timeout_s=timeout_s, teller=self.told, environ=self.environ
        )

    def output(self, result: watch.WatchResult) -> str:
        return (result.folder / "control/0/launcher/stderr.log").read_text(errors="replace")[-3000:]

    def last_progress_ns(self) -> int:
        return max(int(path.read_text()) for path in self.shared.glob("progress-*"))


@pytest.fixture
def jobs(tmp_path: Path) -> Iterator[Jobs]:
    yield Jobs(tmp_path)
    held = [one for one in psutil.process_iter() if str(tmp_path) in " ".join(_cmdline(one))]
    for one in held:
        one.kill()
    assert not held, f"left behind: {held}"


def _cmdline(one: psutil.Process) -> list[str]:
    try:
        return one.cmdline()
    except psutil.Error:
        return []


def check_hang(jobs: Jobs, result: watch.WatchResult, suspects: object) -> None:
    assert result.hang and result.json["suspects"] == suspects, (result.json, jobs.output(result))
    assert len(jobs.told.hangs) == 1 and result.json["ended_by_watch"]


QUICK = ("skipped", "stopped", "gil held")
"""Those that the default suite runs; the nightly one runs all."""


@pytest.mark.parametrize("kind", [kind if kind in QUICK else pytest.param(kind, marks=pytest.mark.nightly) for kind in HANGS])
def test_a_hang_is_found_and_the_rank_that_causes_it_named(jobs, kind):
    result = jobs.watch(jobs.command(HANGS[kind]), suspect_s=3)
    check_hang(jobs, result, [1])


@pytest.mark.needs("root", "veth", "nftables")
def test_where_nothing_gets_through_in_either_direction_all_ranks_are_named(jobs):
    result = jobs.watch(jobs.command(HOLE, launcher=NAMESPACES), suspect_s=3)
    check_hang(jobs, result, "all")
    assert result.json["hangs"][0]["kind"] == "symmetric"


def test_of_three_ranks_the_one_that_differs_is_named_without_any_history(jobs):
    code = "start()\nstep()\ngroup = dist.new_group()\nstep(group if rank == 2 else None)\nstep()\nfinish()"
    result = jobs.watch(jobs.command(code, world=3), suspect_s=3)
    check_hang(jobs, result, [2])


HEALTHY = """
if rank == 1:
    time.sleep({start})
start()
random.seed({seed} + rank)
for number in range(8):
    time.sleep(random.random() * 0.2)
    if number == 2 and rank == 1:
        compute({compute})
    if number == 4 and rank == 0:
        checkpoint({checkpoint})
    if number == 5 and rank == 1:
        subprocess.run(["sleep", "{child}"])
    if number == 6 and rank == 0:
        time.sleep({asleep})
    step()
finish()
"""


def test_long_compute_a_slow_checkpoint_a_slow_start_and_waits_that_end_are_no_hangs(jobs):
    code = HEALTHY.format(start=4, seed=0, compute=5, checkpoint=5, child=5, asleep=5)
    result = jobs.watch(jobs.command(code), suspect_s=2)
    assert result.well and not jobs.told.hangs, (result.json, jobs.output(result))
    assert result.json["suspects"] == [] and result.json["because"].startswith(
        "no hang suspected; the command ended with exit code 0"
    )
    assert any("computes" in why or "waits for a processor" in why or "runs" in why for why in result.json["waits"].values())


def test_the_bundle_holds_the_evidence_of_the_living_job(jobs):
    # A while after its last call, so that its records were read.
    result = jobs.watch(jobs.command(HANGS["stopped"].replace("os.kill", "time.sleep(4); os.kill")), suspect_s=3)
    arm = result.folder / "control/0"
    for rank in (0, 1):
        records = [json.loads(path.read_text())["entries"] for path in sorted(arm.glob(f"rank{rank}/fr-*.json"))]
        assert records and records[0]  # of the stopped rank, what it said when it last answered
    assert not json.loads((arm / "rank0/fr-0.json").read_text())["entries"][-1]["retired"]
    stopped = json.loads((arm / "rank1/stalled.json").read_text())
    assert "State:\tT" in stopped["threads"][0]["status"] and stopped["threads"][0]["wchan"]
    assert any(thread["name"].startswith("gloo") for thread in json.loads((arm / "rank0/stalled.json").read_text())["threads"])
    stacks = json.loads((arm / "rank0/pyspy-0.json").read_text())
    assert any(frame["name"] == "step" for thread in stacks for frame in thread["frames"])
    said = json.loads((result.folder / "watch.json").read_text())
    assert said["schema"] == "dtprobe.watch/1" and said["hang"] and said["hangs"][0]["kind"] == "stopped"
    assert said["hangs"][0]["ranks"]["1"].startswith("stopped (state T)")
    taken = {path.stem for path in (arm / "hang-0").iterdir()}
    assert taken | set(said["unavailable"]) == {"sockets", "kernel", "gpu", "nccl-ras"}
    assert RunFolder.open(result.folder).state == "finished" and (result.folder / "report.html").exists()


def test_a_job_that_is_left_goes_on_when_its_rank_does(jobs):
    def wake(found: Found) -> None:
        (rank,) = jobs.shared.glob("runs/watch/*/control/0/rank1/process.json")
        os.kill(json.loads(rank.read_text())["pid"], signal.SIGCONT)

    jobs.told.then = wake
    code = HANGS["stopped"].replace("finish()", "time.sleep(8)\nfinish()")
    result = jobs.watch(jobs.command(code), suspect_s=2, end=False)
    assert result.exit_code == 0 and result.hang and not result.well, jobs.output(result)
    assert len(jobs.told.hangs) == 1 and jobs.told.resumed_ == jobs.told.hangs


def test_evidence_is_taken_before_a_short_timeout_ends_the_job(jobs):
    jobs.extra["TIMEOUT_S"] = "10"
    code = "start()\nstep()\nif rank == 1:\n    compute(40)\nstep()\nfinish()"
    result = jobs.watch(jobs.command(code), suspect_s=3)
    check_hang(jobs, result, [1])
    assert result.json["hangs"][0]["kind"] == "timeout" and result.json["hangs"][0]["open_s"] < 10


def cli(*words: str, environ: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "dtprobe", "watch", *words]
    path = {"PYTHONPATH": str(ROOT)}
    return subprocess.run(
        argv, env={**os.environ, **path, **(environ or {})}, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ((), "no command to watch"),
        (("--", "no-such-program-here"), "cannot execute no-such-program-here"),
        (("--suspect-s", "soon", "--", "true"), "--suspect-s"),
    ],
)
def test_what_cannot_be_watched_is_refused_in_one_line(words, told, tmp_path):
    done = cli("--out", str(tmp_path / "runs"), *words)
    assert done.returncode == 2 and told in done.stderr
    assert done.stderr.count("\n") == 1 and "Traceback" not in done.stderr
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("suspect_s", [0, -1, float("nan"), float("inf")])
def test_a_time_that_no_hang_can_last_is_refused(suspect_s):
    with pytest.raises(UsageError, match=f"--suspect-s {suspect_s:g}"):
        watch.check(["true"], suspect_s)


def test_a_command_without_python_runs_and_what_cannot_be_seen_is_said(tmp_path):
    done = cli("--out", str(tmp_path / "runs"), "--json", "--", "sh", "-c", "echo to-out; echo to-err >&2; exit 3")
    said = json.loads(done.stdout)
    assert done.returncode == 1 and said["exit_code"] == 3 and not said["hang"]
    assert "no rank was found" in said["blind"][0]
    assert "to-out" in done.stderr and "to-err" in done.stderr


def test_the_command_line_says_a_hang_in_one_line_and_passes_the_output_on(jobs):
    command = jobs.command('print("from the rank", flush=True)\n' + HANGS["stopped"])
    done = cli("--suspect-s", "2", "--end", "--out", str(jobs.shared / "runs"), "--", *command, environ=jobs.environ)
    assert done.returncode == 1, done.stderr
    lines = [line for line in done.stderr.splitlines() if line.startswith("dtprobe watch:")]
    assert len(lines) == 1, done.stderr
    assert "hang suspected: all_reduce seq 5 of group 1 open" in lines[0] and "; suspect rank 1: stopped (state T)" in lines[0]
    assert done.stdout.count("from the rank") == 2 and "report:" in done.stdout


def test_nothing_is_left_when_the_harness_is_killed(jobs):
    argv = [sys.executable, "-m", "dtprobe", "watch", "--out", str(jobs.shared / "runs"), "--"]
    environ = {**jobs.environ, "PYTHONPATH": str(ROOT)}
    harness = subprocess.Popen(
        [*argv, *jobs.command(HANGS["stopped"])], env=environ, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        give_up = time.monotonic() + LIMIT_S
        ranks: list[processes.Identity] = []
        while len(ranks) < 2 or not (jobs.shared / "progress-1").exists():
            assert time.monotonic() < give_up and harness.poll() is None
            time.sleep(0.1)
            files = jobs.shared.glob("runs/watch/*/control/0/rank*/process.json")
            found = [processes.identity(json.loads(file.read_text())["pid"]) for file in files]
            ranks = [one for one in found if one is not None]
    finally:
        harness.kill()
        harness.wait()
    give_up = time.monotonic() + 30
    while any(one.alive() for one in ranks):
        assert time.monotonic() < give_up, "ranks outlive the harness"
        time.sleep(0.05)
    while processes.marked(next(jobs.shared.glob("runs/watch/*")).name):
        assert time.monotonic() < give_up, "the warden outlives the harness"
        time.sleep(0.05)


@pytest.mark.nightly
@pytest.mark.parametrize("turn", range(10))
@pytest.mark.parametrize("kind", [*HANGS, "black hole"])
def test_a_hang_is_found_within_20_s_of_the_last_progress_ten_times_of_ten(jobs, kind, turn):
    code, launcher = (HOLE, NAMESPACES) if kind == "black hole" else (HANGS[kind], LAUNCHER)
    if kind == "black hole" and os.getuid() != 0:
        pytest.skip("namespaces joined by veth need the superuser")
    result = jobs.watch(jobs.command(code, launcher=launcher), suspect_s=15)
    check_hang(jobs, result, "all" if kind == "black hole" else [1])
    assert (jobs.told.hangs[0].t_ns - jobs.last_progress_ns()) / 1e9 < 20


@pytest.mark.nightly
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", range(60))
def test_sixty_healthy_runs_raise_no_alarm(jobs, seed):
    code = HEALTHY.format(start=20, seed=seed, compute=40, checkpoint=20, child=18, asleep=18)
    result = jobs.watch(jobs.command(code), suspect_s=15, timeout_s=500)
    assert result.well and not jobs.told.hangs, (result.json, jobs.output(result))
