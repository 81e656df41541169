"""Two ranks that share a store in a folder: rank 0 sets a key, and rank 1, whose view of the folder may be an old one, waits for it.

The ranks agree on when by collectives on a group that does not use the folder. `--store safe` uses the framework's file store.

By hand, once for each rank: `DTPROBE_SCRATCH=/tmp RANK=0 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=29500 python looker.py`
"""

from __future__ import annotations

import argparse
import contextlib
import os
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from dtprobe import attempt, record
from dtprobe.authoring.rendezvous import join

START_S = 60.0
LOOKER = 1
NAMES = ("store", "job.0")
"""What the stores are going to make in the folder."""


@contextlib.contextmanager
def opened(kind: str, folder: Path, rank: int, world_size: int, timeout_s: float) -> Iterator[dist.Store]:
    if kind == "safe":
        from dtprobe.framework.filestore import SafeFileStore

        with SafeFileStore(folder, run="job", rank=rank, world_size=world_size, timeout_s=timeout_s) as safe:
            yield safe
        return
    store = dist.FileStore(str(folder / "store"), world_size)
    store.set_timeout(timedelta(seconds=timeout_s))
    yield store


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--store", choices=("torch", "safe"), default="torch")
    parser.add_argument("--tries", type=int, default=2)
    parser.add_argument("--timeout-s", type=float, default=20.0)
    args = parser.parse_args()
    rank = join(START_S)
    began = time.monotonic()
    folder = Path(os.environ["DTPROBE_SCRATCH"], "meeting", os.environ["MASTER_PORT"])  # the scratch folder is that of all arms
    folder.mkdir(parents=True, exist_ok=True)
    there = [name for name in NAMES if (folder / name).exists()]  # a client may go on believing that they are not
    assert not there, f"{there} are in the way"
    dist.barrier()
    with contextlib.ExitStack() as stack:
        for one in range(dist.get_world_size()):
            if rank == one:
                with attempt("open"):
                    store = stack.enter_context(opened(args.store, folder, rank, dist.get_world_size(), args.timeout_s))
            dist.barrier()
        for number in range(args.tries):
            key = f"key{number}"
            if rank == LOOKER:
                store.check([key])  # from here on its client knows the file as it is now
            dist.barrier()
            if rank == LOOKER:
                with attempt("see") as made:
                    set_ns = int(store.get(key))
                    made.note(blind_s=(time.time_ns() - set_ns) / 1e9)
            else:
                store.set(key, str(time.time_ns()))
            dist.barrier()
    record("work", duration_s=time.monotonic() - began)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
