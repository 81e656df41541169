"""How fast the readers are and what memory they take: strace beside stracetools, the others by themselves.

    python benchmarks/readers.py [--lines 300000] [--repeats 5] [--keep FOLDER]

Each reading is done in a fresh process, the readers in turn, so that the machine's mood falls on all alike. Times are medians
with the range, without imports and after a warm-up on ten lines. `peak` is the highest resident memory during the reading
above that before it, over the size of the file. `stracetools` (PyPI, 1.0) reads `strace -f -tt` only, so that form is
measured: a made-up trace of eight threads (of calls as the recorded ones in tests/corpus), and, where strace is here, a real
one. Exit code 1 where strace is read less than 5 times as fast as by stracetools, or takes more than 4 times the file.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import pickle
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

WANTED_RATIO, WANTED_PEAK = 5, 4
_CALLS = (
    "import os, threading\n"
    "def work(n):\n"
    "    for at in range(n):\n"
    "        descriptor = os.open('/etc/hosts', os.O_RDONLY)\n"
    "        os.read(descriptor, 64); os.fstat(descriptor); os.lseek(descriptor, 0, 0); os.close(descriptor)\n"
    "        try: os.stat('/nope/%d' % at)\n"
    "        except OSError: pass\n"
    "        with lock: os.write(sink, b'{\"step\": %d}' % at)\n"
    "lock, sink = threading.Lock(), os.open('/dev/null', os.O_WRONLY)\n"
    "threads = [threading.Thread(target=work, args=(COUNT,)) for _ in range(4)]\n"
    "[t.start() for t in threads]; [t.join() for t in threads]\n"
)


def made_strace(path: Path, lines: int) -> None:
    """Eight threads that open, map, send, poll and wait; half of the waits are cut in two by the others' lines."""
    rng = random.Random(1)
    waiting: dict[int, str] = {}
    now = 64_800_000_000
    with path.open("w") as file:
        for _ in range(lines):
            now += rng.randrange(1, 60)
            tid = rng.randrange(4242, 4250)
            seconds = now // 10**6
            head = f"{tid} {seconds // 3600:02}:{seconds // 60 % 60:02}:{seconds % 60:02}.{now % 10**6:06}"
            if tid in waiting:
                file.write(f"{head} <... {waiting.pop(tid)} <{rng.random() / 100:.6f}>\n")
                continue
            kind, address = rng.random(), f"0x7f{rng.randrange(1 << 40):010x}"
            if kind < 0.3:
                file.write(
                    f"{head} futex({address}, FUTEX_WAIT_BITSET_PRIVATE, 0, NULL, FUTEX_BITSET_MATCH_ANY <unfinished ...>\n"
                )
                waiting[tid] = "futex resumed>) = 0"
            elif kind < 0.6:
                name = f"/usr/lib/python3/dist-packages/module_{rng.randrange(1000)}.py"
                file.write(f'{head} openat(AT_FDCWD, "{name}", O_RDONLY|O_CLOEXEC) = {rng.randrange(3, 90)} <0.000021>\n')
            elif kind < 0.8:
                data = (
                    '{msg_name=NULL, msg_namelen=0, msg_iov=[{iov_base="\\1\\0\\0\\0", iov_len=64}], msg_iovlen=1, msg_flags=0}'
                )
                file.write(f"{head} sendmsg({rng.randrange(3, 90)}, {data}, MSG_NOSIGNAL) = 64 <0.000021>\n")
            elif kind < 0.9:
                file.write(
                    f"{head} recvmsg(12, {{msg_namelen=0}}, 0) = -1 EAGAIN (Resource temporarily unavailable) <0.000005>\n"
                )
            else:
                file.write(
                    f"{head} mmap(NULL, 4096, PROT_READ|PROT_WRITE, MAP_PRIVATE|MAP_ANONYMOUS, -1, 0) = {address} <0.000010>\n"
                )


