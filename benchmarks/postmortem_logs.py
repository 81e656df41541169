"""How fast a large log is diagnosed and in what memory, beside ripgrep with the same signatures.

    python benchmarks/postmortem_logs.py [--size 1.0] [--rounds 3] [--ranks 64]

The log (`--size` GB, in a temporary folder) is of a job of many ranks: steps, NCCL's log, progress bars, now and then a warning; in its
last tenth rank 5 runs out of memory and the others wait for it. Each round runs, in turn, `rg` with all anchors of the signatures as
plain texts, `rg` with their patterns (those that its engine knows; of the others the anchors), both counting lines, and
`dtprobe postmortem --json`, each in a fresh process. Figures are medians with the range: wall clock, processor time (user and system), peak resident
memory (not below this program's own, which each process begins as). Exit code 1 where the diagnosis is wrong, slower by wall clock than a quarter of ripgrep with the anchors, or takes more than 500 MB.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
from datetime import datetime, timedelta
from pathlib import Path

from _processes import Run, ran
from rich.console import Console
from rich.table import Table

from dtprobe.diagnose.signatures import anchors, signatures

WANTED_RATIO, WANTED_MB = 0.25, 500
BLOCK_LINES = 200_000
RIPGREP = ("rg", "--count", "--text", "--no-mmap", "--regex-size-limit=2G", "--dfa-size-limit=2G")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=float, default=1.0, help="GB of the log")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ranks", type=int, default=64)
    options = parser.parse_args()
    if shutil.which("rg") is None:
        sys.exit("rg is not here: install ripgrep")
    with tempfile.TemporaryDirectory(prefix="dtprobe-bench-") as folder:
        log = Path(folder, "job", "train.log")
        log.parent.mkdir()
        size = made(log, int(options.size * 1e9), options.ranks)
        found = measured(log, Path(folder), options.rounds)
    return told(found, size)


def made(path: Path, size: int, ranks: int) -> int:
    """Write the log; its size. One block of lines is made and repeated: ripgrep and we look at bytes, not at their meaning."""
    draw = random.Random(7)
    start = datetime(2025, 3, 1)
    block = "".join(_line(draw, start + timedelta(seconds=at // ranks), at, at % ranks) for at in range(BLOCK_LINES)).encode()
    end = "".join(_end(ranks)).encode()
    with path.open("wb") as file:
        while file.tell() < size * 0.9:
            file.write(block)
        file.write(end)
        while file.tell() < size:
            file.write(block)
        return file.tell()


def _line(draw: random.Random, when: datetime, at: int, rank: int) -> str:
    if at % 5000 == 0:
        return f"[rank{rank}]:/opt/app/data.py:{draw.randint(10, 99)}: UserWarning: a slow batch of {draw.randint(2, 9)} s\n"
    if at % 29 == 0:
        return (
            f"gpu{rank // 8}:{4000 + rank}:{5000 + rank} [{rank % 8}] NCCL INFO AllReduce: opCount {at:x} sendbuff 0x7f{draw.getrandbits(40):x} "
            f"count {draw.randint(1, 1 << 20)} datatype 7 op 0 root 0 comm 0x55d{draw.getrandbits(24):x} [nranks={rank}] stream 0x7f\n"
        )
    if at % 97 == 0:
        return f"\rval {draw.randint(0, 99):3}%|####      | {draw.randint(0, 999)}/1000 [00:{draw.randint(10, 59)}<01:10, 9.1it/s]\n"
    return (
        f"[rank{rank}]: {when:%Y-%m-%d %H:%M:%S},{draw.randint(0, 999):03} - trainer - INFO - step {at} | loss {draw.random():.4f} | "
        f"lr {draw.random():.2e} | tokens/s {draw.randint(9000, 12000)} | mem {draw.random() * 80:.1f} GiB\n"
    )


def _end(ranks: int) -> list[str]:
    rows = [
        "[rank5]: Traceback (most recent call last):\n",
        '[rank5]:   File "/opt/app/train.py", line 211, in <module>\n',
        "[rank5]:     loss.backward()\n",
        "[rank5]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 3.20 GiB. GPU 5 has a total capacity of 79.10 GiB of "
        "which 1.10 GiB is free.\n",
    ]
    rows += [
        f"[rank{rank}]:[E301 04:10:{rank % 60:02}.515455609 ProcessGroupNCCL.cpp:616] [Rank {rank}] Watchdog caught collective operation "
        f"timeout: WorkNCCL(SeqNum=88, OpType=ALLREDUCE, NumelIn=6291456, NumelOut=6291456, Timeout(ms)=600000) ran for 6000{rank:02} "
        "milliseconds before timing out.\n"
        for rank in range(ranks)
        if rank != 5
    ]
    return rows


def measured(log: Path, folder: Path, rounds: int) -> dict[str, list[Run]]:
    """The runs by kind, taken in turns; a round before them warms up the file's cache."""
    (folder / "anchors").write_text("\n".join(anchors()) + "\n")
    (folder / "patterns").write_text("\n".join(_known_to_ripgrep()) + "\n")
    commands = {
        "rg, anchors": [*RIPGREP, "--fixed-strings", "--file", str(folder / "anchors"), str(log)],
        "rg, patterns": [*RIPGREP, "--file", str(folder / "patterns"), str(log)],
        "dtprobe": [sys.executable, "-m", "dtprobe", "postmortem", str(log.parent), "--json", "--out", str(folder / "runs")],
    }
    found: dict[str, list[Run]] = {kind: [] for kind in commands}
    for number in range(rounds + 1):
        for kind, command in commands.items():
            if number or kind == "rg, anchors":
                run = ran(command)
                if run.code not in (0, 1):
                    sys.exit(f"{kind}: exit code {run.code}")
                if number:
                    found[kind].append(run)
    return found


