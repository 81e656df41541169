"""How soon `dtprobe watch` names the rank at fault in a job that hangs on NCCL, beside the time that torch's own watchdog takes to end it.

    python benchmarks/nccl_watch.py [--repeats 2] [--jobs 6] [--only skip,gil] [--json FILE]

Each case is a `torchrun` of two ranks under `dtprobe watch --suspect-s 2`, left alone until the watchdog has ended it. Times are counted from
the fault, which the ranks tell on standard error. The watchdog has a timeout of 8 s, where the default is 600 s, and waits 4 s for its own
dump, where the default is 60 s. `healthy`, and `large` (wrong data, no hang), are to raise nothing.
From a checkout that is not installed: PYTHONPATH=. in front.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from dtprobe import catalog
from dtprobe.authoring.nccl import CULPRIT, STEP
from dtprobe.errors import Unavailable
from dtprobe.inject.spec import parse

WORKER = Path(__file__).resolve().parent.parent / "scenarios/collective-skipped/on_nccl.py"
TIMEOUT_S, DUMP_MS, SUSPECT_S = 8, 1000, 2
LIMIT_S = 90
SAID = re.compile(r"\[rank(\d+)\]:\[E(\d{4} \d\d:\d\d:\d\d\.\d{6})\d* .*Watchdog caught collective operation timeout")
"""What a watchdog says first, with month, day and time in the zone of the machine."""


@dataclass(frozen=True)
class Case:
    """The worker's words; a plan for the NCCL shim; who is to be named ("all": nobody is behind)."""

    words: tuple[str, ...]
    plan: str = ""
    named: tuple[object, ...] = ([CULPRIT],)


CASES = {
    "healthy": Case(("--calls", "skip"), named=()),
    "skip": Case(("--calls", "skip", "--differs")),
    "type": Case(("--calls", "type", "--differs"), named=([CULPRIT], [0, CULPRIT])),
    "shape": Case(("--calls", "shape", "--differs"), named=([CULPRIT], [0, CULPRIT])),
    "root": Case(("--calls", "root", "--differs")),
    "order": Case(("--calls", "order", "--differs"), named=([CULPRIT], [0, CULPRIT])),
    "gil": Case(("--calls", "gil", "--differs")),
    "stop": Case(("--calls", "stop", "--differs")),
    "symmetric": Case(("--calls", "skip"), plan=f"nccl:block,call=ncclAllReduce,nth={STEP + 1},where=stream", named=("all",)),
    "large": Case(("--calls", "shape", "--differs", "--elements", str(1 << 24)), named=()),
}


@dataclass
class Said:
    """What a watched command told on standard error while it ran."""

    begun_ns: dict[int, int] = field(default_factory=dict)
    """Of each rank, when it came to the step of the fault."""
    fault_ns: int | None = None
    watchdog_ns: int | None = None

    def line(self, text: str) -> None:
        if (found := SAID.search(text)) and self.watchdog_ns is None:
            self.watchdog_ns = moment_ns(found[2])
        event = told(text)
        if event.get("kind") == "fault":
            self.fault_ns = int(event["t_ns"])
        elif event.get("kind") == "begun" and event.get("try") == STEP:  # a worker tries its steps and nothing else
            self.begun_ns[int(event["rank"])] = int(event["t_ns"])

    def since_ns(self) -> int | None:
        """When the fault came; where no rank knows of it, when the last one came to that step."""
        return self.fault_ns if self.fault_ns is not None else max(self.begun_ns.values(), default=None)


def told(text: str) -> dict[str, Any]:
    """The observation in a line, which torchrun may have put its own words in front of; empty where there is none."""
    _, brace, rest = text.partition("{")
    try:
        return dict(json.loads(brace + rest)) if brace else {}
    except ValueError:
        return {}


