"""Run by mpirun: the parts that are named, one after the other in one job; what each gave on a rank is said on a line.

    mpirun --with-ft ulfm -n 4 python mpi_run.py turned quick full training refused late killed left

`killed` and `left` come last: the job is broken after them. The job ends with code 7 then, else with 0.
"""

from __future__ import annotations

import datetime
import json
import os
import sys
from typing import Any

import mpi_faults
import torch
import torch.distributed as dist

from dtprobe.framework.transport import mpi

BREAKING = ("killed", "left")


def main(parts: list[str]) -> None:
    torch.set_num_threads(1)
    where = mpi.register()

    def say(part: str, facts: dict[str, Any]) -> None:
        sys.stdout.write("say " + json.dumps({"part": part, "rank": where.rank, **facts}) + "\n")
        sys.stdout.flush()

    limit = datetime.timedelta(seconds=60)
    if "turned" in parts:  # torch's rank 0 is then another one than the rank that serves `env://`
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        store = dist.TCPStore(address, port, where.world_size, where.rank == 0, limit)
        say("turned", mpi_faults.turned(dist.PrefixStore("turned", store), where.rank, where.world_size))
        again = dist.PrefixStore("again", store)
        dist.init_process_group(mpi.NAME, store=again, rank=where.rank, world_size=where.world_size, timeout=limit)
    else:
        dist.init_process_group(mpi.NAME, timeout=limit)
    gloo, ours = dist.new_group(backend="gloo", timeout=limit), dist.group.WORLD
    assert ours is not None
    for part in parts:
        if part in ("quick", "full"):
            import mpi_table

            say(part, mpi_table.compared(part, gloo, ours))
        elif part == "training":
            import mpi_training

            say(part, mpi_training.compared(gloo, ours))
        elif part != "turned":
            say(part, getattr(mpi_faults, part)())
    if set(parts).intersection(BREAKING):
        sys.exit(7)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
