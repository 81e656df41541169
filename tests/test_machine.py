"""Facts of the machine: true to what other tools say, silent about secrets, null where nothing can be known."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from dtprobe.machine import HIDDEN, git_state, machine_facts, versions, without_secrets


def test_facts_agree_with_the_machine() -> None:
    facts = machine_facts()
    assert facts.kernel.endswith(platform.release())
    assert facts.cores == len(os.sched_getaffinity(0))
    assert facts.memory_bytes == psutil.virtual_memory().total
    assert facts.python == platform.python_version()
    assert json.loads(json.dumps(facts.as_json()))["cores"] == facts.cores


def test_no_value_of_the_environment_is_recorded() -> None:
    environ = {
        "KUBERNETES_SERVICE_HOST": "s3cret-1",
        "SLURM_JOB_ID": "s3cret-2",
        "AWS_SECRET_ACCESS_KEY": "s3cret-3",
        "CI": "true",
    }
    facts = machine_facts(environ=environ)
    assert {"kubernetes", "slurm", "ci"} <= set(facts.container)
    assert "s3cret" not in json.dumps(facts.as_json())


@pytest.fixture
def bare(tmp_path: Path) -> Path:
    """A root without any file of interest."""
    return tmp_path


def lay(root: Path, path: str, text: str) -> None:
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(text)


def test_what_cannot_be_known_is_null(bare: Path) -> None:
    facts = machine_facts(environ={}, root=bare)
    assert (facts.cpu, facts.distribution, facts.cpu_quota, facts.nvidia_driver) == (None, None, None, None)
    assert (facts.gpus, facts.container) == ((), ())


def test_gpus_and_driver_are_read_from_the_drivers_own_files(bare: Path) -> None:
    for number in range(2):
        lay(bare, f"proc/driver/nvidia/gpus/0000:0{number}:00.0/information", "Model: \t\t NVIDIA H200\nIRQ: 5\n")
    version = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release Build\nGCC version: gcc 12.3.0\n"
    lay(bare, "proc/driver/nvidia/version", version)
    facts = machine_facts(environ={}, root=bare)
    assert facts.gpus == ("NVIDIA H200", "NVIDIA H200")
    assert facts.nvidia_driver == "570.86.15"


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        (
            {
                "proc/self/cgroup": "0::/a/b\n",
                "sys/fs/cgroup/a/b/cpu.max": "max 100000\n",
                "sys/fs/cgroup/a/cpu.max": "150000 100000\n",
            },
            1.5,
        ),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "max 100000\n"}, None),
        (
            {
                "proc/self/cgroup": "4:cpu,cpuacct:/job\n",
                "sys/fs/cgroup/cpu/job/cpu.cfs_quota_us": "20000\n",
                "sys/fs/cgroup/cpu/job/cpu.cfs_period_us": "100000\n",
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
            },
            0.2,
        ),
    ],
    ids=["v2-parent", "v2-none", "v1"],
)
def test_the_tightest_processor_quota_counts(bare: Path, files: dict[str, str], quota: float | None) -> None:
    for path, text in files.items():
        lay(bare, path, text)
    assert machine_facts(environ={}, root=bare).cpu_quota == quota


def test_versions_come_without_importing_anything() -> None:
    program = "import sys; from dtprobe.machine import versions; print(versions(('numpy', 'no-such-thing'))); print('numpy' in sys.modules)"
    done = subprocess.run((sys.executable, "-c", program), capture_output=True, text=True, check=True, timeout=60)
    found, imported = done.stdout.splitlines()
    assert found.startswith("{'numpy': '")
    assert "no-such-thing" not in found
    assert imported == "False"
    assert "pytest" in versions(("pytest",))


def git(folder: Path, *arguments: str) -> None:
    identity = ("-c", "user.name=t", "-c", "user.email=t@example.org")
    subprocess.run(("git", "-C", str(folder), *identity, *arguments), check=True, capture_output=True, timeout=30)


@pytest.mark.needs("git")
def test_the_commit_is_told_and_whether_tracked_files_differ_from_it(tmp_path: Path) -> None:
    assert git_state(tmp_path, environ={**os.environ, "GIT_CEILING_DIRECTORIES": str(tmp_path.parent)}) is None
    git(tmp_path, "init", "-q")
    assert git_state(tmp_path) is None, "no commit yet"
    (tmp_path / "file").write_text("1")
    git(tmp_path, "add", "file")
    git(tmp_path, "commit", "-qm", "one")
    (tmp_path / "untracked").write_text("1")
    clean = git_state(tmp_path)
    assert clean is not None
    assert (len(clean.commit), clean.dirty) == (40, False)
    (tmp_path / "file").write_text("2")
    dirty = git_state(tmp_path)
    assert dirty is not None
    assert (dirty.commit, dirty.dirty) == (clean.commit, True)


def test_a_git_that_hangs_or_is_absent_costs_its_timeout_and_gives_null(tmp_path: Path) -> None:
    assert git_state(tmp_path, environ={"PATH": str(tmp_path)}) is None
    (tmp_path / "git").write_text("#!/bin/sh\nexec sleep 600\n")
    (tmp_path / "git").chmod(0o755)
    assert git_state(tmp_path, environ={"PATH": f"{tmp_path}:/usr/bin:/bin"}, timeout_s=0.2) is None


@pytest.mark.parametrize(
    ("argv", "shown"),
    [
        (["run", "--api-key", "X", "name"], ["run", "--api-key", HIDDEN, "name"]),
        (["--api-key=X"], [f"--api-key={HIDDEN}"]),
        (["HF_TOKEN=X", "python"], [f"HF_TOKEN={HIDDEN}", "python"]),
        (["--password", "--verbose"], ["--password", "--verbose"]),
        (["https://user:X@host/p", "s3://bucket/key"], [f"https://{HIDDEN}@host/p", "s3://bucket/key"]),
        (
            ["--tokenizer", "bpe", "--max-tokens", "5", "--author=me"],
            ["--tokenizer", "bpe", "--max-tokens", "5", "--author=me"],
        ),
        (["--seed=7", "--out", "runs"], ["--seed=7", "--out", "runs"]),
    ],
)
def test_a_recorded_command_line_holds_no_secret(argv: list[str], shown: list[str]) -> None:
    assert without_secrets(argv) == shown
