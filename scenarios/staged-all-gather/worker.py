"""All-gathers in both forms, and a backend for collectives that is said to exist.

The list form gathers into one tensor a rank and makes one of them; the tensor form gathers into one at once. The profiler counts
the copies of each. `--ask` tries to make a default group and a further group of the backend `tensorpipe`, as the document tells.

By hand, once for each rank: `RANK=0 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=29500 python worker.py --ask`
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from dtprobe import attempt
from dtprobe.authoring.rendezvous import join

N = 1 << 20


def list_form(x: torch.Tensor) -> torch.Tensor:
    each = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(each, x)
    return torch.cat(each)


def tensor_form(x: torch.Tensor) -> torch.Tensor:
    whole = torch.empty(dist.get_world_size() * N)
    dist.all_gather_into_tensor(whole, x)
    return whole


FORMS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {"list": list_form, "tensor": tensor_form}


def copies(form: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> int:
    """Copies in one call that the profiler sees: tensors copied, here or by the process group, and lists put together."""
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        form(x)
    return sum(one.count for one in seen.key_averages() if one.key in ("aten::copy_", "aten::cat"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ask", action="store_true")
    parser.add_argument("--trials", type=int, default=5)
    args = parser.parse_args()
    rank = join(60.0)
    x = torch.arange(N, dtype=torch.float32) + rank
    wanted = torch.cat([torch.arange(N, dtype=torch.float32) + one for one in range(dist.get_world_size())])
    for name, form in FORMS.items():
        form(x)
        count = copies(form, x)
        for _ in range(args.trials):
            with attempt("gather", form=name, copies=count):
                whole = form(x)
            with attempt("compare", form=name) as made:
                made.note(wrong=int((whole != wanted).sum()))
    if args.ask:
        for _ in range(args.trials):
            with attempt("ask"):
                dist.all_gather_into_tensor(torch.empty_like(wanted), x, group=dist.new_group(backend="tensorpipe"))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
