"""Confinement with real processes: what is started ends, whatever it does and whoever dies."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from dtprobe import cgroup, ledger, processes, undo
from dtprobe.confine import Child, Confinement
from dtprobe.errors import DtprobeError, Unavailable

ROOT = Path(processes.__file__).resolve().parents[1]
PYTHON = (sys.executable, "-I", "-S", "-c")
PATIENCE_S = 60.0


@dataclass(frozen=True)
class Place:
    """Where a run of this test keeps its things."""

    run_id: str
    folder: Path

    @property
    def environ(self) -> dict[str, str]:
        return {**os.environ, "XDG_STATE_HOME": str(self.folder / "state"), "TMPDIR": str(self.folder / "tmp")}

    def left(self) -> list[str]:
        """Everything of the run that is still there."""
        found = [processes.describe(one) for one, _ in processes.marked(self.run_id)]
        found += [str(path) for path in (self.folder / "tmp").iterdir()]
        found += [str(path) for path in ledger.folder(self.environ).glob("*")]
        found += [str(path) for path in undo.SHM.glob(f"*{self.run_id}*")]
        group = cgroup.place(
            f"dtprobe-{self.run_id}",
            mountinfo=Path("/proc/self/mountinfo").read_text(encoding="utf-8"),
            membership=Path("/proc/self/cgroup").read_text(encoding="utf-8"),
        )
        return found + ([str(group)] if isinstance(group, Path) and group.exists() else [])


@pytest.fixture
def place(tmp_path: Path) -> Place:
    (tmp_path / "tmp").mkdir()
    return Place(f"test-{uuid.uuid4().hex[:12]}", tmp_path)


@pytest.fixture
def box(place: Place) -> Iterator[Confinement]:
    with Confinement.open(place.run_id, environ=place.environ) as opened:
        yield opened
    assert place.left() == []


def start(box: Confinement, program: str, *args: str, held: bool = False) -> Child:
    """A child that runs a line of Python; its output goes to `out` and `err` of the test's folder."""
    folder = box.scratch.parent.parent
    argv = [*PYTHON, program, *args]
    return box.spawn(argv, env=dict(os.environ), cwd=folder, stdout=folder / "out", stderr=folder / "err", held=held)


def eventually(true: Callable[[], object], what: str) -> None:
    give_up = time.monotonic() + PATIENCE_S
    while not true():
        assert time.monotonic() < give_up, what
        time.sleep(0.01)


def settled(place: Place) -> list[str]:
    """What is left of the run once nothing is, or after our patience."""
    give_up = time.monotonic() + PATIENCE_S
    while (left := place.left()) and time.monotonic() < give_up:
        time.sleep(0.02)
    return left


def said(box: Confinement, lines: int) -> list[str]:
    """The first lines of the output, once they are all there."""
    path = box.scratch.parent.parent / "out"
    eventually(lambda: path.exists() and path.read_text().count("\n") >= lines, f"fewer than {lines} lines of output")
    return path.read_text().split()


FAMILY = """
import os, signal, sys, time
def tell():
    os.write(1, f"{os.getpid()}\\n".encode())
def stay():
    tell()
    time.sleep(600)
if os.fork() == 0:                # a daemon as the book has it
    os.setsid()
    if os.fork() == 0:
        os.setsid()
        stay()
    os._exit(0)
if os.fork() == 0:                # stopped
    tell()
    os.kill(os.getpid(), signal.SIGSTOP)
    stay()
if os.fork() == 0:                # deaf, and without the marker
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.execve(sys.executable, [sys.executable, "-I", "-S", "-c",
        "import os, time; os.write(1, f'{os.getpid()}\\\\n'.encode()); time.sleep(600)"], {})
for _ in range(30):               # many
    if os.fork() == 0:
        stay()
stay()
"""
FAMILY_SIZE = 34


