"""All ranks reduce once a step, a few numbers at first and many later, over a network that may begin to swallow packets.

`--checked` runs the steps under `dtprobe.framework.checked`.

By hand, once for each rank: `RANK=0 WORLD_SIZE=3 MASTER_ADDR=127.0.0.1 MASTER_PORT=29500 python worker.py`
"""

from __future__ import annotations

import argparse
import contextlib
import signal
import time

import torch
import torch.distributed as dist

from dtprobe import attempt, record
from dtprobe.rendezvous import join

SMALL_STEPS = 10
FEW = 4
MANY = 65536
"""So many floats fill many packets; a few fit into one of any size."""
PATIENCE_S = 10
"""A rank whose store does not answer is in C++ for its own long timeout: SIGALRM ends it there."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--for-s", type=float, default=2.0, help="so long rank 0 goes on, and the others with it")
    parser.add_argument("--timeout-s", type=float, default=6.0)
    parser.add_argument("--checked", action="store_true")
    parser.add_argument("--check-timeout-s", type=float, default=3.0)
    args = parser.parse_args()
    rank = join(args.timeout_s, device=args.device)
    with contextlib.ExitStack() as stack:
        if args.checked:
            from dtprobe.framework.checked import checked

            dist.barrier()  # all have imported it: from here on the deadline measures the loop alone
            stack.enter_context(checked(timeout_s=args.check_timeout_s))
        began = time.monotonic()
        step, last = 0, False
        while not last:
            signal.alarm(PATIENCE_S)
            with attempt("step", step=step) as made:
                gradient = torch.zeros(FEW if step < SMALL_STEPS else MANY, device=args.device)
                gradient[0] = float(rank == 0 and time.monotonic() - began > args.for_s)
                dist.all_reduce(gradient)
                last = gradient[0].item() > 0
            if made.error:
                raise SystemExit(f"step {step}: {made.error}: {made.text}")
            step += 1
            time.sleep(0.05)
    signal.alarm(0)
    record("work", duration_s=time.monotonic() - began)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
