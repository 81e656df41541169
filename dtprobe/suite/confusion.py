"""The diagnosis held against the suite: every fault arm as a bare folder of artifacts, and what postmortem says of it.

    python -m dtprobe.suite.confusion RUNS... --out docs/confusion.md

RUNS are folders of runs (`dtprobe nightly --out DIR`, `dtprobe run NAME --out DIR`). Of each run's first fault arm only what a job leaves
is kept: what its ranks printed and recorded, dumps, stacks, samples of /proc, traces. The run's own account of it (plans of faults, arguments,
verdicts, reports, names) is left out, and the scenario's folder is written as `job` wherever a stack or traceback names it.
The ranks' exit codes are put down as torchrun's table of failures does, since the launcher of a real job prints them.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dtprobe.diagnose import diagnose
from dtprobe.diagnose.diagnosis import UNDETERMINED, Diagnosis

KEPT = re.compile(
    r"(?:stdout|stderr)\.log|events\.jsonl|proc\.jsonl|stalled\.json|fr-\d+\.json|pyspy-\d+\.json|strace[\w.-]*|perf[\w.-]*\.txt|sockets\.txt|kernel\.txt|nccl[\w.-]*\.(?:ring|log)|ras[\w.-]*|network-\d+\.jsonl"
)
"""What a job could have left. Everything else in a run's folder is the harness's account of it."""
_SCENARIO = re.compile(rb"[^\s\"'=(]*/scenarios/[\w.-]+/(?:\.\./[\w.-]+/)?")
_HARNESS = re.compile(rb"[^\s\"'=(]*/(?:dtprobe|injectors)/(?=[\w./-]+\.(?:py|so))")
LARGEST = 64 << 20


@dataclass(frozen=True, kw_only=True)
class Row:
    """One fault arm and its diagnosis. `seconds` is not kept: timings live in benchmarks."""

    name: str
    truth: str
    diagnosis: Diagnosis

    @property
    def right(self) -> bool:
        return self.diagnosis.failure_mode == self.truth

    @property
    def open(self) -> bool:
        return self.diagnosis.failure_mode == UNDETERMINED


def arms(paths: Sequence[Path]) -> Iterator[tuple[Mapping[str, Any], Path]]:
    """Each run below these paths with its first fault arm's folder; of several runs of one scenario the latest."""
    found: dict[str, tuple[Mapping[str, Any], Path]] = {}
    for path in paths:
        for record in sorted(path.rglob("run.json")):
            run = json.loads(record.read_text(encoding="utf-8"))
            folder = record.parent / "fault" / "0"
            if folder.is_dir() and run.get("scenario"):
                name = run["scenario"] + (f":{run['variant']}" if run.get("variant") else "")
                known = found.get(name)
                if known is None or known[0]["started_ns"] <= run["started_ns"]:
                    found[name] = run, folder
    for name in sorted(found):
        yield found[name]


def bare(run: Mapping[str, Any], folder: Path, into: Path) -> None:
    """Copy what a job could have left, under neutral names, with the launcher's table of failures."""
    for file in sorted(folder.rglob("*")):
        if not file.is_file() or file.is_symlink() or not KEPT.fullmatch(file.name) or file.stat().st_size > LARGEST:
            continue
        target = into / file.relative_to(folder)
        target.parent.mkdir(parents=True, exist_ok=True)
        data = file.read_bytes()
        if data:
            target.write_bytes(_HARNESS.sub(b"/site-packages/tool/", _SCENARIO.sub(b"/job/", data)))
    ended = next((one for one in run["arm_runs"] if one["arm"] == "fault" and one["repeat"] == 0), None)
    lines = list(_failures(ended["ranks"])) if ended else []
    if lines:
        (into / "launcher.log").write_text("\n".join(lines) + "\n", encoding="utf-8")


