"""The master secret: read only from a file that is closed to others, and shown nowhere."""

from __future__ import annotations

import copy
import os
import pickle
import subprocess
import sys

import pytest

pytest.importorskip("cryptography")

from dtprobe.framework.transport.secure import MasterSecret, SecretRefused, Session


def test_a_new_secret_is_closed_to_others_and_reads_back(tmp_path):
    path = tmp_path / "secret"
    MasterSecret.create(path, fresh=lambda size: b"\x07" * size)
    assert path.stat().st_mode & 0o777 == 0o600
    assert MasterSecret.from_file(path).material() == b"\x07" * 32
    assert MasterSecret.from_environment({"DTPROBE_SECRET_FILE": str(path)}).material() == b"\x07" * 32
    with pytest.raises(SecretRefused, match="exists"):
        MasterSecret.create(path)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o602, 0o610, 0o644, 0o666])
def test_a_file_that_others_may_use_is_refused_with_its_mode_and_the_remedy(tmp_path, mode):
    path = tmp_path / "secret"
    MasterSecret.create(path)
    path.chmod(mode)
    with pytest.raises(SecretRefused, match=f"mode {mode:04o}.*chmod 600"):
        MasterSecret.from_file(path)


@pytest.mark.parametrize("text", ["", "secret", "ab" * 31, "abc", "ab" * 32 + "\n" + "cd" * 32])
def test_a_file_without_a_secret_is_refused_without_being_quoted(tmp_path, text):
    path = tmp_path / "secret"
    path.write_text(text)
    path.chmod(0o600)
    with pytest.raises(SecretRefused) as error:
        MasterSecret.from_file(path)
    assert "abab" not in str(error.value)


def test_what_is_no_regular_file_or_not_there_is_refused(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe, 0o600)
    for path in (pipe, tmp_path, tmp_path / "none"):
        with pytest.raises(SecretRefused):
            MasterSecret.from_file(path)
    with pytest.raises(SecretRefused, match="DTPROBE_SECRET_FILE"):
        MasterSecret.from_environment({})


def test_a_secret_is_shown_nowhere():
    secret = MasterSecret(b"top-secret" * 4)
    session = Session.between(secret, "world", {0: b"fresh-bytes"})
    for shown in (repr(secret), str(secret), f"{secret}", repr(session), repr([secret]), str(vars(session))):
        assert "top-secret" not in shown and b"top-secret".hex() not in shown and "transcript=" not in shown
    for attempt in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(SecretRefused):
            attempt(secret)


def test_the_command_makes_a_secret_and_says_in_one_line_what_is_wrong(tmp_path):
    def command(*arguments: str) -> subprocess.CompletedProcess[str]:
        program = [sys.executable, "-m", "dtprobe.framework.transport.secure", *arguments]
        return subprocess.run(program, capture_output=True, text=True, timeout=60, check=False)

    path = str(tmp_path / "secret")
    assert command("new", path).returncode == 0
    (tmp_path / "secret").chmod(0o644)
    refused = command("run", "--secret-file", path, __file__)
    assert refused.returncode == 2 and refused.stderr.count("\n") == 1 and "chmod 600" in refused.stderr
