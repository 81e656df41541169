"""Made-up run folders, in the declared formats, for the tests of the report. Nothing in them was measured.

`python tests/report/samples.py NAME FOLDER` writes one, to look at.
"""

from __future__ import annotations

import json
import math
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dtprobe.readers.folder import SCHEMAS

START = 1_750_000_000_000_000_000
SECOND = 1_000_000_000

HOSTILE = "</title></script><script>alert(1)</script><img src=x onerror=alert(2)>\"'`|[x](javascript:alert(3))$a_b$ {{ 7*7 }} \x1b[31m"


class Made:
    """A run folder in the making: `run` and `verdict` are the JSON documents, `rows` the frames' rows by name."""

    def __init__(self, folder: Path, scenario: str, **run: Any) -> None:
        self.folder = folder
        self.rows: dict[str, list[dict[str, Any]]] = {}
        self.run: dict[str, Any] = {
            "schema": "dtprobe.run/1", "id": "20250615T150640Z-0badcafe", "scenario": scenario, "variant": "",
            "failure_mode": scenario, "state": "finished", "started_ns": START, "ended_ns": START + 31 * SECOND, "seed": 7,
            "git": {"commit": "0badcafe", "dirty": False}, "machine": {"cpus": 2, "memory_bytes": 24 << 30, "kernel": "6.1.0-made-up", "host": "sample"},
            "versions": {"dtprobe": "0.1.0", "python": "3.11.2", "torch": "2.13.0"}, "argv": ["/usr/bin/dtprobe", "run", scenario],
            "arms": {arm: {"program": "worker.py", "args": ["--mode", arm], "env": {}, "timeout_s": 20} for arm in ("control", "fault", "mitigated")},
            "repeats": 3, "probes": [], "unavailable": {}, "arm_runs": [],
            "scenario_text": {"title": f"A made-up sample of {scenario}", "claim": "The document claims this.", "source": "a made-up document, section 0",
                              "layer": "c10d", "certifies_not": "Nothing is certified by a made-up sample.", "no_cure_because": ""},
        } | run  # fmt: skip
        self.verdict: dict[str, Any] | None = {
            "schema": "dtprobe.verdict/1", "scenario": scenario, "failure_mode": scenario, "verdict": "reproduced", "mitigation": "held",
            "expected": "reproduced", "as_expected": True, "metrics": {}, "because": "The fault arm shows it and control does not.",
            "claim": "The document claims this.", "overhead": {}, "torch": "2.13.0", "run": self.run["id"], "seed": 7,
        }  # fmt: skip

    def arm_run(
        self, arm: str, repeat: int, *, at_s: float, wall_s: list[float], exits: list[int | None], **more: Any
    ) -> dict[str, Any]:
        """One arm run of len(exits) ranks; exit None is a SIGKILL. Makes the ranks' folders too."""
        begin = START + int(at_s * SECOND)
        ranks = []
        for rank, (wall, code) in enumerate(zip(wall_s, exits, strict=True)):
            (self.folder / arm / str(repeat) / f"rank{rank}").mkdir(parents=True, exist_ok=True)
            ranks.append(
                {
                    "rank": rank,
                    "pid": 4000 + rank,
                    "exit_code": code,
                    "signal": None if code is not None else 9,
                    "wall_s": wall,
                    "cpu_s": wall / 3,
                }
            )
        made = {"arm": arm, "repeat": repeat, "traced": repeat == 2, "probed": True, "started_ns": begin,
                "ended_ns": begin + int(max(wall_s) * SECOND), "timed_out": False, "ranks": ranks,
                "recorders": {"proc": {"cpu_s": 0.05, "stopped_s": 0.0, "problems": [], "files": []}}, "suspected": [], "injections": []} | more  # fmt: skip
        self.run["arm_runs"].append(made)
        return made

    def row(self, frame: str, run: dict[str, Any], rank: int, at_s: float | None, source: str, **columns: Any) -> None:
        """A row of a frame, `at_s` seconds after its arm run began."""
        artifact = self.folder / run["arm"] / str(run["repeat"]) / f"rank{rank}" / source
        if artifact.parent.is_dir() and "/" not in source:
            artifact.touch()
        self.rows.setdefault(frame, []).append(
            {"arm": run["arm"], "repeat": run["repeat"], "rank": rank, "pid": 4000 + rank, "host": "sample",
             "t_ns": None if at_s is None else run["started_ns"] + int(at_s * SECOND),
             "source": str(self.folder / run["arm"] / str(run["repeat"]) / f"rank{rank}" / source), **columns}
        )  # fmt: skip

    def log(self, run: dict[str, Any], rank: int, *lines: str) -> None:
        """Lines on a rank's standard error: the file, and the frame of it."""
        path = self.folder / run["arm"] / str(run["repeat"]) / f"rank{rank}" / "stderr.log"
        path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        for number, line in enumerate(lines, start=1):
            self.row("log_lines", run, rank, None, "stderr.log", kind="stderr", line=number, text=line)

    def write(self) -> Path:
        """Everything to disk; answers the run folder."""
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "run.json").write_text(json.dumps(self.run), encoding="utf-8")
        if self.verdict is not None:
            (self.folder / "verdict.json").write_text(json.dumps(self.verdict), encoding="utf-8")
        for name, rows in self.rows.items():
            schema = SCHEMAS[name]
            own = schema.frame({column: [row.get(column) for row in rows] for column in schema.columns})
            own["arm"] = [row["arm"] for row in rows]
            own["repeat"] = [row["repeat"] for row in rows]
            own["arm"] = own["arm"].astype("string")
            own["repeat"] = own["repeat"].astype("Int64")
            (self.folder / "frames").mkdir(exist_ok=True)
            own.to_parquet(self.folder / "frames" / f"{name}.parquet")
        return self.folder


