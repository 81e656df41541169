"""The same cases on a real RDMA device of this host: its ports and counters read, writes from the device to itself.

What is read is the device's; what is shown is its way to memory and its own queues, for nothing leaves the host. TCP cannot be
put beside RDMA on one port without a second host, so the other traffic is more RDMA. Traffic classes are the switch's and the
NIC's configuration, which is left alone: cases with another queue than `fifo` are not run.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import reading

import dtprobe

SECONDS = 5
OTHERS = 4
LISTENS_S = 30.0


def usable(environ: Mapping[str, str]) -> str | None:
    """The first device with an active port, where perftest is there to load it."""
    if shutil.which("ib_write_bw", path=environ.get("PATH")) is None:
        return None
    for state in sorted(reading.DEVICES.glob("*/ports/*/state")):
        if "ACTIVE" in state.read_text(encoding="ascii"):
            return state.parts[-4]
    return None


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


class Flow:
    """Writes from the device to itself for some seconds."""

    def __init__(self, device: str, seconds: int, output: Path) -> None:
        port = free_port()
        argv = ["ib_write_bw", "-d", device, "-F", "-p", str(port), "-D", str(seconds), "--report_gbits"]
        with output.with_name(f"server-{output.name}").open("wb") as said:
            self.server = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=said, stderr=subprocess.STDOUT)
        deadline = time.monotonic() + LISTENS_S
        while not listening(port) and self.server.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        with output.open("wb") as said:
            self.client = subprocess.Popen(
                [*argv, "127.0.0.1"], stdin=subprocess.DEVNULL, stdout=said, stderr=subprocess.STDOUT
            )

    def wait(self, seconds: float) -> list[int]:
        """The exit codes of both ends, which are ended where they take longer."""
        for one in (self.client, self.server):
            try:
                one.wait(seconds)
            except subprocess.TimeoutExpired:
                one.kill()
                one.wait()
        return [self.client.returncode, self.server.returncode]


def listening(port: int) -> bool:
    wanted = f":{port:04X} "
    texts = [
        Path(f"/proc/net/{name}").read_text(encoding="ascii") for name in ("tcp", "tcp6") if Path(f"/proc/net/{name}").exists()
    ]
    return any(wanted in line and line.split()[3] == "0A" for text in texts for line in text.splitlines())


def measure(device: str, cases: Sequence[str], into: Path) -> None:
    """Each case that a device alone can serve, in the form in which the lab's worker records it."""
    reading.ibstat(into)
    for number, name in enumerate(cases):
        queue, _, traffic = name.partition(":")
        kinds = traffic.split("+")
        if queue != "fifo" or "rdma" not in kinds:
            dtprobe.record("not-run", case=name, why="needs a switch's queues or a second host")
            continue
        folder = into / f"case{number}"
        folder.mkdir()
        with dtprobe.attempt(name, folder=folder.name) as tried:
            reading.counters(folder, "hw_counters-before")
            others = [Flow(device, SECONDS + 4, folder / f"other{one}.log") for one in range(OTHERS if len(kinds) > 1 else 0)]
            codes = Flow(device, SECONDS, folder / "ib_write_bw.txt").wait(SECONDS + 30)
            for one in others:
                one.wait(SECONDS + 30)
            reading.counters(folder, "hw_counters-after")
            if any(codes):
                raise RuntimeError(f"ib_write_bw on {device} ended with {codes}")
            tried.note(idle=1.0, drops=0, from_s=0.0, to_s=float(SECONDS), invalid="", cores=os.cpu_count())
