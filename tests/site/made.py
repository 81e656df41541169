"""A small folder of runs with everything in it that pages meet: two versions, a miss, hostile texts, what is damaged, gone or unfinished."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dtprobe.store import Store

FIRST_NS = 1_760_000_000 * 10**9
DAY_NS = 86_400 * 10**9
GOOD, HOSTILE = "rank-stopped", "made-up"
EVIL = '"><script>document.title = "broken in"</script><img src=x onerror="document.title=1">'
REPORT = (
    '<!DOCTYPE html><html lang="en"><head><title>A report</title></head><body>'
    '<main id="content"><a href="./fault/0/rank0/stderr.log">raw</a></main></body></html>'
)
NIGHTS = 6


def run(store: Store, scenario: str, night: int, *, torch: str, good: bool = True, report: str = REPORT) -> str:
    """One finished run; answers its id."""
    started_ns = FIRST_NS + night * DAY_NS
    facts = {
        "failure_mode": scenario,
        "scenario_text": {"title": EVIL if scenario == HOSTILE else "A rank is stopped", "layer": "process"},
        "machine": {"host": "h", "python": "3.11.7", "kernel": "6.1"},
        "versions": {"torch": torch},
        "git": {"commit": f"{night:040x}"},
        "night": night_id(night),
        "seed": night,
        "arms": {"fault": {"program": "worker.py", "args": ["--night", str(night)], "env": {}, "faults": []}},
    }
    folder = store.create(scenario, "", facts, started_ns=started_ns)
    value = 5.0 if night < NIGHTS - 1 else 9.0
    metric = {
        "control": 1.0,
        "fault": value,
        "unit": "s",
        "intervals": {"control": [0.9, 1.1], "fault": [value - 0.1, value + 0.1]},
    }
    verdict = {
        "verdict": "reproduced" if good else "partly",
        "expected": "reproduced",
        "as_expected": good,
        "mitigation": "held",
        "torch": torch,
        "metrics": {"time_to_error_s": metric},
        "because": EVIL,
    }
    folder.write_verdict(verdict)
    folder.write_text("report.html", report)
    log = folder.arm_folder("fault", 0) / "rank0"
    log.mkdir()
    (log / "stderr.log").write_text("<b>raw</b>\n", encoding="utf-8")
    store.finish(folder, now_ns=lambda: started_ns + 5 * 10**9)
    return folder.id


def night_id(night: int) -> str:
    return f"2025100{night}T000000Z-7"


def row(scenario: str, run_id: str, status: str = "as-expected", **more: Any) -> dict[str, Any]:
    """A row of a summary."""
    told = {"verdict": "reproduced", "expected": "reproduced", "mitigation": "held", "because": EVIL, "claim": EVIL}
    return {
        "scenario": scenario,
        "status": status,
        "took_s": 5.0,
        "folder": f"{scenario}/{run_id}",
        "title": "",
        **told,
        **more,
    }


def summary(out: Path, night: int, rows: list[dict[str, Any]], **more: Any) -> Path:
    folder = out / "suites" / night_id(night)
    folder.mkdir(parents=True)
    data = {
        "schema": "dtprobe.suite/1",
        "began_ns": FIRST_NS + night * DAY_NS,
        "took_s": 60.0,
        "well": True,
        "interrupted": False,
        "seed": 0,
        "versions": {"torch": "2.13.0"},
        "machine": {"python": "3.11.7"},
        "scenarios": rows,
        **more,
    }
    (folder / "summary.json").write_text(json.dumps(data), encoding="utf-8")
    return folder


def progress(out: Path, pid: int, began: float, done: list[Mapping[str, Any]], total: int = 4) -> Path:
    """A night in progress, or one that was cut off where `pid` is no more; written again by a second call."""
    folder = out / "suites" / "20251020T000000Z-8"
    folder.mkdir(parents=True, exist_ok=True)
    data = {
        "schema": "dtprobe.progress/1",
        "began_ns": FIRST_NS,
        "ended": False,
        "pid": pid,
        "pid_began": began,
        "total": total,
    }
    data |= {"asked": {}, "running": [[GOOD, 1]], "done": done}
    half = folder / "progress.new"
    half.write_text(json.dumps(data), encoding="utf-8")
    half.replace(folder / "progress.json")
    return folder


def folder(out: Path) -> Path:
    """Six nights of two scenarios; the last one finds the first of them not as expected."""
    store = Store.open(out)
    for night in range(NIGHTS):
        torch = "2.12.0" if night < 3 else "2.13.0"
        last = night == NIGHTS - 1
        good, evil = (run(store, name, night, torch=torch, good=not (last and name == GOOD)) for name in (GOOD, HOSTILE))
        found = [regression(good)] if last else []
        rows = [row(GOOD, good, "not-as-expected" if last else "as-expected", verdict="partly" if last else "reproduced")]
        summary(out, night, [*rows, row(HOSTILE, evil)], well=not last, regressions=found)
    return out


def regression(run_id: str) -> dict[str, Any]:
    return {
        "scenario": GOOD, "metric": "time_to_error_s", "arm": "fault", "kind": "metric", "before": 5.0, "after": 9.0, "unit": "s",
        "first_bad_run": run_id, "last_good_run": "20251001T000000Z-00000000", "first_bad_ns": FIRST_NS + (NIGHTS - 1) * DAY_NS,
        "commit_range": f"{4:040x}..{5:040x}", "changed": {}, "confidence": 0.99, "because": EVIL, "bisect": "git bisect run dtprobe",
    }  # fmt: skip


def damage(out: Path) -> None:
    """A broken history file, a vanished run folder, an unfinished run, a night that cannot be read and one that was cut off."""
    import shutil

    (out / "history" / "20990101T000000Z-deadbeef.parquet").write_bytes(b"PAR1 and no more")
    shutil.rmtree(min((out / GOOD).iterdir()))
    with Store(out).create(GOOD, "", {}, started_ns=FIRST_NS + 9 * DAY_NS):
        pass
    broken = out / "suites" / "20251021T000000Z-9"
    broken.mkdir()
    (broken / "summary.json").write_text('{"schema":', encoding="utf-8")
    progress(out, 2**22 + 1, 0.0, [row(GOOD, "x")])
