"""Runs in the lab VM: RDMA writes whose peer or link goes away; `losses.py FAULT:RETRIES:TIMEOUT:SECONDS...`.

FAULT is `none`, `kill` (the peer, by SIGKILL), `down` (the switch's port, for good) or `flap` (for a second). RETRIES and TIMEOUT are the queue
pair's retry_cnt and timeout (4.096 us x 2^TIMEOUT), SECONDS how long the sender is watched after the fault.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import bottleneck
import reading

import dtprobe

MESSAGE, OUTSTANDING, SPACE = 16384, 4, 16384
RATE_MBIT = 16
BEFORE_S = 0.7
FLAP_S = 1.0
DRAINED_S = 3.0


class End:
    """One end of a connection on a device: its queue pair, and what the other end must know of it."""

    def __init__(self, device: str) -> None:
        from pyverbs import enums
        from pyverbs.cq import CQ
        from pyverbs.device import Context
        from pyverbs.mr import MR
        from pyverbs.pd import PD
        from pyverbs.qp import QP, QPCap, QPInitAttr

        self.enums = enums
        self.context = Context(name=device)
        self.domain = PD(self.context)
        access = enums.IBV_ACCESS_LOCAL_WRITE | enums.IBV_ACCESS_REMOTE_WRITE
        self.memory = MR(self.domain, SPACE, access)
        self.queue = CQ(self.context, 64)
        asked = QPInitAttr(
            qp_type=enums.IBV_QPT_RC, scq=self.queue, rcq=self.queue, cap=QPCap(max_send_wr=16, max_recv_wr=1), sq_sig_all=1
        )
        self.pair = QP(self.domain, asked)

    def card(self) -> dict[str, Any]:
        gid = self.context.query_gid(1, bottleneck.GID_INDEX).gid
        return {"qp": self.pair.qp_num, "gid": str(gid), "address": self.memory.buf, "key": self.memory.rkey}

    def connect(self, other: dict[str, Any], retries: int, timeout: int) -> None:
        from pyverbs.addr import GID, AHAttr, GlobalRoute
        from pyverbs.qp import QPAttr

        enums = self.enums
        route = GlobalRoute(dgid=GID(other["gid"]), sgid_index=bottleneck.GID_INDEX, hop_limit=64)
        attr = QPAttr(qp_state=enums.IBV_QPS_RTS, port_num=1, path_mtu=enums.IBV_MTU_1024)
        attr.qp_access_flags = enums.IBV_ACCESS_LOCAL_WRITE | enums.IBV_ACCESS_REMOTE_WRITE
        attr.dest_qp_num, attr.rq_psn, attr.sq_psn = other["qp"], 0, 0
        attr.ah_attr = AHAttr(gr=route, is_global=1, port_num=1)
        attr.max_rd_atomic = attr.max_dest_rd_atomic = 1
        attr.min_rnr_timer, attr.rnr_retry = 12, 7
        attr.retry_cnt, attr.timeout = retries, timeout
        self.pair.to_rts(attr)

    def write(self, other: dict[str, Any]) -> None:
        from pyverbs.wr import SGE, SendWR

        piece = SGE(self.memory.buf, MESSAGE, self.memory.lkey)
        request = SendWR(num_sge=1, sg=[piece], opcode=self.enums.IBV_WR_RDMA_WRITE)
        request.set_wr_rdma(other["key"], other["address"])
        self.pair.post_send(request)

    def poll(self) -> list[int]:
        """Statuses of the work that has completed."""
        _, done = self.queue.poll(OUTSTANDING)
        return [one.status for one in done]

    def close(self) -> None:
        for one in (self.pair, self.queue, self.memory, self.domain, self.context):
            one.close()


def serve() -> None:
    """The peer: its card to standard output, the other's from standard input, then it only lets itself be written to."""
    end = End("rx1")
    print(json.dumps(end.card()), flush=True)
    asked = json.loads(sys.stdin.readline())
    end.connect(asked["card"], asked["retries"], asked["timeout"])
    print("ready", flush=True)
    sys.stdin.read()


def transfer(end: End, peer: dict[str, Any], seconds: float, pending: int) -> tuple[int, int, int, float]:
    """Write for so long, or until a completion fails: completed, still pending, the failed status (0 for none), and when that was seen."""
    began = time.monotonic()
    completed = 0
    while time.monotonic() - began < seconds:
        while pending < OUTSTANDING:
            end.write(peer)
            pending += 1
        for status in end.poll():
            if status:
                return completed, pending, status, time.monotonic() - began
            pending -= 1
            completed += 1
        time.sleep(0.002)
    return completed, pending, 0, time.monotonic() - began


def drain(end: End, pending: int) -> None:
    """Let what is under way complete: a queue pair that is closed over unanswered work holds its device until all retries are over."""
    deadline = time.monotonic() + DRAINED_S
    while pending and time.monotonic() < deadline:
        pending -= len(end.poll())
        time.sleep(0.002)


def port(state: str) -> None:
    bottleneck.batch([f"link set p1 {state}"], netns="sw")


def case(name: str) -> dict[str, float | str | bool]:
    fault, retries, timeout, watched_s = name.split(":")
    peer = subprocess.Popen(
        [sys.executable, __file__, "serve"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
    )
    assert peer.stdin is not None and peer.stdout is not None
    end = End("rx0")
    try:
        card = json.loads(peer.stdout.readline())
        peer.stdin.write(json.dumps({"card": end.card(), "retries": int(retries), "timeout": int(timeout)}) + "\n")
        end.connect(card, int(retries), int(timeout))
        if peer.stdout.readline().strip() != "ready":
            raise RuntimeError("the peer did not connect")
        before, pending, status, _ = transfer(end, card, BEFORE_S, 0)
        if status or not before:
            raise RuntimeError(f"before the fault: {before} writes, status {status}")
        began = time.monotonic()
        if fault == "kill":
            peer.send_signal(signal.SIGKILL)
            peer.wait()
        elif fault in ("down", "flap"):
            port("down")
        after = 0
        if fault == "flap":
            after, pending, status, _ = transfer(end, card, FLAP_S, pending)
            port("up")
        left_s = float(watched_s) - (time.monotonic() - began)
        again = 0
        if not status:
            again, pending, status, _ = transfer(end, card, left_s, pending)
        took_s = time.monotonic() - began
        if not status:
            drain(end, pending)
    finally:
        peer.kill()
        peer.wait()
        end.close()
        port("up")
        bottleneck.batch(bottleneck.routes())
    return {
        "fault": fault,
        "retries": int(retries),
        "timeout_s": 4.096e-6 * 2 ** int(timeout),
        "promised_s": (int(retries) + 1) * 4.096e-6 * 2 ** int(timeout),
        "watched_s": float(watched_s),
        "status": status,
        "after_s": took_s if status else None,
        "before": before,
        "completed": after + again,
    }


def main(*cases: str) -> None:
    bottleneck.make()
    bottleneck.shape("fifo", RATE_MBIT)
    reading.ibstat(Path.cwd())
    reading.counters(Path.cwd(), "hw_counters-before")
    for name in cases:
        with dtprobe.attempt(name) as tried:
            tried.note(**case(name))
    reading.counters(Path.cwd(), "hw_counters-after")


if __name__ == "__main__":
    if sys.argv[1:] == ["serve"]:
        serve()
    else:
        main(*sys.argv[1:])
