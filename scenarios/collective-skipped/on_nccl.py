"""A training loop on GPUs whose ranks reduce once a step over NCCL, and rank 1, which at one step does otherwise.

`--differs` says how: it leaves the all-reduce out and goes elsewhere (`skip`), calls another collective (`type`), brings half as many
elements (`shape`), names another root (`root`), enters two groups in the other order (`order`), holds the interpreter's lock (`gil`), or stops
itself (`stop`).
`--checked` runs each step under `dtprobe.framework.checked`.

By hand: `torchrun --standalone --nproc-per-node 2 on_nccl.py --differs skip`
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Callable, Iterator
from datetime import timedelta

import torch
import torch.distributed as dist

from dtprobe import attempt, record
from dtprobe.authoring.nccl import AWAY_S, CULPRIT, DIFFERENCES, STEP
from dtprobe.authoring.rendezvous import join

STEPS = 12
GROUPS = ("data", "tensor")


@contextlib.contextmanager
def checking(wanted: bool, groups: dict[str, dist.ProcessGroup | None], timeout_s: float) -> Iterator[Callable[[], None]]:
    """Puts checked groups in the place of the plain ones where that is wanted; yields what ends a step."""
    if not wanted:
        yield lambda: None
        return
    from dtprobe.framework.checked import checked

    with contextlib.ExitStack() as entered:
        dist.barrier()
        for name, group in groups.items():
            groups[name] = entered.enter_context(checked(group, timeout_s=timeout_s))
        first = next(iter(groups.values()))
        yield first.finish if len(groups) == 1 else lambda: None


def hold(seconds: float) -> None:
    """Sleep in C without letting the interpreter's lock go."""
    ctypes.PyDLL(None).usleep(ctypes.c_uint(int(seconds * 1e6)))


def reduce(groups: dict[str, dist.ProcessGroup | None], tensor: torch.Tensor, how: str, differs: bool) -> None:
    """The step's collectives; `differs` where this rank does otherwise now."""
    size = dist.get_world_size()
    if how == "order":
        for name in reversed(GROUPS) if differs else GROUPS:
            dist.all_reduce(tensor, group=groups[name])
            if tensor.is_cuda:
                torch.cuda.synchronize()
        return
    group = groups["default"]
    if how == "root":
        dist.broadcast(tensor, CULPRIT if differs else 0, group=group)
        dist.all_reduce(tensor, group=group)
    elif differs and how == "type":
        dist.all_gather_into_tensor(tensor.new_empty(size * tensor.numel()), tensor, group=group)
    else:
        dist.all_reduce(tensor[: tensor.numel() // 2] if differs and how == "shape" else tensor, group=group)


def right(how: str, ranks: int) -> float:
    """What every element is after the step: the sum of rank + 1, twice reduced or broadcast from rank 0 first where the step does that."""
    total = float(sum(range(1, ranks + 1)))
    return {"order": total * ranks, "root": float(ranks)}.get(how, total)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calls", choices=DIFFERENCES, default="skip", help="which collectives a step has")
    parser.add_argument("--differs", action="store_true", help=f"rank {CULPRIT} does otherwise at step {STEP}")
    parser.add_argument("--elements", type=int, default=512)
    parser.add_argument("--timeout-s", type=float, default=6.0)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda", help="cpu: the same over gloo")
    parser.add_argument("--checked", action="store_true")
    parser.add_argument("--check-timeout-s", type=float, default=2.0)
    args = parser.parse_args()
    rank = join(args.timeout_s, device=args.device)
    ranks = dist.get_world_size()
    names = GROUPS if args.calls == "order" else ("default",)
    timeout = timedelta(seconds=args.timeout_s)
    groups = {name: dist.new_group(timeout=timeout, group_desc=name) if name in GROUPS else None for name in names}
    began = time.monotonic()
    with checking(args.checked, groups, args.check_timeout_s) as end_of_step:
        for step in range(STEPS):
            now = args.differs and rank == CULPRIT and step == STEP
            tensor = torch.full((args.elements,), rank + 1.0, device=args.device)
            with attempt("step", step=step) as made:
                if now:
                    record("fault", calls=args.calls)
                    if args.calls == "skip":
                        time.sleep(AWAY_S)
                    elif args.calls == "gil":
                        hold(AWAY_S)
                    elif args.calls == "stop":
                        os.kill(os.getpid(), signal.SIGSTOP)
                try:
                    if not (now and args.calls == "skip"):
                        reduce(groups, tensor, args.calls, now)
                    end_of_step()
                    made.note(wrong=int((tensor != right(args.calls, ranks)).sum()))
                except Exception as error:
                    made.note(named=",".join(map(str, getattr(error, "ranks", ()))))
                    raise
            if made.error:
                raise SystemExit(f"step {step}: {made.error}: {made.text}")
    record("work", duration_s=time.monotonic() - began)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
