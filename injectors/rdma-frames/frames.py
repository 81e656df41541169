"""Builds RoCEv2 frames with scapy and writes them as a pcap file: `frames.py FILE CONFIG`, CONFIG is a JSON text.

A program of its own, since scapy's import alone takes seconds. Headers: InfiniBand Architecture Specification 1.4, volume 1, chapter 9 (BTH,
RETH) and annexes A16, A17 (RoCE, RoCEv2 and its congestion notification packet); the ICRC is scapy's.
"""

from __future__ import annotations

import json
import struct
import sys
from collections.abc import Mapping
from typing import Any

from scapy.contrib.roce import BTH, CNP_OPCODE, cnp
from scapy.layers.inet import IP, UDP
from scapy.layers.l2 import Ether
from scapy.packet import Packet, Raw
from scapy.utils import wrpcap

ROCE_PORT = 4791
FIRST, MIDDLE, LAST, ONLY = 0x06, 0x07, 0x08, 0x0A
"""RC RDMA WRITE, in BTH's opcode."""

WRITE_TOS = 26 << 2 | 2
"""DSCP 26 and ECT(0): what RoCE traffic has in the usual lossless set-ups."""
CNP_TOS = 48 << 2
VIRTUAL, KEY = 0x7F0000000000, 0x1234


def outer(config: Mapping[str, Any], tos: int) -> Packet:
    # The hardware address is written where the frame is sent; a port that differs by queue pair spreads flows. UDP has no checksum.
    udp = UDP(sport=0xC000 | config["qp"] & 0x3FFF, dport=ROCE_PORT, chksum=0)
    return Ether() / IP(src=config["source"], dst=config["target"], tos=tos, flags="DF") / udp


def write_message(config: Mapping[str, Any]) -> list[Packet]:
    """The frames of one RDMA WRITE of `bytes`, in pieces of `mtu`."""
    size, mtu = config["bytes"], config["mtu"]
    pieces = [min(mtu, size - at) for at in range(0, size, mtu)]
    frames = []
    for number, length in enumerate(pieces):
        first, last = number == 0, number == len(pieces) - 1
        opcode = ONLY if first and last else FIRST if first else LAST if last else MIDDLE
        pad = -length % 4
        reth = struct.pack("!QII", VIRTUAL, KEY, size) if first else b""
        bth = BTH(opcode=opcode, padcount=pad, dqpn=config["qp"], ackreq=int(last), psn=number)
        frames.append(outer(config, WRITE_TOS) / bth / Raw(reth + bytes(length + pad)))
    return frames


def main(file: str, text: str) -> None:
    config = json.loads(text)
    if config["action"] == "cnp":
        frames = [outer(config, CNP_TOS) / cnp(config["qp"])]
        assert frames[0][BTH].opcode == CNP_OPCODE
    else:
        frames = write_message(config)
    wrpcap(file, frames)


if __name__ == "__main__":
    main(*sys.argv[1:])