def test_kill_all_ends_daemons_stopped_deaf_and_unmarked_processes(box: Confinement) -> None:
    start(box, FAMILY)
    pids = [int(line) for line in said(box, FAMILY_SIZE)]
    assert len([pid for pid in pids if processes.read(pid)]) == FAMILY_SIZE
    assert box.kill_all() == ()
    assert [pid for pid in pids if processes.read(pid)] == []


def test_processes_that_fork_while_they_are_killed_end_too(box: Confinement) -> None:
    bomb = """
import os, time
os.write(1, b"x\\n")
end = time.monotonic() + 20
while time.monotonic() < end:     # each lives for a moment and has at most two children: bounded, yet never still
    if (pid := os.fork()) == 0:
        os.setsid()
        time.sleep(0.001)
        if os.fork() == 0:
            continue
        os._exit(0)
    os.waitpid(pid, 0)
"""
    start(box, bomb)
    said(box, 1)
    assert box.kill_all() == ()
    assert processes.descendants(box.warden_pid) == []


def test_a_confinement_goes_on_after_kill_all(box: Confinement) -> None:
    box.kill_all()
    ended = box.wait(start(box, "raise SystemExit(5)"), PATIENCE_S)
    assert ended is not None and (ended.code, ended.signal) == (5, None)


def test_an_exit_tells_signal_and_processor_time(box: Confinement) -> None:
    work = "import os, time\nwhile time.process_time() < 0.2: pass\nos.kill(os.getpid(), 11)"
    ended = box.wait(start(box, work), PATIENCE_S)
    assert ended is not None and (ended.code, ended.signal) == (None, signal.SIGSEGV)
    assert ended.cpu_s >= 0.2 and ended.wall_s > 0


def test_processor_time_includes_children_that_were_waited_for(box: Confinement) -> None:
    work = "import os, time\nif os.fork() == 0:\n while time.process_time() < 0.2: pass\nelse: os.wait()"
    ended = box.wait(start(box, work), PATIENCE_S)
    assert ended is not None and ended.cpu_s >= 0.2


def test_wait_gives_up_after_its_time(box: Confinement) -> None:
    child = start(box, "import time; time.sleep(600)")
    assert box.wait(child, timeout_s=0.05) is None
    assert box.poll(child) is None
    assert box.signal(child, signal.SIGTERM)
    ended = box.wait(child, PATIENCE_S)
    assert ended is not None and ended.signal == signal.SIGTERM
    assert not box.signal(child, signal.SIGTERM)


def test_a_held_child_has_its_pid_and_session_and_waits(box: Confinement) -> None:
    child = start(box, "import os; print(os.getpid(), os.getsid(0))", held=True)
    held = processes.read(child.pid)
    assert held is not None and held.start == child.start
    assert box.wait(child, timeout_s=0.1) is None
    box.release(child)
    box.release(child)
    assert box.wait(child, PATIENCE_S) is not None
    assert said(box, 1) == [str(child.pid), str(child.pid)]


def test_a_held_child_can_be_killed_and_released_no_more(box: Confinement) -> None:
    child = start(box, "print('ran')", held=True)
    box.kill_all()
    ended = box.wait(child, PATIENCE_S)
    assert ended is not None and ended.signal == signal.SIGKILL
    with pytest.raises(DtprobeError, match="ended before it was released"):
        box.release(child)


