"""RoCEv2 frames on a rank's cable: sent from the bridge's end, counted where they arrive. Loaded by the network's helper (`switch.py`)."""

from __future__ import annotations

import ctypes
import re
import signal
import socket
import struct
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

from cables import DEVICE, Net, port
from forwarder import within

ETH_P_IP = 0x0800
SOL_PACKET, PACKET_STATISTICS = 263, 6
SO_ATTACH_FILTER = 26
FILE_HEAD = struct.Struct("IHHiIII")
FRAME_HEAD = struct.Struct("IIII")
MAGIC, ETHERNET, SNAP = 0xA1B2C3D4, 1, 1 << 16
CAP_S = 600
END_S = 10.0
SAMPLE = 64
"""So many of the frames that arrived are kept as evidence."""

FILTER = ((0x28, 0, 0, 12), (0x15, 0, 5, ETH_P_IP), (0x30, 0, 0, 23), (0x15, 0, 3, 17), (0x28, 0, 0, 36), (0x15, 0, 1, 4791))
"""Classic BPF: IPv4 without options, UDP, to the port of RoCEv2; else (two more lines) nothing of the frame is taken."""


class Frames:
    """A message's frames, again and again at `rate` frames a second."""

    def __init__(self, part: dict[str, Any], rank: int, net: Net) -> None:
        self.part = part
        self.rank = rank
        self.net = net
        self._sender: Replayed | Sent | None = None
        self._arrived: socket.socket | None = None
        self._began = 0.0
        self._count = 0
        self._words = ""

    def on(self) -> None:
        space = str(self.rank)
        frames = [self._addressed(frame) for frame in read(Path(self.part["frames"].format(rank=self.rank)))]
        with within(self.net.space(space)):
            self._arrived = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ETH_P_IP))
        _only_roce(self._arrived)
        self._arrived.bind((DEVICE, ETH_P_IP))
        self._arrived.setblocking(False)
        file = Path(self.part["frames"].format(rank=f"{self.rank}-sent"))
        write(file, frames)
        with within(self.net.space("sw")):
            made = Replayed if self.part["by"] == "tcpreplay" else Sent
            self._sender = made(port(self.rank), file, frames, self.part["rate"])
        self._began = time.monotonic()

    def off(self) -> None:
        assert self._sender is not None and self._arrived is not None
        sent = self._sender.stop()
        lasted_s = time.monotonic() - self._began
        statistics = self._arrived.getsockopt(SOL_PACKET, PACKET_STATISTICS, 8)
        self._count = struct.unpack("II", statistics)[0]
        kept: list[bytes] = []
        while len(kept) < SAMPLE:
            try:
                kept.append(self._arrived.recv(SNAP))
            except BlockingIOError:
                break
        self._arrived.close()
        write(Path(self.part["evidence"].format(rank=self.rank)), kept)
        kind = (
            "congestion notifications"
            if self.part["action"] == "cnp"
            else f"frames of RDMA writes of {self.part['bytes']} bytes"
        )
        self._words = (
            f"{sent} {kind} sent by {self.part['by']}, {sent / lasted_s:.0f} a second of {self.part['rate']:g} asked;"
            f" {self._count} arrived at {DEVICE}"
        )

    def met(self) -> tuple[int, str]:
        return self._count, self._words

    def _addressed(self, frame: bytes) -> bytes:
        """To the rank's device, from the bridge; the ICRC does not cover these."""
        spaces = ((str(self.rank), DEVICE), ("sw", "bridge"))
        text = [
            self.net.links[space].get_links(self.net.index(space, name))[0].get_attr("IFLA_ADDRESS") for space, name in spaces
        ]
        return b"".join(bytes.fromhex(one.replace(":", "")) for one in text) + frame[12:]


class Replayed:
    """tcpreplay sends them. Made within the namespace that it sends in."""

    def __init__(self, device: str, file: Path, frames: list[bytes], rate: float) -> None:
        argv = [
            "tcpreplay",
            "--intf1",
            device,
            f"--pps={rate:g}",
            "--loop=0",
            f"--duration={CAP_S}",
            "--preload-pcap",
            str(file),
        ]
        self._process = subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
        )

    def stop(self) -> int:
        """How many it says that it sent. Raises RuntimeError with its own words where it says nothing of that."""
        self._process.send_signal(signal.SIGINT)
        try:
            text, _ = self._process.communicate(timeout=END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            text, _ = self._process.communicate()
        found = re.search(r"Actual: (\d+) packets", text)
        if found is None:
            raise RuntimeError(f"tcpreplay failed: {' '.join(text.split())[-300:]}")
        return int(found[1])


class Sent:
    """A thread sends them through a raw socket. Made within the namespace that it sends in."""

    def __init__(self, device: str, file: Path, frames: list[bytes], rate: float) -> None:
        self._socket = socket.socket(socket.AF_PACKET, socket.SOCK_RAW)
        self._socket.bind((device, 0))
        self._frames = frames
        self._rate = rate
        self._count = 0
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="frames", daemon=True)
        self._thread.start()

    def stop(self) -> int:
        self._end.set()
        self._thread.join(END_S)
        self._socket.close()
        return self._count

    def _run(self) -> None:
        began = time.monotonic()
        while not self._end.wait(0.001) and (lasted_s := time.monotonic() - began) < CAP_S:
            while self._count < lasted_s * self._rate and not self._end.is_set():
                try:
                    self._socket.send(self._frames[self._count % len(self._frames)])
                except OSError:  # the device's queue is full, or its link is down: what is late is sent later
                    break
                self._count += 1


def _only_roce(one: socket.socket) -> None:
    lines = [struct.pack("HBBI", *line) for line in (*FILTER, (0x06, 0, 0, SNAP), (0x06, 0, 0, 0))]
    program = ctypes.create_string_buffer(b"".join(lines))
    one.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, struct.pack("HL", len(lines), ctypes.addressof(program)))


def read(file: Path) -> list[bytes]:
    """The frames of a pcap file of this machine's byte order, as `frames.py` writes them."""
    data, at, found = file.read_bytes(), FILE_HEAD.size, []
    while at < len(data):
        _, _, length, _ = FRAME_HEAD.unpack_from(data, at)
        found.append(data[at + FRAME_HEAD.size : at + FRAME_HEAD.size + length])
        at += FRAME_HEAD.size + length
    return found


def write(file: Path, frames: list[bytes]) -> None:
    parts = [FILE_HEAD.pack(MAGIC, 2, 4, 0, 0, SNAP, ETHERNET)]
    for frame in frames:
        parts += [FRAME_HEAD.pack(0, 0, len(frame), len(frame)), frame]
    file.write_bytes(b"".join(parts))


def make(part: dict[str, Any], rank: int, net: Net, log: Any) -> Frames:
    """The effect of a fault on a rank's cable."""
    return Frames(part, rank, net)
