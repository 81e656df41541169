"""Rank 0 sends to rank 1 over TCP for some seconds, while RoCEv2 frames may come down rank 1's cable; needs no torch."""

from __future__ import annotations

import os
import socket
import threading
import time

import dtprobe
from dtprobe.worker import together

PORT, ROCE_PORT = 29411, 4791
SECONDS, LEAD_S = 3.0, 1.0
PATIENCE_S = 30.0
PIECE = 1 << 16


def send(address: str) -> None:
    with socket.create_server((address, PORT)) as server:
        server.settimeout(PATIENCE_S)
        peer, _ = server.accept()
        with peer:
            peer.settimeout(PATIENCE_S)
            give_up = time.monotonic() + LEAD_S + SECONDS + 1
            while time.monotonic() < give_up:
                try:
                    peer.sendall(bytes(PIECE))
                except (BrokenPipeError, ConnectionResetError):
                    return


def connected(address: str) -> socket.socket:
    give_up = time.monotonic() + PATIENCE_S
    while True:
        try:
            return socket.create_connection((address, PORT), timeout=PATIENCE_S)
        except ConnectionRefusedError:
            if time.monotonic() > give_up:
                raise
            time.sleep(0.05)


class Frames:
    """Counts what arrives at RoCEv2's port."""

    def __init__(self) -> None:
        self.count = 0
        self.ended = threading.Event()
        self.socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 22)
        self.socket.bind(("", ROCE_PORT))
        self.socket.settimeout(0.1)
        self.thread = threading.Thread(target=self.take)
        self.thread.start()

    def take(self) -> None:
        while not self.ended.is_set():
            try:
                self.socket.recv(2048)
                self.count += 1
            except TimeoutError:
                continue

    def close(self) -> None:
        self.ended.set()
        self.thread.join()
        self.socket.close()


def receive(address: str) -> None:
    with dtprobe.attempt("transfer") as tried, connected(address) as peer:
        frames = Frames()
        try:
            got, measured_from, frames_from, began = 0, 0, 0, time.monotonic()
            while time.monotonic() - began < LEAD_S + SECONDS:
                got += len(peer.recv(PIECE))
                if not measured_from and time.monotonic() - began >= LEAD_S:
                    measured_from, frames_from, start = got, frames.count, time.monotonic()
            lasted_s = time.monotonic() - start
            arrived = frames.count - frames_from
        finally:
            frames.close()
        tried.note(mbit=(got - measured_from) * 8 / 1e6 / lasted_s, frames_per_s=arrived / lasted_s)


if __name__ == "__main__":
    together(2, patience_s=PATIENCE_S)
    rank, master = int(os.environ["RANK"]), os.environ["MASTER_ADDR"]
    if rank == 0:
        send(master)
    else:
        receive(master)