def test_a_rank_starts_with_default_signals_and_no_foreign_descriptor(box: Confinement) -> None:
    first = start(box, "import time; time.sleep(600)", held=True)
    start(
        box,
        "import os, signal\n"
        "print(signal.getsignal(signal.SIGTERM) == signal.SIG_DFL, signal.pthread_sigmask(signal.SIG_BLOCK, ()) == set(),"
        "sorted(os.listdir('/proc/self/fd'))[:3], len(os.listdir('/proc/self/fd')), sep='|')",
    )
    assert "".join(said(box, 1)) == "True|True|['0','1','2']|4"  # the fourth lists the folder
    assert box.poll(first) is None


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["/nowhere/program"], "cannot execute /nowhere/program: No such file or directory"),
        (["no-such-program-anywhere"], "cannot execute no-such-program-anywhere: No such file or directory"),
        (["/etc/passwd"], "cannot execute /etc/passwd: Permission denied"),
        (["/"], "cannot execute /: Permission denied"),
    ],
)
def test_a_program_that_cannot_be_executed_is_one_clear_line(box: Confinement, argv: list[str], message: str) -> None:
    files = {"stdout": box.scratch / "out", "stderr": box.scratch / "err"}
    child = box.spawn(argv, env=dict(os.environ), cwd=box.scratch, **files)
    with pytest.raises(DtprobeError) as raised:
        box.release(child)
    assert str(raised.value) == message
    ended = box.wait(child, PATIENCE_S)
    assert ended is not None and ended.code == 127


def test_files_and_folders_that_do_not_exist_are_one_clear_line(box: Confinement) -> None:
    files = {"stdout": box.scratch / "out", "stderr": box.scratch / "err"}
    with pytest.raises(DtprobeError, match=r"cannot open /nowhere/out: No such file"):
        box.spawn(["true"], env={}, cwd=box.scratch, stdout=Path("/nowhere/out"), stderr=files["stderr"])
    with pytest.raises(DtprobeError, match="cannot enter the folder /nowhere: No such file"):
        box.spawn(["true"], env=dict(os.environ), cwd=Path("/nowhere"), held=False, **files)


def test_environment_and_arguments_pass_bytes_that_are_no_text(box: Confinement) -> None:
    odd = os.fsdecode(b"\xff\xfe \n'\"")
    child = box.spawn(
        [*PYTHON, "import os, sys; print(os.fsencode(sys.argv[1]) == os.environb[b'ODD'])", odd],
        env={"ODD": odd},
        cwd=box.scratch,
        stdout=box.scratch.parent.parent / "out",
        stderr=box.scratch / "err",
        held=False,
    )
    box.wait(child, PATIENCE_S)
    assert said(box, 1) == ["True"]


def test_a_grandchild_that_keeps_the_output_open_delays_nobody(box: Confinement) -> None:
    child = start(box, "import os, time\nif os.fork() == 0:\n os.write(1, f'{os.getpid()}\\n'.encode()); time.sleep(600)")
    ended = box.wait(child, PATIENCE_S)
    assert ended is not None and ended.code == 0
    (pid,) = map(int, said(box, 1))
    assert processes.read(pid) is not None
    box.kill_all()
    assert processes.read(pid) is None
    assert box.orphan(pid) is not None


def test_a_tracer_in_front_leaves_the_pid_the_ranks(box: Confinement) -> None:
    """The shape of `strace -D`: the program's process stays, the tracer is a detached grandchild that must end too."""
    program = (
        "import os, sys, time\n"
        "if os.fork() == 0:\n"
        " if os.fork() == 0: os.setsid(); time.sleep(600)\n"
        " os._exit(0)\n"
        "os.wait()\n"
        "os.execv(sys.executable, [sys.executable, '-I', '-S', '-c', 'import os; print(os.getpid())'])"
    )
    child = start(box, program)
    ended = box.wait(child, PATIENCE_S)
    assert ended is not None and said(box, 1) == [str(child.pid)]


@pytest.mark.needs("strace")
def test_strace_in_front_of_a_rank_records_it_and_keeps_its_pid(box: Confinement) -> None:
    trace = box.scratch / "trace"
    child = box.spawn(
        ["strace", "-D", "-f", "-o", str(trace), *PYTHON, "import os; print(os.getpid())"],
        env=dict(os.environ),
        cwd=box.scratch,
        stdout=box.scratch.parent.parent / "out",
        stderr=box.scratch / "err",
    )
    box.release(child)
    ended = box.wait(child, PATIENCE_S)
    assert ended is not None and ended.code == 0
    assert said(box, 1) == [str(child.pid)]
    eventually(lambda: f"{child.pid} +++ exited with 0 +++" in trace.read_text().replace("  ", " "), "no end in the trace")


