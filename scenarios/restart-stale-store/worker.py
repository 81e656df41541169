"""Starts two-rank jobs one after the other as torchrun does, with torchrun's own agent, and lets each of them fail once.

Rank 1 of each first attempt dies, the agent restarts both, and the second attempt is what counts. Rank 0 comes to it a little later than
rank 1, as ranks do that import, read or compile something first. The agent forks its workers, so that a start costs no import.

`--rendezvous static` is what `--master-addr` and `--master-port` select; `c10d` with a store of its own for each attempt is the
other way. `--cured` makes each attempt's group by `dtprobe.framework.bootstrap.start`.
"""

from __future__ import annotations

import argparse
import logging
import os
import socket
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from dtprobe import attempt, record
from dtprobe.framework.bootstrap import resolve, start
from dtprobe.framework.errors import FrameworkError

RANKS = 2
HOST = "127.0.0.1"
LATER_S = 0.5
TIMEOUT_S = 1.5
DEADLINE_S = 15.0


def work(again: bool, rank: int) -> None:
    """One all-reduce; in a first attempt rank 1 dies after it."""
    value = torch.ones(1)
    dist.all_reduce(value)
    record("sum", again=again, place=rank, sum=value.item())
    if again:
        return
    if rank == 1:
        os._exit(1)
    time.sleep(DEADLINE_S)  # the agent ends it


def worker(cured: bool) -> None:
    """What each rank of a job runs; the agent's variables say where it stands."""
    rank, again = int(os.environ["RANK"]), os.environ["TORCHELASTIC_RESTART_COUNT"] != "0"
    if again and rank == 0:
        time.sleep(LATER_S)
    try:
        if cured:
            with start(resolve(os.environ), deadline_s=DEADLINE_S, timeout_s=DEADLINE_S):
                work(again, rank)
        else:
            dist.init_process_group("gloo", timeout=timedelta(seconds=TIMEOUT_S))
            work(again, rank)
    except (RuntimeError, FrameworkError) as error:
        record("failed", again=again, place=rank, type=type(error).__name__, text=str(error)[:500])
        os._exit(1)


def free_port() -> int:
    with socket.socket() as one:
        one.bind((HOST, 0))
        return int(one.getsockname()[1])


def config(rendezvous: str, run: str) -> LaunchConfig:
    """What `torchrun --max-restarts=1 --nproc-per-node=2` with that rendezvous makes of its flags."""
    return LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=RANKS,
        run_id=run,
        rdzv_backend=rendezvous,
        rdzv_endpoint=f"{HOST}:{free_port()}",
        rdzv_configs={"rank": 0} if rendezvous == "static" else {},
        max_restarts=1,
        monitor_interval=0.1,
        start_method="fork",
        local_addr=HOST,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rendezvous", choices=("static", "c10d"), default="static")
    parser.add_argument("--jobs", type=int, default=4)
    parser.add_argument("--cured", action="store_true")
    args = parser.parse_args()
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # it logs each restart, which is the point here
    lane, began = os.environ["RANK"], time.monotonic()
    for number in range(args.jobs):
        with attempt("job", job=number) as made:
            try:
                elastic_launch(config(args.rendezvous, f"job-{lane}-{number}"), worker)(args.cured)
            except ChildFailedError:
                made.note(failed=True)
            else:
                made.note(failed=False)
    record("work", duration_s=time.monotonic() - began)


if __name__ == "__main__":
    main()
