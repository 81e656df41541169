"""Runs in the lab VM: RDMA writes over a shaped link, alone and beside TCP and UDP; `contend.py RATE MESSAGES QUEUE:TRAFFIC...`.

TRAFFIC is `rdma`, `tcp`, `rdma+tcp` or `rdma+tcp+udp`. Each case leaves a folder: perftest's and iperf3's own words, counters before and
after. A case in which the processor was the bottleneck, or perftest printed 0, is said to be invalid and tried once more.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import bottleneck
import reading

import dtprobe

JOB = Path(os.environ["DTPROBE_RANK_FOLDER"])
PERFTEST_PORT = 18515
PORTS = {"tcp": 5201, "udp": 5202}
MORE = {"tcp": ("-P", "4"), "udp": ("-u", "-b", "1.6M", "-l", "1000", "--pacing-timer", "16000")}
MESSAGE, DEPTH = 16384, 5
LEAD_S = 1.5
"""So long TCP runs before RDMA begins: past its slow start."""

TIMEOUT = 16
"""Acknowledgement timeout of the queue pair, 4.096 us x 2^16 = 268 ms: perftest's own 14 (67 ms) ends while a busy host's emulator sleeps."""

IDLE_LEAST = 0.04
"""With less of the processor idle it is the emulated processor that decides, and not the link."""

TRIES = 2
TCP_ALONE_S = 3.0
TRANSFER_S = 60.0
LISTENS_S = 30.0


def start(argv: list[str], output: Path) -> subprocess.Popen[bytes]:
    with output.open("wb") as file:
        return subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT)


def listening(port: int) -> bool:
    wanted = f":{port:04X} "
    text = "".join(Path(f"/proc/net/{name}").read_text(encoding="ascii") for name in ("tcp", "tcp6"))
    return any(wanted in line and line.split()[3] == "0A" for line in text.splitlines())


def await_listener(port: int) -> None:
    deadline = time.monotonic() + LISTENS_S
    while not listening(port):
        if time.monotonic() > deadline:
            raise RuntimeError(f"nobody listens at port {port}")
        time.sleep(0.05)


def perftest(device: str, messages: int) -> list[str]:
    return [
        *("ib_write_bw", "-d", device, "-x", str(bottleneck.GID_INDEX), "-F", "-s", str(MESSAGE), "-t", str(DEPTH)),
        *("-n", str(messages), "-u", str(TIMEOUT), f"--tclass={bottleneck.TRAFFIC_CLASS}", "--report_gbits"),
    ]


def background(kind: str, folder: Path) -> list[subprocess.Popen[bytes]]:
    """iperf3's client and server, until the client is interrupted. What counts is what the server received and lost, by half seconds."""
    port = str(PORTS[kind])
    server = ["iperf3", "-s", "-1", "-B", bottleneck.RECEIVER, "-p", port, "-i", "0.5", "-J"]
    client = ["ip", "netns", "exec", "T", "iperf3", "-c", bottleneck.RECEIVER, "-p", port, "-t", "60", *MORE[kind]]
    first = start(server, folder / f"iperf3-{kind}.json")
    await_listener(PORTS[kind])
    return [start(client, folder / f"client-{kind}.txt"), first]


def watched(client: subprocess.Popen[bytes], began: float) -> tuple[float, float]:
    """Wait for perftest; between which seconds since `began` its device sent packets. Setting up takes it a while."""
    sent = reading.DEVICES / "rx0/ports/1/hw_counters/sent_pkts"
    deadline = time.monotonic() + TRANSFER_S
    last, moved = int(sent.read_text()), []
    while client.poll() is None and time.monotonic() < deadline:
        time.sleep(0.1)
        now = int(sent.read_text())
        if now != last:
            moved.append(time.monotonic() - began)
        last = now
    return (moved[0], moved[-1]) if moved else (0.0, 0.0)


def case(name: str, rate: int, messages: int, folder: Path) -> tuple[bool, dict[str, float | str | bool]]:
    """One case; whether it is valid, and what the worker itself knows of it. Raises RuntimeError where a program failed."""
    queue, _, traffic = name.partition(":")
    kinds = traffic.split("+")
    folder.mkdir()
    bottleneck.shape(queue, rate)
    reading.counters(folder, "hw_counters-before")
    all_before, idle_before = reading.cpu()
    others: list[subprocess.Popen[bytes]] = []
    transfer: list[subprocess.Popen[bytes]] = []
    try:
        if "rdma" in kinds:
            transfer.append(start(perftest("rx1", messages), folder / "ib_write_bw-server.txt"))
            await_listener(PERFTEST_PORT)
        began = time.monotonic()
        for kind in PORTS.keys() & set(kinds):
            others += background(kind, folder)
        if others:
            time.sleep(LEAD_S)
        if transfer:
            client = start([*perftest("rx0", messages), bottleneck.RECEIVER], folder / "ib_write_bw.txt")
            transfer.append(client)
            window = watched(client, began)
        else:
            window = (LEAD_S, LEAD_S + TCP_ALONE_S)
            time.sleep(TCP_ALONE_S)
        for client in others[::2]:  # both ends then print what they have
            client.send_signal(signal.SIGINT)
        for one in (*others, *transfer):
            one.wait(30)
    finally:
        for one in (*others, *transfer):
            if one.poll() is None:
                one.kill()
                one.wait()
    all_after, idle_after = reading.cpu()
    reading.counters(folder, "hw_counters-after")
    if any(one.returncode for one in transfer):
        raise RuntimeError(f"ib_write_bw ended with {[one.returncode for one in transfer]}: {last_words(folder)}")
    idle = (idle_after - idle_before) / max(1, all_after - all_before)
    why = ""
    if "rdma" in kinds and printed(folder / "ib_write_bw.txt") == 0:
        why = "perftest printed 0"
    elif idle < IDLE_LEAST:
        why = f"{idle:.0%} of the processor idle"
    drops = bottleneck.drops()
    return not why, {"rate_mbit": rate, "idle": idle, "drops": drops, "from_s": window[0], "to_s": window[1], "invalid": why}


def printed(output: Path) -> float:
    """perftest's average, 0 where there is none."""
    found = re.search(rf"^\s*{MESSAGE}\s+\d+\s+[\d.]+\s+([\d.]+)\s", output.read_text(errors="replace"), re.MULTILINE)
    return float(found[1]) if found else 0.0


def last_words(folder: Path) -> str:
    lines: list[str] = []
    for file in sorted(folder.glob("i*")):
        lines += [f"{file.name}: {line}" for line in file.read_text(errors="replace").splitlines() if line.strip()][-2:]
    return " | ".join(lines)[-600:]


def main(rate: str, messages: str, *cases: str) -> None:
    bottleneck.make()
    reading.ibstat(JOB)
    for number, name in enumerate(cases):
        for attempt in range(TRIES):
            folder = JOB / f"case{number}-{attempt}"
            with dtprobe.attempt(name, folder=folder.name) as tried:
                valid, facts = case(name, int(rate), int(messages), folder)
                tried.note(**facts)
            if not tried.error and valid:
                break


if __name__ == "__main__":
    main(*sys.argv[1:])