def _failures(ranks: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """As elastic's agent prints the ends of its workers, in the order in which they ended."""
    for one in sorted(ranks, key=lambda rank: rank.get("wall_s") or 0.0):
        signal, code = one.get("signal"), one.get("exit_code")
        ended = -int(signal) if signal else code
        if ended:
            yield f"failed (exitcode: {ended}) local_rank: {one['rank']} (pid: {one['pid']}) of binary: python"


def rows(paths: Sequence[Path]) -> Iterator[Row]:
    """Every fault arm diagnosed."""
    for run, folder in arms(paths):
        name = run["scenario"] + (f":{run['variant']}" if run.get("variant") else "")
        with tempfile.TemporaryDirectory(prefix="job-") as temporary:
            bare(run, folder, Path(temporary))
            yield Row(name=name, truth=run["failure_mode"], diagnosis=diagnose([Path(temporary)]))


def markdown(found: Sequence[Row], versions: Mapping[str, str]) -> str:
    """The page: a summary, the table of all arms, and which modes are taken for which."""
    right, unsure = sum(one.right for one in found), sum(one.open for one in found)
    wrong = [one for one in found if not one.right and not one.open]
    lines = [
        "# The diagnosis held against the suite",
        "",
        "Generated by `python -m dtprobe.suite.confusion RUNS --out docs/confusion.md`; do not edit. Each scenario's fault arm is given to "
        "`dtprobe postmortem` as a bare folder: what the ranks printed and recorded, dumps, stacks, samples, exit codes; no plan, no verdict, no names.",
        "",
        f"torch {versions.get('torch', '?')}, {len(found)} fault arms: **{right} diagnosed as their own mode, {unsure} undetermined, {len(wrong)} taken for another mode.**",
        "",
        "| fault arm | its mode | diagnosis | first rank | confidence |",
        "| --- | --- | --- | --- | --- |",
    ]
    for one in found:
        said = one.diagnosis
        mark = "right" if one.right else "undetermined" if one.open else f"`{said.failure_mode}`"
        first = "-" if said.first_failing_rank is None else str(said.first_failing_rank)
        lines.append(f"| `{one.name}` | `{one.truth}` | {mark} | {first} | {said.confidence:.2f} |")
    if wrong:
        lines += ["", "## Taken for another mode", "", "| mode | taken for | arms | why |", "| --- | --- | --- | --- |"]
        pairs = Counter((one.truth, one.diagnosis.failure_mode) for one in wrong)
        for (truth, said_mode), count in sorted(pairs.items()):
            why = next(one for one in wrong if (one.truth, one.diagnosis.failure_mode) == (truth, said_mode)).diagnosis.because
            lines.append(f"| `{truth}` | `{said_mode}` | {count} | {_cell(why)} |")
    unknown = [one for one in found if one.open]
    if unknown:
        lines += ["", "## Undetermined", "", "| fault arm | what the artifacts lead to |", "| --- | --- |"]
        lines += [f"| `{one.name}` | {_cell(one.diagnosis.because)} |" for one in unknown]
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    flat = re.sub(r"/tmp/\S+", "...", " ".join(text.split()))
    flat = re.sub(r'\{"t_ns".*', "a record of a worker", flat).replace("|", "\\|")
    return flat if len(flat) <= 220 else flat[:217] + "..."


def main(arguments: Sequence[str] | None = None) -> int:
    """Diagnose and write the page. Returns 1 where an arm is taken for another mode."""
    parser = argparse.ArgumentParser(prog="python -m dtprobe.suite.confusion", description=__doc__.splitlines()[0])
    parser.add_argument("runs", nargs="+", type=Path, help="folders of runs")
    parser.add_argument("--out", type=Path, help="the page to write; standard output without it")
    given = parser.parse_args(arguments)
    found = []
    for one in rows(given.runs):
        found.append(one)
        mark = "+" if one.right else "." if one.open else "-"
        print(f"{mark} {one.name}: {one.diagnosis.failure_mode} ({one.truth})", file=sys.stderr)
    if not found:
        print("no run with a fault arm in these folders", file=sys.stderr)
        return 2
    versions = next(iter(arms(given.runs)))[0].get("versions", {})
    page = markdown(found, versions)
    if given.out is None:
        print(page, end="")
    else:
        given.out.write_text(page, encoding="utf-8")
    return 0 if all(one.right or one.open for one in found) else 1


if __name__ == "__main__":
    sys.exit(main())
