"""A start whose port belongs to another program.

With `--taken` rank 0 first starts a program that listens at MASTER_PORT and says nothing. Each way is tried in turn: `framework` starts through
`dtprobe.framework.bootstrap` at that port, `derived` through the same at a port derived from the run's name, `torch` by init_process_group; that
one comes last, since a rank may not come back from it: after `--give-up-s` it is ended by SIGALRM.

By hand, once for each rank: `RANK=0 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=29500 python worker.py --taken`
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
from dataclasses import replace
from datetime import timedelta

import torch
import torch.distributed as dist

from dtprobe import attempt
from dtprobe.framework import bootstrap
from dtprobe.worker import together

LONGER_S = 3.0
"""The program outlasts the others' last second: a connection that it resets on its own end is not what is asked about."""
LISTENER = "import socket, sys; server = socket.create_server(('127.0.0.1', int(sys.argv[1]))); print('ready', flush=True); sys.stdin.read()"


def start(way: str, timeout_s: float) -> float:
    """Start, sum the ranks' ones, end."""
    tensor = torch.ones(1)
    if way == "torch":
        dist.init_process_group("gloo", timeout=timedelta(seconds=timeout_s))
        dist.all_reduce(tensor)
        dist.destroy_process_group()
        return tensor.item()
    where = bootstrap.resolve(os.environ)
    if way == "derived":
        # what a launcher's job id is for: no port is given, so the first free one of the run's own is taken
        where = replace(where, master_port=None, run=f"port-in-use/{os.environ['MASTER_PORT']}")
    with bootstrap.start(where, deadline_s=timeout_s, timeout_s=timeout_s):
        dist.all_reduce(tensor)
    return tensor.item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--taken", action="store_true", help="another program listens at the port")
    parser.add_argument("--ways", default="torch", help="framework, derived, torch: in this order")
    parser.add_argument("--timeout-s", type=float, default=4.0)
    parser.add_argument("--give-up-s", type=float, default=9.0, help="end by SIGALRM after so long in one start")
    args = parser.parse_args()
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    other = None
    if args.taken and rank == 0:
        command = [sys.executable, "-c", LISTENER, os.environ["MASTER_PORT"]]
        other = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert other.stdout is not None
        other.stdout.readline()
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # a call that hangs in C++ serves no Python handler
    for way in args.ways.split(","):
        together(size, patience_s=60.0, mark=way)
        signal.setitimer(signal.ITIMER_REAL, args.give_up_s)
        with attempt(f"start {way}") as made:
            try:
                made.note(sum=start(way, args.timeout_s))
            except Exception as error:
                made.note(named=",".join(map(str, getattr(error, "ranks", ()))))
                raise
        signal.setitimer(signal.ITIMER_REAL, 0)
    if other is not None:
        together(size, patience_s=args.give_up_s + LONGER_S, mark="end")  # the program stays for as long as anyone tries
        other.communicate("", timeout=10)


if __name__ == "__main__":
    main()