def recorded_strace(path: Path, lines: int) -> None:
    """A real trace of four threads, as long as wanted."""
    program = _CALLS.replace("COUNT", str(lines // 28 + 1))
    subprocess.run(
        ["strace", "-f", "-tt", "-T", "-o", str(path), sys.executable, "-I", "-S", "-c", program], check=True, timeout=300
    )
    with path.open() as file:
        text = [line for _, line in zip(range(lines), file, strict=False)]
    path.write_text("".join(text))


def made_dump(entries: int = 2000, frames: int = 10) -> dict[str, Any]:
    """A Flight Recorder dump of one rank, its stacks shared as torch shares them."""
    calls = [{"name": f"call_{at}", "filename": f"/workspace/train/part_{at % 23}.py", "line": at} for at in range(120)]
    stacks = [[calls[(at * 7 + one) % 120] for one in range(frames)] for at in range(40)]
    rows = [
        {"record_id": at, "pg_id": 0, "process_group": ("0", "default_pg"), "collective_seq_id": at, "p2p_seq_id": 0, "op_id": at,
         "profiling_name": "nccl:all_reduce", "time_created_ns": 1_790_000_000_000_000_000 + at, "input_sizes": [[1024 * (1 + at % 7)]],
         "input_dtypes": ["BFloat16"], "output_sizes": [[1024]], "output_dtypes": ["BFloat16"], "state": "completed",
         "time_discovered_started_ns": 1_790_000_000_000_000_001 + at, "time_discovered_completed_ns": 1_790_000_000_000_000_002 + at,
         "retired": True, "timeout_ms": 600_000, "is_p2p": False, "duration_ms": 0.5, "thread_name": "python3", "frames": list(stacks[at % 40])}
        for at in range(entries)
    ]  # fmt: skip
    return {"version": "2.10", "pg_config": {"0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1]"}}, "entries": rows}


def made_stacks(threads: int = 500, frames: int = 60) -> list[dict[str, Any]]:
    """A py-spy dump of many threads."""
    lines = [
        {"name": f"call_{at}", "filename": f"/a/b_{at}.py", "short_filename": f"b_{at}.py", "line": at + 1, "locals": None}
        for at in range(frames)
    ]
    return [
        {"pid": 7, "thread_id": at, "thread_name": f"thread {at}", "os_thread_id": at + 8, "active": False, "owns_gil": False, "frames": lines}
        for at in range(threads)
    ]  # fmt: skip


def made_samples(path: Path, samples: int = 10_000, frames: int = 20) -> None:
    """perf script's text."""
    with path.open("w") as file:
        for at in range(samples):
            file.write(
                f"python3 {4242 + at % 8} [001]  {100 + at / 1000:.6f}: syscalls:sys_enter_futex: uaddr: 0x7f8e11a22a4c, op: 0x81\n"
            )
            file.writelines(
                f"\t    7f8e{at % 7:04x}{one:04x} call_{(at * 3 + one) % 200}+0x1f (/usr/lib/libc.so.6)\n"
                for one in range(frames)
            )
            file.write("\n")


def _status(key: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key))
    return int(line.split()[1]) * 1024


def _reader(who: str) -> Callable[[Path], int]:
    if who == "stracetools":
        from stracetools import StraceParser

        return lambda path: len(StraceParser().parse_file(str(path)))
    if who == "pickle.loads":
        return lambda path: len(pickle.loads(path.read_bytes())["entries"])  # noqa: S301  made by this program
    from dtprobe.readers import flight_recorder, perf, pyspy, strace

    reads: dict[str, Callable[[Path], Any]] = {
        "strace": strace.read_strace,
        "flight_recorder": flight_recorder.read_flight_recorder,
        "pyspy": pyspy.read_pyspy,
        "perf_script": perf.read_perf_script,
    }
    return lambda path: len(reads[who](path))


