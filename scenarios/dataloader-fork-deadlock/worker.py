"""Two ranks, each with a DataLoader whose worker process is forked; on rank 1 another thread may hold the data set's lock just then.

The data set keeps a cache under a lock, which a thread of the rank renews (`--renew-s`: for so long it has the lock each time).
`--cured` lets every fork wait for the lock, by `os.register_at_fork`, as Python's logging does with its own.

By hand, once for each rank: `RANK=0 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=29500 python worker.py`
"""

from __future__ import annotations

import argparse
import os
import threading
import time
from pathlib import Path

import psutil
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

from dtprobe import attempt, record
from dtprobe.authoring.rendezvous import join

RENEWS = 1


class Cached(Dataset):
    """Items out of a cache that a lock guards."""

    def __init__(self) -> None:
        self.lock = threading.Lock()

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        with self.lock:
            return torch.full((4,), float(index))

    def renew(self, seconds: float, begun: threading.Event) -> None:
        with self.lock:
            begun.set()
            time.sleep(seconds)

    def survive_forks(self) -> None:
        """A fork waits until nobody has the lock, so the child's copy is free."""
        os.register_at_fork(before=self.lock.acquire, after_in_parent=self.lock.release, after_in_child=self.lock.release)


def give_up() -> None:
    """Say in which wait the loader's worker process is, and end: nothing else would."""
    for child in psutil.Process().children():
        record("stuck", wchan=Path(f"/proc/{child.pid}/wchan").read_text(encoding="ascii"), status=child.status())
        child.kill()
    os._exit(3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--timeout-s", type=float, default=5.0)
    parser.add_argument("--patience-s", type=float, default=12.0)
    parser.add_argument("--renew-s", type=float, default=0.0)
    parser.add_argument("--cured", action="store_true")
    args = parser.parse_args()
    rank = join(args.timeout_s, device=args.device)
    began = time.monotonic()
    data, value = Cached(), torch.zeros(4, device=args.device)
    if args.cured:
        data.survive_forks()
    dist.all_reduce(value)
    if args.renew_s and rank == RENEWS:
        begun = threading.Event()
        threading.Thread(target=data.renew, args=(args.renew_s, begun), daemon=True).start()
        begun.wait()
    patience = threading.Timer(args.patience_s, give_up)
    patience.daemon = True
    patience.start()
    with attempt("epoch") as made:
        for batch in DataLoader(data, batch_size=2, num_workers=1, multiprocessing_context="fork"):
            value += batch[0].to(args.device)
            dist.all_reduce(value)
    patience.cancel()
    if made.error:
        raise SystemExit(f"{made.error}: {made.text}")
    record("work", duration_s=time.monotonic() - began)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
