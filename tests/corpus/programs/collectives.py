"""Two gloo ranks: three all_reduce in the world and three broadcasts in a second group, then dumps. Rank 1 skips the last one."""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

rank, out, port = int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port, RANK=str(rank), WORLD_SIZE="2", GLOO_SOCKET_IFNAME="lo")
dist.init_process_group("gloo")
data = dist.new_group([0, 1], group_desc="data")
for _ in range(3):
    dist.all_reduce(torch.ones(4, 3))
    dist.broadcast(torch.ones(2), 0, group=data)
if rank == 0:
    work = dist.all_reduce(torch.ones(5), async_op=True)  # open in the dump: rank 1 comes later
(out / f"gloo_trace_rank_{rank}").write_bytes(c10d._dump_fr_trace(True, False, False))
(out / f"gloo_trace_rank_{rank}.json").write_bytes(c10d._dump_fr_trace_json(True, False))
if rank == 0:
    (out / "gloo_frames_rank_0").write_bytes(c10d._dump_fr_trace(True, True, False))
else:
    dist.all_reduce(torch.ones(5))
dist.barrier()
dist.destroy_process_group()