def test_the_scratch_folder_is_private(box: Confinement) -> None:
    assert box.scratch.stat().st_mode & 0o777 == 0o700


def test_what_ranks_make_unreadable_in_scratch_is_removed(place: Place) -> None:
    with Confinement.open(place.run_id, environ=place.environ) as box:
        (box.scratch / "a" / "b").mkdir(parents=True)
        (box.scratch / "a" / "b" / "file").touch()
        (box.scratch / "a" / "link").symlink_to(place.folder)
        (box.scratch / "a" / "b").chmod(0o000)
        (box.scratch / "a").chmod(0o500)
    assert place.left() == []
    assert place.folder.exists()


def test_the_cgroup_is_there_with_the_ranks_in_it_or_says_why_not(box: Confinement) -> None:
    child = start(box, "import time; time.sleep(600)")
    if isinstance(box.cgroup, Unavailable):
        assert box.cgroup.reason
        pytest.skip(str(box.cgroup))
    assert str(child.pid) in (box.cgroup / "cgroup.procs").read_text().split()
    assert cgroup.version(box.cgroup) in (1, 2)


def test_undo_steps_run_last_first_and_a_reverted_one_only_once(place: Place) -> None:
    log = place.folder / "log"

    def note(box: Confinement, word: str) -> int:
        return box.undo("command", argv=["sh", "-c", 'echo "$1" >> "$0"', str(log), word])

    with Confinement.open(place.run_id, environ=place.environ) as box:
        note(box, "first")
        ticket = note(box, "second")
        note(box, "third")
        box.revert(ticket)
        box.revert(ticket)
        assert log.read_text().split() == ["second"]
    assert log.read_text().split() == ["second", "third", "first"]


def test_what_exists_already_cannot_be_announced(box: Confinement) -> None:
    mine = box.scratch.parent.parent / "mine"
    mine.touch()
    with pytest.raises(DtprobeError, match="exists already, so it is not this run's to remove"):
        box.undo("file", path=str(mine))
    with pytest.raises(DtprobeError, match="unknown kind 'nonsense'"):
        box.undo("nonsense")
    with pytest.raises(DtprobeError, match="file: missing path"):
        box.undo("file")


def test_an_undo_step_that_fails_is_told_and_kept_for_the_doctor(place: Place) -> None:
    box = Confinement.open(place.run_id, environ=place.environ)
    box.undo("command", argv=["false"])
    problems = box.close()
    assert any("command false: exit 1" in problem for problem in problems)
    assert box.journal.exists() and not box.scratch.exists()
    box.journal.unlink()
    assert place.left() == []


def test_a_run_id_in_use_is_refused_and_the_other_run_stays(box: Confinement, place: Place) -> None:
    child = start(box, "import time; time.sleep(600)")
    with pytest.raises(DtprobeError, match="is open already"):
        Confinement.open(place.run_id, environ=place.environ)
    assert box.poll(child) is None and box.journal.exists() and box.scratch.is_dir()


@pytest.mark.parametrize(
    ("variable", "message"), [("XDG_STATE_HOME", "cannot write the journal"), ("TMPDIR", "cannot make a temporary folder in")]
)
def test_folders_that_cannot_be_written_are_one_clear_line(place: Place, variable: str, message: str) -> None:
    obstacle = place.folder / "a-file"
    obstacle.touch()
    with pytest.raises(DtprobeError, match=f"{message}.*{variable}"):
        Confinement.open(place.run_id, environ={**place.environ, variable: str(obstacle)})
    assert place.left() == []


def test_a_run_id_that_is_a_path_is_refused(place: Place) -> None:
    with pytest.raises(DtprobeError, match="is not made of letters"):
        Confinement.open("../elsewhere", environ=place.environ)
    assert place.left() == []


def test_a_closed_confinement_refuses_with_a_clear_line(place: Place) -> None:
    box = Confinement.open(place.run_id, environ=place.environ)
    assert box.close() == () == box.close()
    with pytest.raises(DtprobeError, match="is closed: cannot spawn"):
        start(box, "pass")


