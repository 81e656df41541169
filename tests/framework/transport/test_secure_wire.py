"""What an eavesdropper on the loopback device sees: the values without the part, nothing of them with it."""

from __future__ import annotations

import os
import secrets
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

pytest.importorskip("cryptography")

from dtprobe.framework.transport.secure import MasterSecret

ALL_FRAMES = 3
FORCE_BUFFER = 33


class Eavesdropper:
    """Counts the frames on the loopback device that hold each of some patterns, until told to stop."""

    def __init__(self, **patterns: bytes) -> None:
        self.counts = dict.fromkeys(patterns, 0)
        self._patterns = patterns
        self._socket = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ALL_FRAMES))
        self._socket.setsockopt(socket.SOL_SOCKET, FORCE_BUFFER, 64 << 20)
        self._socket.bind(("lo", 0))
        self._socket.settimeout(0.05)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._listen)

    def _listen(self) -> None:
        while True:
            try:
                frame = self._socket.recv(1 << 17)
            except TimeoutError:  # all that was queued has been read
                if self._over.is_set():
                    return
                continue
            for name, pattern in self._patterns.items():
                self.counts[name] += pattern in frame

    def __enter__(self) -> Eavesdropper:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join(60)
        self._socket.close()


@pytest.mark.needs("linux", "root")
def test_values_are_on_the_wire_without_encryption_and_not_with_it(job):
    before, within, after = (secrets.token_bytes(16) for _ in range(3))
    with Eavesdropper(before=before, within=within, after=after) as heard:
        ranks = job(f"""
from dtprobe.framework.transport.secure import MasterSecret, secured
plain()

def talk(pattern):
    value = torch.frombuffer(bytearray(pattern * 400), dtype=torch.uint8).clone()
    for root in range(SIZE):
        dist.broadcast(value.clone(), root)
        dist.all_gather([torch.empty_like(value) for _ in range(SIZE)], value)
        dist.all_reduce(value.clone(), dist.ReduceOp.MAX)
        dist.all_gather_object([None] * SIZE, pattern * 400)
        dist.all_to_all_single(torch.empty_like(value), value)
        dist.reduce_scatter_tensor(torch.empty(value.numel() // SIZE, dtype=torch.uint8), value, dist.ReduceOp.MAX)
        other = torch.zeros_like(value)
        dist.send(value, 1 - RANK) if RANK == root else dist.recv(other, 1 - RANK)
        say(arrived=bytes(other[:16]) == pattern)

talk({before!r})
with secured(MasterSecret(b"s" * 32)):
    talk({within!r})
talk({after!r})
dist.barrier()
""")
    assert [[each["arrived"] for each in rank.said].count(True) for rank in ranks] == [3, 3], ranks[0].output
    assert heard.counts["before"] >= 10 and heard.counts["after"] >= 10
    assert heard.counts["within"] == 0


SCRIPT = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
value = torch.frombuffer(bytearray({pattern!r} * 400), dtype=torch.uint8).clone()
dist.all_reduce(value, dist.ReduceOp.MAX)
assert bytes(value[:16]) == {pattern!r}
dist.destroy_process_group()
"""


@pytest.mark.needs("linux", "root")
def test_an_unmodified_script_is_encrypted_by_the_command(job, tmp_path):
    pattern = secrets.token_bytes(16)
    script, secret = tmp_path / "train.py", tmp_path / "secret"
    script.write_text(SCRIPT.format(pattern=pattern))
    MasterSecret.create(secret)
    command = ["secure", "run", "--secret-file", str(secret), str(script)]
    seen = []
    for source in (
        f"import runpy; runpy.run_path({str(script)!r}, run_name='__main__')",
        f"import runpy; sys.argv = {command}; runpy.run_module('dtprobe.framework.transport.secure', run_name='__main__')",
    ):
        with Eavesdropper(value=pattern) as heard:
            ranks = job(source)
        assert [rank.code for rank in ranks] == [0, 0], ranks[0].output
        seen.append(heard.counts["value"])
    assert seen[0] > 0 and seen[1] == 0


@pytest.mark.nightly
@pytest.mark.needs("linux", "root")
def test_an_unmodified_script_under_torchrun_is_encrypted_by_the_command(tmp_path):
    pattern = secrets.token_bytes(16)
    script, secret = tmp_path / "train.py", tmp_path / "secret"
    script.write_text(SCRIPT.format(pattern=pattern))
    MasterSecret.create(secret)
    root = str(Path(__file__).parents[3])
    environ = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "PYTHONPATH": root}
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    encrypted = ["-m", "dtprobe.framework.transport.secure", "run", "--secret-file", str(secret)]
    seen = []
    for between in ([], encrypted):
        with Eavesdropper(value=pattern) as heard:
            subprocess.run([*launcher, *between, str(script)], env=environ, check=True, timeout=120, capture_output=True)
        seen.append(heard.counts["value"])
    assert seen[0] > 0 and seen[1] == 0
