"""The lab VM, booted: what a program finds and leaves there, how it ends, and that the VM ends whatever becomes of its starter."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from dtprobe.errors import DtprobeError, UsageError
from dtprobe.launch import lab
from dtprobe.launch.lab import vm
from dtprobe.launch.lab.leash import NICENESS, leashed

INSIDE = """
import json, os, sys
from pathlib import Path
from dtprobe import record
record("seen", cores=os.cpu_count(), here=sorted(os.listdir("/here"))[0], network=",".join(sorted(os.listdir("/sys/class/net"))))
try:
    Path("/here/new").touch()
except OSError as error:
    print(error.strerror)
Path("/both/new").write_text("from inside")
Path("/job/artifact.txt").write_text("x" * 100_000)
print(sys.argv[1:], os.environ["WORD"])
sys.exit(7)
"""


def commas(path: Path) -> Path:
    path.mkdir()
    return path


def qemus(mark: str) -> list[psutil.Process]:
    """QEMU processes that have `mark` in their command line."""
    found = []
    for one in psutil.process_iter(["name", "cmdline"]):
        if (one.info["name"] or "").startswith("qemu-system") and mark in " ".join(one.info["cmdline"] or ()):
            found.append(one)
    return found


@pytest.mark.nightly
@pytest.mark.needs("lab")
@pytest.mark.timeout(900)
def test_a_program_finds_its_shares_and_its_arguments_and_what_it_leaves_comes_back(tmp_path):
    here, both = commas(tmp_path / "re,cipe"), commas(tmp_path / "both")
    (here / "inside.py").write_text(INSIDE)
    job = lab.Job(
        argv=("python3", "inside.py", "a b", "$HOME;c"),
        cwd="/here",
        env={"WORD": "it's", "DTPROBE_RANK_FOLDER": "/job", "RANK": "0"},
        shares=(lab.Share(here, "/here"), lab.Share(both, "/both", writable=True)),
        cores=2,
        timeout_s=120,
    )

    ended = lab.run(job, out=tmp_path / "out", environ=os.environ)

    assert (ended.exit_code, ended.status, ended.timed_out) == (7, 7, False), (ended.out / "stderr.log").read_text()
    assert (ended.out / "stdout.log").read_text() == "Read-only file system\n['a b', '$HOME;c'] it's\n"
    assert (both / "new").read_text() == "from inside"
    assert (ended.out / "artifact.txt").stat().st_size == 100_000
    said = (ended.out / "events.jsonl").read_text()
    assert '"cores": 2' in said and '"network": "lo"' in said and '"here": "inside.py"' in said
    assert not (here / "new").exists()
    assert qemus(str(tmp_path)) == [] and list(ended.out.glob("vl.*")) == []


@pytest.mark.nightly
@pytest.mark.needs("lab")
@pytest.mark.timeout(900)
def test_a_program_that_does_not_end_is_ended_at_its_time_and_one_that_is_not_there_is_named(tmp_path):
    ended = lab.run(lab.Job(argv=("sleep", "1000"), timeout_s=2), out=tmp_path / "late", environ=os.environ)
    assert ended.timed_out and ended.status == 124

    with pytest.raises(DtprobeError, match=r"cannot execute nonesuch in /root: No such file"):
        lab.run(lab.Job(argv=("nonesuch",)), out=tmp_path / "none", environ=os.environ)


@pytest.mark.nightly
@pytest.mark.needs("lab")
@pytest.mark.timeout(900)
def test_a_guest_that_dies_is_said_with_the_last_words_of_its_console(tmp_path):
    crash = lab.Job(argv=("python3", "-c", "open('/proc/sysrq-trigger', 'w').write('c')"), timeout_s=30)
    with pytest.raises(DtprobeError, match=r"(?s)did not come to the end of python3.*(panic|Kernel)"):
        lab.run(crash, out=tmp_path / "out", environ=os.environ)
    assert qemus(str(tmp_path)) == []


@pytest.mark.nightly
@pytest.mark.needs("lab")
@pytest.mark.timeout(900)
@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGTERM])
def test_the_vm_ends_with_the_process_that_started_it(tmp_path, signum):
    lab.ensure(os.environ)
    program = (
        "import os, sys; from pathlib import Path; from dtprobe.launch import lab;"
        "lab.run(lab.Job(argv=('sleep', '600'), timeout_s=600), out=Path(sys.argv[1]), environ=os.environ)"
    )
    starter = subprocess.Popen([sys.executable, "-c", program, str(tmp_path / "out")], cwd=Path(lab.__file__).parents[3])
    try:
        give_up = time.monotonic() + 60
        while not qemus(str(tmp_path)) and time.monotonic() < give_up:
            time.sleep(0.1)
        [machine] = qemus(str(tmp_path))
    finally:
        starter.send_signal(signum)
        starter.wait()
    assert psutil.wait_procs([machine], timeout=10)[1] == []


def test_a_leash_kills_what_it_holds_when_its_holder_is_killed():
    holder = "import subprocess, sys; from dtprobe.launch.lab.leash import leashed; p = subprocess.Popen(leashed(['sleep', '600'])); print(p.pid, flush=True); p.wait()"
    with subprocess.Popen(
        [sys.executable, "-c", holder], stdout=subprocess.PIPE, text=True, cwd=Path(lab.__file__).parents[3]
    ) as process:
        assert process.stdout is not None
        held = psutil.Process(int(process.stdout.readline()))
        process.kill()
    assert psutil.wait_procs([held], timeout=10)[1] == []


def test_a_leash_whose_holder_is_gone_already_starts_nothing(tmp_path):
    argv = leashed(["touch", str(tmp_path / "made")])
    argv[4] = "1"  # another parent than ours
    assert subprocess.run(argv, check=False).returncode == 1
    assert not (tmp_path / "made").exists()


def test_paths_with_commas_are_one_word_of_qemu_s(tmp_path):
    image = vm.Image(tmp_path / "a,b", "key")
    words = vm.command(image, lab.Job(argv=("true",)), (lab.Share(tmp_path / "c,d", "/x"),), tmp_path / "e,f")
    assert f"file={tmp_path}/a,,b/root.img,format=raw,if=virtio,snapshot=on" in words
    assert any(f"path={tmp_path}/c,,d,security_model=none,multidevs=remap,readonly=on" in word for word in words)


def test_a_share_that_is_no_folder_and_an_out_that_is_used_are_refused_before_anything_starts(tmp_path):
    image = vm.Image(tmp_path, "key")
    if vm.shutil.which(vm.EMULATOR) is None:
        pytest.skip("no QEMU")
    with pytest.raises(UsageError, match="is no folder"):
        lab.run(
            lab.Job(argv=("true",), shares=(lab.Share(tmp_path / "none", "/x"),)),
            out=tmp_path / "out",
            environ=os.environ,
            image=image,
        )
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="is not empty"):
        lab.run(lab.Job(argv=("true",)), out=tmp_path, environ=os.environ, image=image)


def test_without_qemu_the_apt_line_is_said(tmp_path):
    with pytest.raises(DtprobeError, match="apt-get install qemu-system-x86 seabios"):
        lab.run(lab.Job(argv=("true",)), out=tmp_path / "out", environ={"PATH": str(tmp_path)})


def test_what_is_leashed_goes_before_other_programs_on_the_processors():
    printed = subprocess.run(leashed(["nice"]), capture_output=True, text=True, timeout=30, check=True)
    assert int(printed.stdout) == NICENESS or "CAP_SYS_NICE" in printed.stderr
