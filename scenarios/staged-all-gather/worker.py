"""All-gathers in both forms, and a backend for collectives that is said to exist.

The list form gathers into one tensor a rank and makes one of them; the tensor form gathers into one at once. The profiler counts
the copies of each. With `--device cuda` it says too how long a GPU's memory was copied from or to the host. `--ask` tries to make a default group and a further group of the backend `tensorpipe`, as the document tells.

By hand, once for each rank: `RANK=0 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=29500 python worker.py --ask`
"""

from __future__ import annotations

import argparse
import functools
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from dtprobe import attempt
from dtprobe.authoring.rendezvous import join

N = 1 << 20


def list_form(x: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    each = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(each, x, group=group)
    return torch.cat(each)


def tensor_form(x: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    whole = x.new_empty(dist.get_world_size() * x.numel())
    dist.all_gather_into_tensor(whole, x, group=group)
    return whole


FORMS = {"list": list_form, "tensor": tensor_form}
Call = Callable[[], torch.Tensor]


def copies(call: Call) -> int:
    """Copies in one call that the profiler sees: tensors copied, here or by the process group, and lists put together."""
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        call()
    return sum(one.count for one in seen.key_averages() if one.key in ("aten::copy_", "aten::cat"))


def staged(call: Call) -> tuple[float, float]:
    """Seconds of one call, and seconds of it in which a GPU's memory is copied from or to the host."""
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as seen:
        began = time.perf_counter()
        call()
        torch.cuda.synchronize()
        took = time.perf_counter() - began
    moves = [one for one in seen.key_averages() if one.key.startswith(("Memcpy DtoH", "Memcpy HtoD"))]
    return took, sum(one.device_time_total for one in moves) / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ask", action="store_true")
    parser.add_argument("--trials", type=int, default=5)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--staging", action="store_true", help="with cuda: gather over gloo, which has no way between GPUs")
    parser.add_argument("--elements", type=int, default=N)
    args = parser.parse_args()
    rank = join(60.0, device=args.device)
    group = dist.new_group(backend="gloo") if args.staging else None
    ramp = torch.arange(args.elements, dtype=torch.float32, device=args.device)
    x = ramp + rank
    wanted = torch.cat([ramp + one for one in range(dist.get_world_size())])
    for name, form in FORMS.items():
        call = functools.partial(form, x, group)
        call()
        count = copies(call)
        for _ in range(args.trials):
            with attempt("gather", form=name, copies=count):
                whole = call()
            with attempt("compare", form=name) as made:
                made.note(wrong=int((whole != wanted).sum()))
            if args.device == "cuda":
                with attempt("stage", form=name) as made:
                    made.note(**dict(zip(("call_s", "copy_s"), staged(call), strict=True)))
    if args.ask:
        for _ in range(args.trials):
            with attempt("ask"):
                dist.all_gather_into_tensor(torch.empty_like(wanted), x, group=dist.new_group(backend="tensorpipe"))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
