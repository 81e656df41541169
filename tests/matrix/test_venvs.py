"""One venv a pair, built once: by uv and by pip, whole or absent after a kill, and the reason where it cannot be had."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from dtprobe.errors import DtprobeError, Unavailable, UsageError
from dtprobe.matrix import interpreters, venvs
from dtprobe.matrix.cells import NONE, Install

HERE = f"{sys.version_info.major}.{sys.version_info.minor}"


def get(mirror, torch="2.12.0", python=HERE, said=None, **install):
    install = Install(**{"build": "cpu", **install})
    return venvs.get(python, torch, install, environ=mirror.environ, say=(said if said is not None else []).append)


def parts(mirror):
    return [path.name for path in venvs.cache(mirror.environ).glob(".*.part-*")]


def version_in(venv):
    asked = [venv.interpreter, "-c", "import torch; print(torch.__version__, torch.__file__)"]
    return subprocess.run(asked, capture_output=True, text=True, check=True).stdout.split()


@pytest.mark.parametrize("installer", ["uv", pytest.param("pip", marks=pytest.mark.nightly)])
def test_a_venv_is_built_once_and_says_by_what(mirror, installer):
    said = []
    first = get(mirror, said=said, installer=installer)
    assert first.new and first.installer.startswith("uv " if installer == "uv" else "venv and pip")
    assert f"torch {first.torch}" in said[0] and len(said) == 3
    version, place = version_in(first)
    assert version == "2.12.0" and place.startswith(str(first.folder)), "its own torch, not that of the tests"
    assert list(Path(place).parent.glob("__pycache__/later.*.pyc")), "nobody imported it yet: else each rank would compile it"
    script = first.folder / "bin" / "pip"
    assert installer == "uv" or str(first.folder / "bin") in script.read_text(), (
        "scripts name the interpreter at its final place"
    )
    again = get(mirror, said=said, installer=installer)
    assert not again.new and again.folder == first.folder and len(said) == 3
    assert get(mirror, torch=NONE, installer=installer).folder != first.folder
    assert not parts(mirror)


def test_what_cannot_be_had_says_why_and_what_helps(mirror):
    def said(**asked):
        found = get(mirror, **asked)
        assert isinstance(found, Unavailable) and found.remedy, asked
        return found.reason

    assert "torch==2.11.1" in said(torch="2.11.1") and "\n" not in said(torch="2.11.1")
    assert "torch==2.11.1" in said(torch="2.11.1", installer="pip")
    assert "a CUDA build only (1 packages of CUDA" in said(torch="2.15.0")
    assert "libcudart.so.13 is missing" in said(torch="2.8.0"), "what does not load is no venv"
    assert "no Python 3.4 on this machine" in said(python="3.4")
    assert not parts(mirror)
    assert not isinstance(get(mirror, torch="2.15.0", build="any"), Unavailable)


def test_an_index_that_cannot_be_reached_is_a_failure_and_not_a_missing_version(mirror):
    away = {**mirror.environ, "PIP_NO_INDEX": "0", "PIP_INDEX_URL": "http://127.0.0.1:9/simple", "UV_HTTP_RETRIES": "0"}
    with pytest.raises(DtprobeError, match="--resume"):
        venvs.get(HERE, "2.11.1", Install(build="cpu"), environ=away, say=[].append)


PROGRAM = """
import json, sys
from dtprobe.matrix import venvs
from dtprobe.matrix.cells import Install
environ = json.load(sys.stdin)
venvs.get(sys.argv[1], "2.12.0", Install(build="cpu", installer="pip"), environ=environ, say=lambda line: print(line, flush=True))
"""


@pytest.mark.nightly
def test_a_kill_leaves_no_half_venv_and_the_next_build_clears_what_it_left(mirror):
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, HERE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    process.stdin.write(json.dumps(mirror.environ))
    process.stdin.close()
    for line in process.stdout:
        if "installing" in line:
            break
    until = time.monotonic() + 30
    while not parts(mirror) and time.monotonic() < until:
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    process.stdout.close()
    assert parts(mirror) and not list(venvs.cache(mirror.environ).glob("py*")), "there is no venv yet"
    found = get(mirror, installer="pip")
    assert found.new and version_in(found)[0] == "2.12.0"
    assert not parts(mirror)


def test_two_at_once_build_one(mirror):
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda _: get(mirror, installer="uv"), range(2)))
    assert {one.folder for one in found} == {found[0].folder}
    assert sorted(one.new for one in found) == [False, True]


def test_one_that_was_damaged_is_built_anew_and_another_requirement_makes_another(mirror):
    first = get(mirror)
    (first.folder / venvs.READY).write_text("{")
    again = get(mirror)
    assert again.new and again.folder == first.folder
    assert get(mirror, extras=("network",)).folder != first.folder
    names = [place for place, _ in venvs.listed(mirror.environ, remove=None, say=print)]
    assert len(names) == 2
    venvs.listed(mirror.environ, remove=first.folder.name, say=print)
    assert not first.folder.exists() and not parts(mirror)
    with pytest.raises(UsageError, match="no such venv"):
        venvs.listed(mirror.environ, remove="py9", say=print)


def test_an_interpreter_that_does_not_run_is_passed_over(tmp_path):
    shim = tmp_path / "python3.4"
    shim.write_text("#!/bin/sh\nexit 127\n")
    shim.chmod(0o755)
    found = interpreters.find("3.4", {"PATH": str(tmp_path), "HOME": str(tmp_path)})
    assert isinstance(found, Unavailable) and "python3.4 does not run" in found.reason
    real = tmp_path / ".pyenv/versions/3.4.9/bin/python3.4"
    real.parent.mkdir(parents=True)
    real.write_text('#!/bin/sh\necho \'["3.4.9", "CPython"]\'\n')
    real.chmod(0o755)
    assert interpreters.find("3.4", {"PATH": str(tmp_path), "HOME": str(tmp_path)}).version == "3.4.9"
    assert isinstance(interpreters.find("3.4.1", {"PATH": str(tmp_path), "HOME": str(tmp_path)}), Unavailable)
