"""A small classifier of 28 by 28 pictures, trained by DistributedDataParallel on pictures that it draws itself.

    torchrun --nproc-per-node 2 examples/train_mlp.py

Runs on CPUs (gloo) and GPUs (nccl). It prints a line every 20 steps, evaluates over all ranks, and writes a checkpoint.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

CLASSES = 10


def pictures(many: int, seed: int) -> TensorDataset:
    """Noisy pictures of ten fixed patterns, and which pattern each shows."""
    patterns = torch.randn(CLASSES, 784, generator=torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(CLASSES, (many,), generator=generator)
    return TensorDataset(patterns[labels] + 2 * torch.randn(many, 784, generator=generator), labels)


def accuracy(model: nn.Module, data: TensorDataset, device: torch.device) -> float:
    """The share of pictures that are told right, every rank looking at its own part."""
    pictures, labels = (part[dist.get_rank() :: dist.get_world_size()].to(device) for part in data.tensors)
    with torch.no_grad():
        right = (model(pictures).argmax(1) == labels).sum()
    counts = torch.stack([right, torch.tensor(len(labels), device=device)])
    dist.all_reduce(counts)
    return counts[0].item() / counts[1].item()


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--epochs", type=int, default=5)
    options.add_argument("--samples", type=int, default=4096)
    options.add_argument("--batch", type=int, default=64)
    options.add_argument("--timeout-s", type=float, default=1800, help="how long a collective may take")
    options.add_argument("--checkpoint", type=Path, help="default: a file in the temporary folder, removed at the end")
    chosen = options.parse_args()

    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo", timeout=timedelta(seconds=chosen.timeout_s))
    torch.manual_seed(dist.get_rank())

    data = pictures(chosen.samples, seed=1)
    sampler = DistributedSampler(data, seed=0)
    loader = DataLoader(data, batch_size=chosen.batch, sampler=sampler)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, CLASSES)).to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    loss_of = nn.CrossEntropyLoss()

    step = 0
    for epoch in range(chosen.epochs):
        sampler.set_epoch(epoch)
        for images, labels in loader:
            optimizer.zero_grad()
            loss = loss_of(model(images.to(device)), labels.to(device))
            loss.backward()
            optimizer.step()
            step += 1
            if step % 20 == 0:
                mean = loss.detach().clone()
                dist.all_reduce(mean)
                if dist.get_rank() == 0:
                    print(f"epoch {epoch} step {step} loss {mean.item() / dist.get_world_size():.4f}", flush=True)
    reached = accuracy(model, pictures(1024, seed=2), device)
    with tempfile.TemporaryDirectory() as scratch:
        if dist.get_rank() == 0:
            torch.save(model.module.state_dict(), chosen.checkpoint or Path(scratch) / "mlp.pt")
        dist.barrier()
    if dist.get_rank() == 0:
        print(f"accuracy {reached:.3f} after {step} steps", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