def child(who: str, path: Path, warm: Path) -> None:
    """Read once, and print seconds, rows and peak bytes as JSON."""
    read = _reader(who)
    with contextlib.redirect_stdout(io.StringIO()):
        read(warm)
        before = _status("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # the peak counts anew from here
        began = time.perf_counter()
        rows = read(path)
        seconds = time.perf_counter() - began
    print(json.dumps({"seconds": seconds, "rows": rows, "peak": _status("VmHWM") - before}))


def measure(
    jobs: list[tuple[str, str, Path, Path]], repeats: int, console: Console
) -> dict[tuple[str, str], list[dict[str, float]]]:
    """Each job once a round, in a process of its own."""
    found: dict[tuple[str, str], list[dict[str, float]]] = {}
    for at in range(repeats):
        for what, who, path, warm in jobs:
            console.print(f"round {at + 1} of {repeats}: {what}, {who}", style="dim")
            argv = [sys.executable, __file__, "--child", who, str(path), str(warm)]
            done = subprocess.run(argv, capture_output=True, text=True, check=True, timeout=600)
            found.setdefault((what, who), []).append(json.loads(done.stdout.splitlines()[-1]))
    return found


def prepare(folder: Path, lines: int, console: Console) -> list[tuple[str, str, Path, Path]]:
    """The inputs, each with a short one of its kind for the warm-up."""
    made: list[tuple[str, str, Path, Path]] = []
    traces: dict[str, Callable[[Path, int], None]] = {"strace, made": made_strace}
    if shutil.which("strace"):
        traces["strace, recorded"] = recorded_strace
    else:
        console.print("no recorded trace: strace is not here (apt-get install strace)")
    for at, (what, write) in enumerate(traces.items()):
        path, warm = folder / f"trace{at}.txt", folder / f"warm{at}.txt"
        write(path, lines)
        with path.open() as file:
            warm.write_text("".join(next(file) for _ in range(10)))
        made += [(what, who, path, warm) for who in ("strace", "stracetools")]
    dump, text, short, stacks, samples = (
        folder / name for name in ("dump", "dump.json", "short", "stacks.json", "samples.script.txt")
    )
    dump.write_bytes(pickle.dumps(made_dump(), 2))
    text.write_text(json.dumps(made_dump(), separators=(",", ":")))
    short.write_bytes(pickle.dumps(made_dump(2), 2))
    stacks.write_text(json.dumps(made_stacks()))
    made_samples(samples)
    made += [("Flight Recorder, pickle", who, dump, short) for who in ("flight_recorder", "pickle.loads")]
    made += [("Flight Recorder, JSON", "flight_recorder", text, short), ("py-spy, JSON", "pyspy", stacks, stacks)]
    return [*made, ("perf script", "perf_script", samples, samples)]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--lines", type=int, default=300_000)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--keep", type=Path, help="leave the inputs in this folder")
    parser.add_argument("--child", nargs=3, metavar=("READER", "FILE", "WARM"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        child(given.child[0], Path(given.child[1]), Path(given.child[2]))
        return 0
    console = Console(stderr=True)
    with tempfile.TemporaryDirectory() as scratch:
        folder = given.keep or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        jobs = prepare(folder, given.lines, console)
        found = measure(jobs, given.repeats, console)
        return report(jobs, found)


def report(jobs: list[tuple[str, str, Path, Path]], found: dict[tuple[str, str], list[dict[str, float]]]) -> int:
    """Print the table; 1 where strace's reader is not as fast or as small as it must be."""
    table = Table("input", "reader", "MB", "seconds (range)", "lines or entries/s", "MB/s", "times the other", "peak / file")
    missed = []
    for what, who, path, _ in jobs:
        seconds = [one["seconds"] for one in found[what, who]]
        middle, size = statistics.median(seconds), path.stat().st_size
        count = (
            found[what, who][0]["rows"] if "Flight" in what else path.read_bytes().count(b"\n") or found[what, who][0]["rows"]
        )
        peak = statistics.median(one["peak"] for one in found[what, who]) / size
        other = next((runs for (one, name), runs in found.items() if one == what and name != who), None)
        ratio = statistics.median(one["seconds"] for one in other) / middle if other else None
        if who == "strace" and ((ratio or 0) < WANTED_RATIO or peak > WANTED_PEAK):
            missed.append(
                f"{what}: {ratio or 0:.1f} times stracetools (wanted {WANTED_RATIO}), peak {peak:.1f} (at most {WANTED_PEAK})"
            )
        table.add_row(
            what, who, f"{size / 1e6:.1f}", f"{middle:.3f} ({min(seconds):.3f}-{max(seconds):.3f})", f"{count / middle:,.0f}",
            f"{size / 1e6 / middle:.1f}", f"{ratio:.1f}" if ratio else "", f"{peak:.1f}",
        )  # fmt: skip
    Console(width=150).print(table)
    for text in missed:
        print(f"not met: {text}")
    return 1 if missed else 0


if __name__ == "__main__":
    raise SystemExit(main())
