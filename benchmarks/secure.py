"""What encryption costs: the cipher on one core, and operations of two ranks over gloo with and without it.

    python benchmarks/secure.py [--ranks 2] [--rounds 9]

Each round measures every kind once, in turn. Cipher: bytes of plaintext per second of processor time (so that neighbours count
less) of `seal` into buffers that are used again, of `open`, and of the library's plain `encrypt`, which makes a new buffer each
time; median over rounds with the range; the ratio is that of seal to plain encrypt in the same round. Operations: median over rounds of the mean time of a call on rank 0, wall clock,
on this host over loopback, and the ratio to `gloo` in the same round; `cpu ratio` is that of rank 0's processor time.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from _ranks import outputs, tell, timed
from rich.console import Console
from rich.table import Table

SECRET = b"benchmark" * 4
SIZES = {"4 KiB": 4 << 10, "64 KiB": 64 << 10, "1 MiB": 1 << 20, "16 MiB": 16 << 20, "64 MiB": 64 << 20}
WORKS = {
    "all_reduce 4 B": 60,
    "all_reduce 1 MiB": 30,
    "all_reduce 16 MiB": 5,
    "all_reduce 64 MiB": 2,
    "send 1 MiB": 30,
    "send 64 MiB": 2,
    "step": 10,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    if "RANK" in os.environ:
        rank(options.rounds)
        return
    console = Console(width=140)
    console.print(cipher_table(cipher(options.rounds)))
    console.print(operations_table(measured(options), options))


def cipher(rounds: int) -> dict[str, list[dict[str, float]]]:
    """Size -> a dict a round: `seal`, `open`, `encrypt` in GB/s."""
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    from dtprobe.framework.transport.secure import Channel, Description, MasterSecret, Opener, Sealer, Session
    from dtprobe.framework.transport.secure.records import sealed_size

    session = Session.between(MasterSecret(SECRET), "benchmark", {0: b"0" * 32, 1: b"1" * 32})
    sealer, opener = Sealer(session, Channel(0, 1, "collectives")), Opener(session, Channel(0, 1, "collectives"))
    plain_cipher, counter = AESGCM(SECRET[:32]), 0
    what = Description("send", "uint8", ())
    found: dict[str, list[dict[str, float]]] = {}
    for name, size in SIZES.items():
        plain, opened = memoryview(bytearray(size)), memoryview(bytearray(size))
        calls = max(2, (64 << 20) // size // 4)
        buffers = [memoryview(bytearray(sealed_size(size))) for _ in range(max(1, (64 << 10) // size))]
        found[name] = []
        for number in range(rounds + 1):
            took = dict.fromkeys(("seal", "open", "encrypt"), 0.0)
            for begin in range(0, calls, len(buffers)):
                batch = buffers[: calls - begin]
                started = time.thread_time()
                for buffer in batch:
                    sealer.seal(plain, what, buffer)
                sealed = time.thread_time()
                for buffer in batch:
                    opener.open(buffer, what, opened)
                after = time.thread_time()
                for _ in batch:
                    counter += 1
                    plain_cipher.encrypt(counter.to_bytes(12, "big"), plain, b"")
                took["encrypt"] += time.thread_time() - after
                took["seal"] += sealed - started
                took["open"] += after - sealed
            if number:  # the first round warms up
                found[name].append({kind: calls * size / seconds / 1e9 for kind, seconds in took.items()})
    return found


def cipher_table(found: dict[str, list[dict[str, float]]]) -> Table:
    table = Table("message", "seal GB/s", "open GB/s", "plain encrypt GB/s", "seal / encrypt", title="cipher, one core")
    for name, rounds in found.items():
        cells = [_spread([each[kind] for each in rounds], "") for kind in ("seal", "open", "encrypt")]
        table.add_row(name, *cells, f"{statistics.median(each['seal'] / each['encrypt'] for each in rounds):.2f}")
    return table


def measured(options: argparse.Namespace) -> list[dict[str, dict[str, list[float]]]]:
    """Start the ranks of this program; what rank 0 measured, a dict a round: work -> kind -> wall and processor seconds a call."""
    return json.loads(outputs(__file__, options.ranks, ["--rounds", str(options.rounds)])[0])


def operations_table(rounds: list[dict[str, dict[str, list[float]]]], options: argparse.Namespace) -> Table:
    table = Table("work", "gloo", "secured", "ratio", "cpu ratio", title=f"{options.ranks} ranks, {options.rounds} rounds")
    for work in WORKS:
        times = {kind: [each[work][kind][0] * 1e3 for each in rounds] for kind in ("gloo", "secured")}
        ratios = [
            statistics.median(each[work]["secured"][clock] / each[work]["gloo"][clock] for each in rounds) for clock in (0, 1)
        ]
        cells = [_spread(times[kind], " ms") for kind in times]
        table.add_row(work, *cells, *(f"{ratio:.2f}" for ratio in ratios))
    return table


def rank(rounds: int) -> None:
    """One rank of the measured job; rank 0 prints what it measured."""
    import torch.distributed as dist

    from dtprobe.framework.transport.secure import MasterSecret, secured

    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    bare = {work: _work(work, dist.group.WORLD) for work in WORKS}
    with secured(MasterSecret(SECRET)):
        works = {work: {"gloo": bare[work], "secured": _work(work, dist.group.WORLD)} for work in WORKS}
        found = []
        for number in range(rounds + 1):
            times = {work: {kind: timed(call, WORKS[work]) for kind, call in kinds.items()} for work, kinds in works.items()}
            if number:  # the first round warms up
                found.append(times)
    tell(found)


def _work(name: str, group: Any) -> Callable[[], object]:
    import torch
    from torch.distributed import AllreduceOptions

    if name == "step":
        torch.manual_seed(0)
        layers = torch.nn.Sequential(torch.nn.Linear(512, 1024), torch.nn.ReLU(), torch.nn.Linear(1024, 512))
        model = torch.nn.parallel.DistributedDataParallel(layers, process_group=group, bucket_cap_mb=1)
        batch = torch.randn(64, 512)
        return lambda: model(batch).square().mean().backward()
    kind, amount, unit = name.split()
    tensor = torch.zeros(max(1, int(amount) * {"B": 1, "MiB": 1 << 20}[unit] // 4))
    if kind == "all_reduce":
        options = AllreduceOptions()
        options.asyncOp = False  # as torch.distributed.all_reduce does
        return lambda: group.allreduce([tensor], options).wait()
    if group.rank() > 1:
        return lambda: None

    def message() -> None:
        work = group.recv([tensor], 0, 0) if group.rank() else group.send([tensor], 1, 0)
        work.wait()

    return message


def _spread(values: list[float], unit: str) -> str:
    return f"{statistics.median(values):.2f}{unit} ({min(values):.2f}-{max(values):.2f})"


if __name__ == "__main__":
    main()