def metric(unit: str, documented: str, method: str, **arms: tuple[float, float, float, int]) -> dict[str, Any]:
    """A metric as verdict.json has it, from (value, low, high, n) of each arm."""
    return {
        **{arm: value for arm, (value, _, _, _) in arms.items()}, "unit": unit, "documented": documented,
        "intervals": {arm: [low, high] for arm, (_, low, high, _) in arms.items()},
        "n": {arm: n for arm, (_, _, _, n) in arms.items()}, "method": {arm: method for arm in arms},
    }  # fmt: skip


def leak(folder: Path) -> Path:
    """Threads and descriptors that grow in one arm: figures over time, refuted in part, with costs and a missing recorder."""
    made = Made(folder, "gloo-thread-leak")
    rng = random.Random(1)
    at_s = 0.0
    for repeat in range(3):
        for arm in ("control", "fault", "mitigated"):
            wall = 6.0 + rng.random()
            run = made.arm_run(arm, repeat, at_s=at_s, wall_s=[wall, wall - 0.1], exits=[0, 0])
            at_s += wall + 0.3
            if arm == "control" and repeat < 2:
                made.arm_run(arm, repeat, at_s=at_s, wall_s=[1.0, 1.0], exits=[0, 3], probed=False, recorders={})
                at_s += 1.3
            for rank in range(2):
                for step in range(int(wall * 20)):
                    t = step / 20 + rng.random() * 0.01
                    cycles = max(0, int((t - 2) * 5)) if t > 2 else 0
                    kept = cycles if arm == "fault" else min(cycles, 1)
                    made.row("proc", run, rank, t, "proc.jsonl", kind="sample", threads=(1 if t < 1.8 else 5) + 3 * kept,
                             fds=(6 if t < 1.8 else 17) + 5 * kept, sockets=2 * kept + 4, pipes=2, files=3, maps=int(300 + min(t, 2) * 500 + 8 * kept + rng.random() * 4),
                             rss_bytes=int((30 + min(t, 2) * 160 + 0.3 * kept) * (1 << 20)), state="S", wchan="futex",
                             cpu_user_s=min(t, 2) + 0.05 * t, cpu_system_s=0.02 * t, voluntary=step, involuntary=0, thread_names="{}")  # fmt: skip
                for cycle in range(20):
                    t = 2 + cycle * 0.2
                    made.row(
                        "events",
                        run,
                        rank,
                        t,
                        "events.jsonl",
                        kind="cycle",
                        value=float(5 + (3 * cycle if arm == "fault" else 3)),
                        name="threads",
                        fields="{}",
                    )
                    made.row("collectives", run, rank, t + 0.05, "fr-0.json", kind="collective", group="0", group_desc="default_pg", op="all_reduce",
                             seq=cycle + 1, op_id=cycle + 1, state="scheduled", retired=True, call_site="worker.py:31 step")  # fmt: skip
                if repeat == 2:
                    for name, n in (("clone3", 62 if arm == "fault" else 8), ("mmap", 1423), ("close", 40)):
                        for i in range(n):
                            made.row(
                                "syscalls",
                                run,
                                rank,
                                2 + i * 0.001,
                                "strace.txt",
                                kind="syscall",
                                name=name,
                                args="...",
                                result="0",
                                duration_s=4e-5,
                                complete=True,
                            )
    assert made.verdict is not None
    made.run["scenario_text"] |= {"title": "Gloo threads that outlive their process group (made-up sample)"}
    claim = "After 100 all-reduces the process holds 1842 mappings instead of 127 and 47 threads instead of 3: threads are not joined on the exception path."
    made.verdict |= {
        "verdict": "partly", "expected": "partly", "claim": claim,
        "because": "All-reduces alone leak nothing: threads stay at 5, mappings at 1,423 to 1,425 over 100 of them. But every group that a Python reference "
        "keeps alive past destroy_process_group keeps its threads: +3 threads and +5 descriptors a cycle, 65 threads after 20.",
        "metrics": {
            "threads_added_per_cycle": metric("threads", "0.44", "bootstrap 95 %", control=(0.0, 0.0, 0.0, 6), fault=(3.0, 3.0, 3.02, 6), mitigated=(0.0, 0.0, 0.1, 6)),
            "descriptors_added_per_cycle": metric("", "", "bootstrap 95 %", control=(0.0, 0.0, 0.0, 6), fault=(5.0, 4.9, 5.1, 6), mitigated=(0.0, 0.0, 0.0, 6)),
            "mappings_after_100": metric("", "127 to 1842", "range", control=(1424.0, 1423.0, 1425.0, 3), fault=(1641.0, 1630.0, 1655.0, 3), mitigated=(1425.0, 1424.0, 1431.0, 3)),
            "resident_memory": metric("B", "", "range", control=(3.61e8, 3.6e8, 3.64e8, 3), fault=(3.71e8, 3.7e8, 3.75e8, 3), mitigated=(3.61e8, 3.6e8, 3.62e8, 3)),
        },
        "overhead": {
            "light recorders (logs, proc, flight_recorder)": {"ratio": 1.012, "low": 0.996, "high": 1.027, "n": 5, "what": "the worker's timed part"},
            "strace": {"ratio": 1.74, "low": 1.61, "high": 1.9, "n": 3, "what": "the worker's timed part"},
        },
    }  # fmt: skip
    made.run["unavailable"] = {
        "bpf": {"reason": "bpftrace is not installed", "remedy": "apt-get install bpftrace"},
        "nsys": {"reason": "no GPU on this machine", "remedy": ""},
    }
    return made.write()