def moment_ns(text: str) -> int:
    now = datetime.now(UTC).astimezone()
    return int(datetime.strptime(f"{now.year} {text} {now:%z}", "%Y %m%d %H:%M:%S.%f %z").timestamp() * 1e9)


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--repeats", type=int, default=2)
    options.add_argument("--jobs", type=int, default=6, help="cases at a time")
    options.add_argument("--only", default="", help="cases, comma separated: " + ", ".join(CASES))
    options.add_argument("--json", type=Path, help="also write the rows here")
    chosen = options.parse_args()
    names = [name for name in chosen.only.split(",") if name] or list(CASES)
    if odd := [name for name in names if name not in CASES]:
        options.error(f"no such case: {', '.join(odd)}")
    known, _ = catalog.injectors()
    module = sys.modules["_dtprobe_injector_nccl"]
    if isinstance(shim := module.build.shim(), Unavailable):
        sys.exit(str(shim))
    with tempfile.TemporaryDirectory() as scratch:
        turns = [(name, repeat) for name in names for repeat in range(chosen.repeats)]
        random.Random(0).shuffle(turns)

        def run(turn: tuple[str, int]) -> dict[str, Any]:
            case = CASES[turn[0]]
            place = Path(scratch, f"{turn[0]}-{turn[1]}")
            place.mkdir()
            if case.plan:
                text = module.plan_line(parse(case.plan, known, world_size=2), 1, 0)
                (place / "plan").write_text(f"{module.PLAN_HEAD}{text}\n", encoding="utf-8")
            row = {"case": turn[0], **one(case, place)}
            print(json.dumps(row), file=sys.stderr, flush=True)
            return row

        with ThreadPoolExecutor(chosen.jobs) as pool:
            rows = list(pool.map(run, turns))
    if chosen.json:
        chosen.json.write_text(json.dumps(rows, indent=1), encoding="utf-8")
    Console(width=180).print(table([name for name in names], rows))
    return 0 if all(row["well"] for row in rows) else 1


def one(case: Case, place: Path) -> dict[str, Any]:
    """One job from start to end."""
    environ = {
        **os.environ,
        "NCCL_NVLS_ENABLE": "0",
        "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
        "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": str(DUMP_MS),
        "OMP_NUM_THREADS": "1",
        **({"DTPROBE_NCCL_PLAN": str(place / "plan")} if case.plan else {}),
    }
    watch = [sys.executable, "-m", "dtprobe", "watch", "--json", "--suspect-s", str(SUSPECT_S), "--timeout-s", str(LIMIT_S)]
    job = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(WORKER)]
    words = [*case.words, "--timeout-s", str(TIMEOUT_S)]
    said = Said()
    with (place / "out").open("w+", encoding="utf-8") as out:
        argv = [*watch, "--out", str(place / "runs"), "--", *job, *words]
        process = subprocess.Popen(argv, env=environ, stdout=out, stderr=subprocess.PIPE, text=True, errors="replace")
        assert process.stderr is not None
        for text in process.stderr:
            said.line(text)
        process.wait()
        out.seek(0)
        data = json.loads(out.read() or "{}")
    hangs = data.get("hangs", [])
    since = said.since_ns()

    def after_s(moment: int | None) -> float | None:
        return None if moment is None or since is None else round((moment - since) / 1e9, 2)

    first = hangs[0] if hangs else {}
    ended = next(iter(sorted((place / "runs").glob("watch/*/run.json"))), None)
    end_ns = json.loads(ended.read_text("utf-8"))["arm_runs"][0]["ended_ns"] if ended else None
    return {
        "named": first.get("suspects", "nobody"),
        "well": first.get("suspects") in case.named if case.named else not hangs,
        "hangs": len(hangs),
        "named_s": after_s(first.get("t_ns")),
        "watchdog_s": after_s(said.watchdog_ns),
        "ended_s": after_s(end_ns),
        "exit": data.get("exit_code"),
        "reason": first.get("reason", ""),
        "blind": data.get("blind", []),
    }


def table(names: Sequence[str], rows: Sequence[dict[str, Any]]) -> Table:
    shown = Table("case", "n", "named", "as it should", "named after, s", "watchdog speaks, s", "job ended, s", "reason")
    for name in names:
        own = [row for row in rows if row["case"] == name]
        who = sorted({str(row["named"]) for row in own})
        times = [spread([row[key] for row in own]) for key in ("named_s", "watchdog_s", "ended_s")]
        shown.add_row(
            name, str(len(own)), "; ".join(who), str(sum(row["well"] for row in own)), *times, str(own[0]["reason"])[:120]
        )
    return shown


def spread(values: Sequence[float | None]) -> str:
    """Median and range."""
    known = [value for value in values if value is not None]
    return f"{statistics.median(known):.1f} ({min(known):.1f} to {max(known):.1f})" if known else "-"


if __name__ == "__main__":
    sys.exit(main())
