"""A training loop over several hosts that reduces once a step, until it is done or a step fails.

`--checked` runs the steps under `dtprobe.framework.checked`. A mark among the artifacts says that training has begun: an injector waits for it.

By hand, once for each rank: `RANK=0 WORLD_SIZE=3 MASTER_ADDR=127.0.0.1 MASTER_PORT=29500 python worker.py`
"""

from __future__ import annotations

import argparse
import contextlib
import time

import torch
import torch.distributed as dist

from dtprobe import attempt, record
from dtprobe.authoring.rendezvous import join
from dtprobe.worker import together

PAUSE_S = 0.1
MARKED_AT = 5


def train(args: argparse.Namespace, rank: int) -> None:
    """The steps; ends the program, with the reason, at the first that fails."""
    gradient = torch.zeros(4096, device=args.device)
    for step in range(args.steps):
        if step == MARKED_AT:
            together(1, patience_s=0, mark="training")
        time.sleep(PAUSE_S)
        with attempt("step", step=step) as made:
            gradient.fill_(float(rank + 1))
            dist.all_reduce(gradient)
        if made.error:
            raise SystemExit(f"step {step}: {made.error}: {made.text}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--timeout-s", type=float, default=5.0)
    parser.add_argument("--checked", action="store_true")
    parser.add_argument("--check-timeout-s", type=float, default=2.5)
    args = parser.parse_args()
    rank = join(args.timeout_s, device=args.device)
    with contextlib.ExitStack() as held:
        if args.checked:
            from dtprobe.framework.checked import checked

            dist.barrier()  # all have imported it: from here on the deadline measures the loop alone
            held.enter_context(checked(timeout_s=args.check_timeout_s))
        began = time.monotonic()
        train(args, rank)
        record("work", duration_s=time.monotonic() - began)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
