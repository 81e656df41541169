"""How fast the dumps of many ranks are matched and in what memory, beside torch's own `torchfrtrace`.

    python benchmarks/flight_recorder.py [--ranks 256] [--entries 2000] [--frames 10] [--rounds 3] [--alone]

The dumps (in a temporary folder that is removed at the end) are of ranks in the world and in tensor groups of eight, whose calls are
four of five; all have wrapped their ring, the last three calls are open, and one rank does not make the very last, the world's. Each round runs `torchfrtrace` and
`dtprobe postmortem --json` in turn, each in a fresh process. Figures are medians with the range: wall clock, processor time (user and
system, of the process and its children), peak resident memory (not below this program's own). `--alone` leaves torchfrtrace out, for
sizes that it cannot hold. Exit code 1 where the diagnosis names another rank, or takes more than a fifth of torchfrtrace's processor time or memory.
"""

from __future__ import annotations

import argparse
import json
import pickle
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from _processes import Run, ran
from rich.console import Console
from rich.table import Table

WANTED = 0.2
WIDTH = 8
HISTORY = 40_000
T0_NS = 1_780_000_000_000_000_000
OPS = ("_all_gather_base", "all_reduce", "_reduce_scatter_base")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=256)
    parser.add_argument("--entries", type=int, default=2000)
    parser.add_argument("--frames", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--alone", action="store_true", help="without torchfrtrace")
    options = parser.parse_args()
    behind = options.ranks * 3 // 5
    with tempfile.TemporaryDirectory(prefix="dtprobe-bench-") as folder:
        dumps = Path(folder, "dumps")
        dumps.mkdir()
        size = sum(made(dumps, rank, options, rank == behind) for rank in range(options.ranks))
        commands = {
            "torchfrtrace": [str(Path(sys.executable).with_name("torchfrtrace")), str(dumps), "-p", "nccl_trace_rank_"],
            "dtprobe": [
                sys.executable,
                "-m",
                "dtprobe",
                "postmortem",
                str(dumps),
                "--json",
                "--out",
                str(Path(folder, "runs")),
            ],
        }
        if options.alone:
            del commands["torchfrtrace"]
        found: dict[str, list[Run]] = {kind: [] for kind in commands}
        for _ in range(options.rounds):
            for kind, command in commands.items():
                found[kind].append(ran(command))
    return told(
        found, behind, f"{options.ranks} ranks x {options.entries} entries x {options.frames} frames, {size / 1e6:.0f} MB"
    )


def made(folder: Path, rank: int, options: argparse.Namespace, behind: bool) -> int:
    """Write one rank's dump; its size."""
    ranks, first = options.ranks, rank // WIDTH * WIDTH
    groups = (
        ("0", "default_pg", list(range(ranks))),
        (f"{1 + rank // WIDTH}", "tp", list(range(first, min(first + WIDTH, ranks)))),
    )
    frames = [{"name": f"f{at}", "filename": f"/srv/job/part{at % 17}.py", "line": at} for at in range(60)]
    seqs, rows = [HISTORY] * 2, []
    for at in range(options.entries):
        place = (at - options.entries) % 5  # the last call is the world's
        which = int(place < 4)
        seqs[which] += 1
        last = at >= options.entries - 3
        if behind and at == options.entries - 1:
            break
        number, size = OPS[place % 3], 512 * (1 + at // 5 % 7)
        rows.append(_entry(at, which, groups[which], number, seqs[which], size, last, rank))
        if options.frames:
            rows[-1]["frames"] = [frames[(place * 7 + depth) % 60] for depth in range(options.frames)]
    config = {name: {"name": name, "desc": desc, "ranks": str(members)} for name, desc, members in groups}
    data = pickle.dumps({"version": "2.10", "pg_config": config, "pg_status": {}, "entries": rows}, 2)
    (folder / f"nccl_trace_rank_{rank}").write_bytes(data)
    return len(data)


def _entry(
    at: int, which: int, group: tuple[str, str, list[int]], op: str, seq: int, size: int, last: bool, rank: int
) -> dict[str, Any]:
    created = T0_NS + at * 1_000_000 + rank * 500
    return {
        "record_id": HISTORY + at,
        "pg_id": which,
        "process_group": group[:2],
        "collective_seq_id": seq,
        "p2p_seq_id": 0,
        "op_id": seq,
        "profiling_name": f"nccl:{op}",
        "time_created_ns": created,
        "input_sizes": [[size * len(group[2]) if op == "_reduce_scatter_base" else size]],
        "input_dtypes": ["BFloat16"],
        "output_sizes": [[size * len(group[2]) if op == "_all_gather_base" else size]],
        "output_dtypes": ["BFloat16"],
        "state": "scheduled" if last else "completed",
        "time_discovered_started_ns": None if last else created + 400_000,
        "time_discovered_completed_ns": None if last else created + 900_000,
        "retired": not last,
        "timeout_ms": 600_000,
        "is_p2p": False,
    }


def told(found: dict[str, list[Run]], behind: int, title: str) -> int:
    """Print the table; the exit code."""
    table = Table("", "wall s", "processor s", "ratio", "peak MB", "ratio", title=title)
    reference = found.get("torchfrtrace", found["dtprobe"])
    good = True
    for kind, runs in found.items():
        walls = [one.wall_s for one in runs]
        time_ratio = statistics.median(one.cpu_s / other.cpu_s for one, other in zip(runs, reference, strict=True))
        memory_ratio = statistics.median(one.peak_mb / other.peak_mb for one, other in zip(runs, reference, strict=True))
        good = good and (runs is reference or max(time_ratio, memory_ratio) <= WANTED)
        table.add_row(
            kind,
            f"{statistics.median(walls):.1f} ({min(walls):.1f}-{max(walls):.1f})",
            f"{statistics.median(one.cpu_s for one in runs):.1f}",
            f"{time_ratio:.3f}",
            f"{max(one.peak_mb for one in runs):.0f}",
            f"{memory_ratio:.3f}",
        )
    Console(width=120).print(table)
    answers = [json.loads(one.out) for one in found["dtprobe"]]
    said = {(one["failure_mode"], one["first_failing_rank"]) for one in answers}
    print(f"diagnosed: {said}; behind is rank {behind}")
    return 0 if good and {rank for _, rank in said} == {behind} else 1


if __name__ == "__main__":
    sys.exit(main())