def test_processes_that_the_harness_starts_with_the_marker_end_too(place: Place) -> None:
    with Confinement.open(place.run_id, environ=place.environ) as box:
        helper = subprocess.Popen([*PYTHON, "import time; time.sleep(600)"], env=box.marker)
    assert helper.wait(PATIENCE_S) == -signal.SIGKILL


def test_torch_segments_of_ended_ranks_are_removed_and_others_stay(box: Confinement, place: Place) -> None:
    foreign = undo.SHM / f"torch_999999_{place.run_id}_0"
    foreign.touch()
    try:
        start(box, f"import os; open(f'{undo.SHM}/torch_{{os.getpid()}}_{place.run_id}_0', 'x').close(); os.write(1, b'x\\n')")
        said(box, 1)
        eventually(lambda: '"shm"' in box.journal.read_text(), "the segment was not seen")
        box.kill_all()
        assert list(undo.SHM.glob(f"*{place.run_id}*")) == [foreign]
    finally:
        foreign.unlink()


def test_a_segment_goes_whose_maker_had_no_marker_and_is_gone(box: Confinement, place: Place) -> None:
    maker = f"import os; open(f'{undo.SHM}/torch_{{os.getpid()}}_{place.run_id}_0', 'x').close()"
    orphan = (
        f"import os, sys\nif os.fork() == 0: os.execve(sys.executable, [sys.executable, '-I', '-S', '-c', {maker!r}], {{}})"
    )
    box.wait(start(box, orphan), PATIENCE_S)
    eventually(lambda: processes.descendants(box.warden_pid) == [], "the maker lives on")
    assert len(list(undo.SHM.glob(f"*{place.run_id}*"))) == 1
    box.kill_all()
    assert list(undo.SHM.glob(f"*{place.run_id}*")) == []


def test_segments_without_a_pid_in_their_name_go_when_a_rank_held_them(box: Confinement, place: Place) -> None:
    foreign = undo.SHM / f"psm_other_{place.run_id}"
    foreign.touch()
    try:
        start(box, f"import time; f = open('{undo.SHM}/nccl_{place.run_id}', 'x'); print('x', flush=True); time.sleep(600)")
        said(box, 1)
        box.kill_all()
        assert list(undo.SHM.glob(f"*{place.run_id}*")) == [foreign]
    finally:
        foreign.unlink()


@pytest.mark.needs("torch")
def test_torchs_shared_memory_manager_and_its_segments_end_with_the_ranks(place: Place) -> None:
    # The manager's socket must fit into 108 characters, which pytest's own folders leave too few of.
    with (
        tempfile.TemporaryDirectory() as short,
        Confinement.open(place.run_id, environ={**place.environ, "TMPDIR": short}) as box,
    ):
        share_tensors(box, place)
    assert place.left() == []


def share_tensors(box: Confinement, place: Place) -> None:
    program = (
        "import os, time, torch, torch.multiprocessing as mp\n"
        "mp.set_sharing_strategy('file_system')\n"
        "kept = [torch.ones(1000).share_memory_() for _ in range(3)]\n"
        "os.write(1, f'{os.getpid()}\\n'.encode())\n"
        "time.sleep(600)"
    )
    files = {"stdout": place.folder / "out", "stderr": place.folder / "err"}
    environ = {**os.environ, "TMPDIR": str(box.scratch)}
    box.spawn([sys.executable, "-c", program], env=environ, cwd=place.folder, held=False, **files)
    out = place.folder / "out"
    eventually(lambda: out.exists() and "\n" in out.read_text(), "torch did not start")
    pid = out.read_text().strip()
    assert any(one.name.startswith("torch_shm") for one in processes.descendants(box.warden_pid))
    assert list(undo.SHM.glob(f"torch_{pid}_*"))
    assert box.kill_all() == ()
    assert list(undo.SHM.glob(f"torch_{pid}_*")) == []
    assert processes.descendants(box.warden_pid) == []