def skipped(folder: Path, world_size: int = 4) -> Path:
    """A rank that never enters a collective: a stall, stacks with a minority, telling lines, a suspected hang, a fault window."""
    made = Made(folder, "collective-skipped")
    at_s = 0.0
    for repeat in range(3):
        for arm in ("control", "fault", "mitigated"):
            culprit = 1
            wall = [9.1] * world_size if arm == "fault" else [4.9 if arm == "control" else 4.1] * world_size
            exits: list[int | None] = [
                0 if arm == "control" or (arm == "fault" and rank == culprit) else 1 for rank in range(world_size)
            ]
            if arm == "fault":
                wall[culprit] = 4.4
            run = made.arm_run(arm, repeat, at_s=at_s, wall_s=wall, exits=exits)
            at_s += max(wall) + 0.4
            for rank in range(world_size):
                made.row("events", run, rank, 1.9, "events.jsonl", kind="ready", fields="{}")
                if arm != "control" and rank == culprit:
                    made.row("events", run, rank, 3.0, "events.jsonl", kind="fault_begin", name="skips all_reduce", fields="{}")
                for seq in range(1, 11):
                    if arm != "control" and (seq > 5 or (seq == 5 and rank == culprit)):
                        continue
                    pending = arm == "fault" and seq == 5
                    made.row("collectives", run, rank, 2.0 + seq * 0.2, "fr-0.json", kind="collective", group="0", group_desc="default_pg",
                             op="all_reduce", seq=seq, op_id=seq, state="scheduled", retired=not pending, call_site="worker.py:44 step")  # fmt: skip
                if arm == "fault":
                    here = (
                        "loader.next (worker.py:71);main (worker.py:90)"
                        if rank == culprit
                        else "wait (distributed_c10d.py:2932);all_reduce (distributed_c10d.py:2933);step (worker.py:44);main (worker.py:90)"
                    )
                    made.row("stacks", run, rank, 5.5, "pyspy-0.json", kind="stack", thread_name="MainThread", active=True, owns_gil=False,
                             top=here.split(";", maxsplit=1)[0], frames=here, digest=str(hash(rank == culprit)))  # fmt: skip
                    if rank != culprit:
                        made.log(run, rank, "Traceback (most recent call last):", '  File "worker.py", line 44, in step',
                                 f"RuntimeError: [../gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 500{rank}ms for recv operation to complete")  # fmt: skip
                elif arm == "mitigated":
                    made.log(
                        run,
                        rank,
                        f"[rank{rank}]: dtprobe.framework.checked.SkippedCollective: rank 1 never entered all_reduce #5 (waited 1.0 s)",
                    )
            if arm == "fault":
                run["suspected"] = [
                    {
                        "t_ns": run["started_ns"] + int(5.2 * SECOND),
                        "reason": "no rank finished a collective for 2.0 s; rank 1 is one behind",
                    }
                ]
                run["recorders"]["pyspy"] = {
                    "cpu_s": 0.2,
                    "stopped_s": 0.12,
                    "problems": ["rank 1 ended before it could be read"] if repeat == 0 else [],
                    "files": [],
                }
    assert made.verdict is not None
    made.verdict |= {
        "because": "With rank 1 skipping one all_reduce the others wait until the timeout and name nobody; the recorded sequence numbers and stacks name rank 1.",
        "metrics": {
            "hang_time": metric("s", "", "range", control=(0.0, 0.0, 0.0, 3), fault=(5.02, 5.01, 5.04, 3), mitigated=(1.0, 1.0, 1.01, 3)),
            "culprit_named": metric("ratio", "", "Wilson 95 %", control=(0.0, 0.0, 0.56, 3), fault=(1.0, 0.44, 1.0, 3), mitigated=(1.0, 0.44, 1.0, 3)),
        },
    }  # fmt: skip
    return made.write()


