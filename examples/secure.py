"""A job whose ranks talk encrypted, and what happens when one holds another secret:

    python -m dtprobe.framework.transport.secure new secret
    export DTPROBE_SECRET_FILE=$PWD/secret
    torchrun --standalone --nproc-per-node=2 examples/secure.py [wrong-secret]

A script that shall not be changed at all is started with

    torchrun --standalone --nproc-per-node=2 -m dtprobe.framework.transport.secure run examples/train_mlp.py
"""

from __future__ import annotations

import os
import secrets
import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from dtprobe.errors import DtprobeError
from dtprobe.framework import start
from dtprobe.framework.transport.secure import MasterSecret, secured


def main(mistake: str) -> None:
    secret = MasterSecret.from_environment(os.environ)
    with start(deadline_s=60):
        if mistake == "wrong-secret" and dist.get_rank() == 1:
            secret = MasterSecret(secrets.token_bytes(32))
        with secured(secret):
            torch.manual_seed(0)
            model = DistributedDataParallel(torch.nn.Linear(64, 64))
            for _ in range(10):
                model(torch.randn(8, 64)).square().mean().backward()
            if dist.get_rank() == 0:
                print(f"ten steps, encrypted: {dist.get_backend()} is {type(dist.group.WORLD).__name__}")


if __name__ == "__main__":
    try:
        main(sys.argv[1] if len(sys.argv) > 1 else "")
    except DtprobeError as error:
        sys.exit(f"{type(error).__name__}: {error}")
