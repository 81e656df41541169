"""What the README says exists, and nothing that exists is left out of it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from dtprobe import catalog
from dtprobe.inject.spec import parse

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
COMMANDS = sorted(set(re.findall(r"`dtprobe ([a-z]+)", README)))


def test_every_injector_stands_in_the_table_and_every_row_is_an_injector():
    rows = set(
        re.findall(r"^\| `([a-z-]+)` \| (?:process|c10d|nccl|store|network|filesystem|syscall|scheduler|libc) \|", README, re.M)
    )
    found, broken = catalog.injectors()
    assert broken == ()
    assert rows == set(found)


@pytest.mark.parametrize("fault", re.findall(r"dtprobe inject (?:--dry-run )?([a-z]\S+:\S+)", README))
def test_the_faults_shown_can_be_parsed(fault):
    parse(fault, catalog.injectors()[0], world_size=2)


@pytest.mark.parametrize("command", COMMANDS)
def test_the_commands_shown_exist(command):
    done = subprocess.run(
        [sys.executable, "-m", "dtprobe", command, "--help"], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "Usage: dtprobe" in done.stdout


def test_the_make_targets_shown_exist():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M))
    assert set(re.findall(r"^make ([a-z][a-z-]+)", README, re.M)) <= targets


def test_pictures_and_links_lead_somewhere():
    for target in re.findall(r"\]\(([^)#:]+)\)", README):
        assert (ROOT / target).exists(), target