def unsupported(folder: Path) -> Path:
    """Nothing could run: the verdict and its reason are all there is."""
    made = Made(folder, "rdma-contention", started_ns=START, ended_ns=START + SECOND)
    assert made.verdict is not None
    made.verdict |= {
        "verdict": "unsupported",
        "mitigation": "none",
        "expected": "reproduced",
        "as_expected": False,
        "because": "needs an HCA: no /sys/class/infiniband",
    }
    return made.write()


def inconclusive(folder: Path) -> Path:
    """A control arm that failed too; no mitigated arm, with the reason for it."""
    made = Made(folder, "port-in-use")
    del made.run["arms"]["mitigated"]
    for repeat in range(2):
        for arm in ("control", "fault"):
            run = made.arm_run(arm, repeat, at_s=repeat * 4, wall_s=[1.0, 1.2], exits=[1, None])
            made.log(run, 0, "RuntimeError: control is broken too")
    made.run["scenario_text"]["no_cure_because"] = "The port belongs to somebody else."
    assert made.verdict is not None
    made.verdict |= {
        "verdict": "inconclusive",
        "mitigation": "none",
        "because": "control exited 1 in 2 of 2 repeats",
        "metrics": {"exit": {"control": None, "fault": None, "mitigated": None, "unit": "", "documented": ""}},
    }
    return made.write()


def error(folder: Path) -> Path:
    """A judge that raised: metrics none, the reason is an exception's text."""
    made = Made(folder, "judge-error")
    made.arm_run("control", 0, at_s=0, wall_s=[1.0], exits=[0])
    assert made.verdict is not None
    made.verdict |= {
        "verdict": "error",
        "mitigation": "none",
        "as_expected": False,
        "because": "the judge raised KeyError: 'threads'",
    }
    return made.write()


def injection(folder: Path) -> Path:
    """A foreign command under two faults, one of which never fired; its ranks are a launcher's children."""
    made = Made(
        folder,
        "inject",
        failure_mode=None,
        repeats=1,
        argv=["/usr/bin/dtprobe", "inject", "collective:delay,rank=1,nth=3,seconds=1", "--", "torchrun", "train.py"],
    )
    made.run["arms"] = {"fault": {"program": "torchrun", "args": ["train.py"], "env": {}, "timeout_s": 60}}
    made.run["state"] = "unfinished"  # the report is written before the folder is marked as finished
    run = made.arm_run("fault", 0, at_s=0, wall_s=[9.0], exits=[1])
    run["ranks"][0]["rank"] = None
    begin = run["started_ns"]
    firing = {
        "t_ns": begin + 4 * SECOND,
        "rank": 1,
        "call": "all_reduce",
        "nth": 3,
        "ended_ns": begin + 5 * SECOND,
        "detail": None,
    }
    killed = {
        "t_ns": begin + 7 * SECOND,
        "rank": 0,
        "call": None,
        "nth": None,
        "ended_ns": None,
        "detail": "SIGKILL to pid 4000",
    }
    run["injections"] = [
        {"fault": "collective:delay,rank=1,nth=3,seconds=1", "fired": [firing]},
        {"fault": "process:kill,rank=0,after_s=7", "fired": [killed]},
        {"fault": "collective:skip,rank=1,nth=900", "fired": []},
    ]
    for rank in range(2):
        for seq in range(1, 8):
            made.row(
                "collectives",
                run,
                rank,
                2.0 + seq * 0.5,
                "fr-0.json",
                kind="collective",
                group="0",
                group_desc="undefined",
                op="all_reduce",
                seq=seq,
                op_id=seq,
                retired=True,
            )
    made.run["scenario_text"] |= {"title": "faults injected into a command", "claim": "", "source": ""}
    assert made.verdict is not None
    made.verdict = {
        "schema": "dtprobe.injection/1", "scenario": "inject", "failure_mode": None, "verdict": "not-fired", "mitigation": "none", "expected": None,
        "as_expected": False, "exit_code": 1, "metrics": {}, "because": "the command ended with exit code 1; never fired: collective:skip", "overhead": {}, "torch": "2.13.0",
    }  # fmt: skip
    return made.write()