def test_a_killed_warden_takes_its_ranks_along_and_close_cleans_the_rest(place: Place) -> None:
    box = Confinement.open(place.run_id, environ=place.environ)
    child = start(box, "import os, time\nif os.fork() == 0: os.setsid()\nos.write(1, b'x\\n')\ntime.sleep(600)")
    said(box, 2)
    os.kill(box.warden_pid, signal.SIGKILL)
    eventually(lambda: processes.read(child.pid) is None, "the rank outlived the warden")
    with pytest.raises(DtprobeError, match=r"the warden .* died"):
        box.kill_all()
    with pytest.raises(DtprobeError, match=r"the warden .* died"):
        box.wait(child, timeout_s=1)
    assert len(processes.marked(place.run_id)) == 1  # the child in its own session: nobody's, until we clean
    box.close()
    assert place.left() == []


def test_a_stopped_warden_is_woken_to_close(place: Place) -> None:
    box = Confinement.open(place.run_id, environ=place.environ)
    start(box, "import time; time.sleep(600)")
    os.kill(box.warden_pid, signal.SIGSTOP)
    assert box.close() == ()
    assert place.left() == []


def test_sigterm_to_the_warden_takes_the_run_down(place: Place) -> None:
    box = Confinement.open(place.run_id, environ=place.environ)
    start(box, "import time; time.sleep(600)")
    os.kill(box.warden_pid, signal.SIGTERM)
    assert settled(place) == []
    box.close()


HARNESS = """
import os, sys, time
from pathlib import Path
from dtprobe.confine import Confinement
run_id, folder, family = sys.argv[1], Path(sys.argv[2]), sys.argv[3]
def step(word):
    print(word, flush=True)
step("imported")
with Confinement.open(run_id) as box:
    step("opened")
    for arm in range(3):
        children = []
        for rank in range(3):
            files = {"stdout": folder / "out", "stderr": folder / "err"}
            children.append(box.spawn([sys.executable, "-I", "-S", "-c", family], env=dict(os.environ), cwd=folder, **files))
            step("spawned")
        for child in children:
            box.release(child)
        step("released")
        box.undo("file", path=str(box.scratch.parent / f"file{arm}"))
        (box.scratch.parent / f"file{arm}").touch()
        step("made")
        box.wait(children[0], timeout_s=0.1)
        box.kill_all()
        step("killed")
step("closed")
"""
STEPS = ["imported", "opened", *(3 * ["spawned", "spawned", "spawned", "released", "made", "killed"]), "closed"]
SEGMENT = """
import mmap
name = f"/dev/shm/torch_{os.getpid()}_RUN_0"
with open(name, "xb") as file:
    file.truncate(4096)
"""


def killed_harness(place: Place, step: int, pause_s: float) -> list[str]:
    """Run a harness, SIGKILL it `pause_s` after it said its step number `step`, and answer what is left in the end."""
    family = FAMILY.replace("def tell", SEGMENT.replace("RUN", place.run_id) + "def tell", 1)
    harness = subprocess.Popen(
        [sys.executable, "-c", HARNESS, place.run_id, str(place.folder), family],
        env={**place.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert harness.stdout is not None
    for _ in range(step + 1):
        assert harness.stdout.readline()
    time.sleep(pause_s)
    harness.kill()
    harness.wait()
    harness.stdout.close()
    return settled(place)


@pytest.mark.parametrize("step", [0, 1, 3, 5, 7])
def test_sigkill_of_the_harness_leaves_nothing(place: Place, step: int) -> None:
    assert killed_harness(place, step, pause_s=0.003 * step) == []


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(20))
def test_sigkill_of_the_harness_at_random_moments_leaves_nothing(place: Place, seed: int) -> None:
    dice = random.Random(seed)
    assert killed_harness(place, dice.randrange(len(STEPS)), dice.uniform(0, 0.1)) == []