def _known_to_ripgrep() -> list[str]:
    """The signatures' patterns; the anchors of one that its engine does not know (it has no lookaround)."""
    known = []
    for one in signatures().values():
        for pattern in one.patterns:
            nameless = re.sub(r"\(\?P<\w+>", "(?:", pattern.pattern)  # a name may stand once in all patterns together
            tried = subprocess.run(["rg", "-e", nameless, os.devnull], capture_output=True, check=False)
            known.extend([nameless] if tried.returncode != 2 else [_escaped(anchor) for anchor in one.anchors])
    return list(dict.fromkeys(known))


def _escaped(text: str) -> str:
    return "".join("\\" + letter if letter in r"\.+*?()|[]{}^$#&-~" else letter for letter in text)


def told(found: dict[str, list[Run]], size: int) -> int:
    """Print the table; the exit code."""
    table = Table("", "wall s", "processor s", "MB/s", "ratio to rg, anchors", "peak MB", title=f"a log of {size / 1e9:.2f} GB")
    reference = found["rg, anchors"]
    ratios = {}
    for kind, runs in found.items():
        walls = [one.wall_s for one in runs]
        ratios[kind] = statistics.median(other.wall_s / one.wall_s for other, one in zip(reference, runs, strict=True))
        table.add_row(
            kind,
            f"{statistics.median(walls):.2f} ({min(walls):.2f}-{max(walls):.2f})",
            f"{statistics.median(one.cpu_s for one in runs):.2f}",
            f"{size / 1e6 / statistics.median(walls):,.0f}",
            f"{ratios[kind]:.2f}",
            f"{max(one.peak_mb for one in runs):.0f}",
        )
    Console(width=140).print(table)
    answers = [json.loads(one.out) for one in found["dtprobe"] if one.code == 1]
    said = {(one["failure_mode"], one["first_failing_rank"]) for one in answers}
    print(f"diagnosed: {said}")
    right = len(answers) == len(found["dtprobe"]) and {rank for _, rank in said} == {5}
    fast, lean = ratios["dtprobe"] >= WANTED_RATIO, max(one.peak_mb for one in found["dtprobe"]) <= WANTED_MB
    return 0 if right and fast and lean else 1


if __name__ == "__main__":
    sys.exit(main())