def unfinished(folder: Path) -> Path:
    """A run whose harness was killed in the second arm: no verdict, no frames, no end."""
    made = Made(folder, "gloo-thread-leak", state="unfinished", ended_ns=None)
    made.arm_run("control", 0, at_s=0, wall_s=[2.0, 2.0], exits=[0, 0])
    run = made.arm_run("fault", 0, at_s=3, wall_s=[1.0, 1.0], exits=[0, 0], ended_ns=None)
    run["ranks"] = [{"rank": 0, "pid": 4000, "exit_code": None, "signal": None, "wall_s": None, "cpu_s": None}]
    made.verdict = None
    return made.write()


def hostile(folder: Path) -> Path:
    """Markup, templates and escapes wherever a worker or a scenario can put text."""
    made = Made(folder, "hostile")
    run = made.arm_run("fault", 2, at_s=0, wall_s=[5.0], exits=[1])
    made.log(run, 0, f"RuntimeError: {HOSTILE}", "x" * 100_000 + " RuntimeError: long")
    for i in range(6):
        made.row(
            "events",
            run,
            0,
            1 + i * 0.1,
            "events.jsonl",
            kind=HOSTILE,
            name=HOSTILE,
            value=float(i) if i else math.nan,
            fields=json.dumps({HOSTILE: HOSTILE}),
        )
    made.row("events", run, 0, 1.5, "events.jsonl", kind="fault_begin", name=HOSTILE, fields="not json")
    made.row(
        "collectives",
        run,
        0,
        2.0,
        "fr-0.json",
        kind="collective",
        group=HOSTILE,
        group_desc=HOSTILE,
        op=HOSTILE,
        seq=1,
        op_id=1,
        retired=False,
        call_site=HOSTILE,
    )
    made.row(
        "stacks",
        run,
        0,
        2.0,
        "../../../../etc/passwd",
        kind="stack",
        thread_name=HOSTILE,
        top=HOSTILE,
        frames=f"{HOSTILE};{HOSTILE}",
        digest="a",
    )
    made.row("file_events", run, 0, 2.0, "javascript:alert(1)", kind="create", path=HOSTILE, holders="[[1")
    made.row(
        "syscalls",
        run,
        0,
        2.0,
        "strace.txt",
        kind="syscall",
        name=HOSTILE,
        args=HOSTILE,
        result=HOSTILE,
        errno="EPERM",
        complete=True,
    )
    run["suspected"] = [{"t_ns": run["started_ns"], "reason": HOSTILE}]
    run["recorders"]["proc"]["problems"] = [HOSTILE]
    made.run["scenario_text"] = dict.fromkeys(made.run["scenario_text"], HOSTILE)
    made.run["machine"] = {HOSTILE: HOSTILE}
    made.run["argv"] = ["dtprobe", HOSTILE]
    made.run["unavailable"] = {HOSTILE: {"reason": HOSTILE, "remedy": HOSTILE}}
    assert made.verdict is not None
    made.verdict |= {
        "claim": HOSTILE,
        "because": HOSTILE,
        "expected": HOSTILE,
        "metrics": {HOSTILE: metric(HOSTILE, HOSTILE, HOSTILE, fault=(1.0, math.nan, math.inf, 3))},
    }
    return made.write()


SAMPLES: dict[str, Callable[[Path], Path]] = {
    "leak": leak,
    "skipped": skipped,
    "unsupported": unsupported,
    "inconclusive": inconclusive,
    "error": error,
    "injection": injection,
    "unfinished": unfinished,
    "hostile": hostile,
}

if __name__ == "__main__":
    print(SAMPLES[sys.argv[1]](Path(sys.argv[2])))
