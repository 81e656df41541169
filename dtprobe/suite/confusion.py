"""The diagnosis held against the suite: every fault arm as a bare folder of artifacts, and what postmortem says of it.

    python -m dtprobe.suite.confusion RUNS... --out docs/confusion.md

RUNS are folders of runs (`dtprobe nightly --out DIR`, `dtprobe run NAME --out DIR`). Of each run's first fault arm only what a job leaves
is kept: what its ranks printed and recorded, dumps, stacks, samples of /proc, traces. The run's own account of it (plans of faults, arguments,
verdicts, reports, names) is left out, and the scenario's folder is written as `job` wherever a stack or traceback names it.
The ranks' exit codes are put down as torchrun's table of failures does, since the launcher of a real job prints them.

Beside right and wrong three kinds of arms are counted apart. Of these the run's own account is read, which the diagnosis never sees:
modes that the scenario's author says leave the same evidence (`looks_like`); silent faults, which leave what the healthy control arm
leaves in everything but values (`traces`), where `undetermined` is right; and claims that the run refuted, where what counts is whether anything failed.
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
from enum import StrEnum
from pathlib import Path
from typing import Any

from dtprobe.catalog import load
from dtprobe.diagnose import diagnose
from dtprobe.diagnose.diagnosis import HEALTHY, UNDETERMINED, Diagnosis
from dtprobe.scenario import VerdictKind
from dtprobe.suite.traces import traces

KEPT = re.compile(
    r"(?:stdout|stderr)\.log|events\.jsonl|proc\.jsonl|stalled\.json|fr-\d+\.json|pyspy-\d+\.json|strace[\w.-]*|perf[\w.-]*\.txt|sockets\.txt|kernel\.txt|nccl[\w.-]*\.(?:ring|log)|ras[\w.-]*|network-\d+\.jsonl|hw_counters[\w.-]*\.txt|ibstat\.txt|ib_write_bw[\w.-]*\.txt|iperf3[\w.-]*\.json"
)
"""What a job could have left. Everything else in a run's folder is the harness's account of it."""
_SCENARIO = re.compile(rb"[^\s\"'=(]*/scenarios/[\w.-]+/(?:\.\./[\w.-]+/)?")
_HARNESS = re.compile(rb"[^\s\"'=(]*/(?:dtprobe|injectors)/(?=[\w./-]+\.(?:py|so))")
LARGEST = 64 << 20


class Outcome(StrEnum):
    """How a diagnosis stands to its arm, in the order of the page's summary."""

    RIGHT = "right"
    ALIKE = "right (looks alike)"
    SILENT = "silent: only values differ"
    NOTHING = "claim refuted: nothing failed, none named"
    UNDETERMINED = "undetermined"
    WRONG = "taken for another mode"


GOOD = (Outcome.RIGHT, Outcome.ALIKE, Outcome.SILENT, Outcome.NOTHING)


@dataclass(frozen=True, kw_only=True)
class Row:
    """One fault arm and its diagnosis. `seconds` is not kept: timings live in benchmarks.

    `verdict` is the run's, empty where it was not finished. `looks_like` are modes that leave the same evidence by the scenario's author.
    `silent`: the arm left nothing but values that its control arm did not leave. `failed`: a rank of it ended otherwise than with code 0.
    """

    name: str
    truth: str
    diagnosis: Diagnosis
    verdict: str = ""
    looks_like: tuple[str, ...] = ()
    silent: bool = False
    failed: bool = True

    @property
    def outcome(self) -> Outcome:
        """Where it belongs on the page."""
        said = self.diagnosis.failure_mode
        if said == self.truth:
            return Outcome.RIGHT
        if said in self.looks_like:
            return Outcome.ALIKE
        if self.silent and said == UNDETERMINED:
            return Outcome.SILENT
        if self.verdict == VerdictKind.REFUTED and not self.failed and said in (HEALTHY, UNDETERMINED):
            return Outcome.NOTHING
        return Outcome.UNDETERMINED if said == UNDETERMINED else Outcome.WRONG

    @property
    def right(self) -> bool:
        """Whether the diagnosis is what the artifacts allow."""
        return self.outcome in GOOD

    @property
    def open(self) -> bool:
        return self.outcome is Outcome.UNDETERMINED


def arms(paths: Sequence[Path]) -> Iterator[tuple[Mapping[str, Any], Path]]:
    """Each run below these paths with its first fault arm's folder; of several runs of one scenario the latest that has a verdict, else the latest."""
    found: dict[str, tuple[tuple[bool, int], Mapping[str, Any], Path]] = {}
    for path in paths:
        for record in sorted(path.rglob("run.json")):
            run = json.loads(record.read_text(encoding="utf-8"))
            folder = record.parent / "fault" / "0"
            if (
                folder.is_dir() and run.get("scenario") and run.get("failure_mode") and "arm_runs" in run
            ):  # none of these yet: the arm is being run
                name = run["scenario"] + (f":{run['variant']}" if run.get("variant") else "")
                worth = (record.parent / "verdict.json").is_file(), int(run["started_ns"])
                known = found.get(name)
                if known is None or known[0] <= worth:
                    found[name] = worth, run, folder
    for name in sorted(found):
        yield found[name][1:]


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
    alike = {one.id: one.looks_like for one in load().scenarios}
    for run, folder in arms(paths):
        name = run["scenario"] + (f":{run['variant']}" if run.get("variant") else "")
        with tempfile.TemporaryDirectory(prefix="job-") as temporary:
            bare(run, folder, Path(temporary))
            diagnosis = diagnose([Path(temporary)])
        yield Row(
            name=name,
            truth=run["failure_mode"],
            diagnosis=diagnosis,
            verdict=_verdict(folder.parent.parent),
            looks_like=alike.get(name, ()),
            silent=_silent(run, folder),
            failed=_failed(run),
        )


def _verdict(folder: Path) -> str:
    path = folder / "verdict.json"
    return str(json.loads(path.read_text(encoding="utf-8")).get("verdict", "")) if path.is_file() else ""


def _ranks(run: Mapping[str, Any], arm: str) -> Sequence[Mapping[str, Any]]:
    found = (one["ranks"] for one in run["arm_runs"] if one["arm"] == arm and one["repeat"] == 0 and one.get("probed", True))
    return next(found, ())


def _silent(run: Mapping[str, Any], folder: Path) -> bool:
    """Whether the arm left nothing but values that control did not leave; what is not there to compare tells nothing."""
    control = folder.parent.parent / "control" / "0"
    if not control.is_dir() or _failed(run):
        return False
    return traces(folder, _ranks(run, "fault")) <= traces(control, _ranks(run, "control"))


def _failed(run: Mapping[str, Any]) -> bool:
    """Whether a rank ended otherwise than with code 0. An error that the program caught and went on after is a trace, no failure."""
    return any(one.get("exit_code") or one.get("signal") for one in _ranks(run, "fault"))


def markdown(found: Sequence[Row], versions: Mapping[str, str]) -> str:
    """The page: a summary, the table of all arms, and which modes are taken for which."""
    counted = Counter(one.outcome for one in found)
    right, open_ = sum(counted[one] for one in GOOD), counted[Outcome.UNDETERMINED]
    wrong = [one for one in found if one.outcome is Outcome.WRONG]
    lines = [
        "# The diagnosis held against the suite",
        "",
        "Generated by `python -m dtprobe.suite.confusion RUNS --out docs/confusion.md`; do not edit. Each scenario's fault arm is given to "
        "`dtprobe postmortem` as a bare folder: what the ranks printed and recorded, dumps, stacks, samples, exit codes; no plan, no verdict, no names.",
        "",
        f"torch {versions.get('torch', '?')}, {len(found)} fault arms: **{right} as the artifacts allow, {open_} undetermined, "
        f"{len(wrong)} taken for another mode.**",
        "",
        "| outcome | arms | what it means |",
        "| --- | --- | --- |",
        *(f"| {one} | {counted[one]} | {_MEANING[one]} |" for one in Outcome),
        "",
        "| fault arm | its mode | verdict of the run | diagnosis | only values differ | outcome | first rank | confidence |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for one in found:
        said = one.diagnosis
        first = "-" if said.first_failing_rank is None else str(said.first_failing_rank)
        mode = "" if said.failure_mode == one.truth else f"`{said.failure_mode}`"
        lines.append(
            f"| `{one.name}` | `{one.truth}` | {one.verdict or '-'} | {mode or 'its mode'} | {'yes' if one.silent else ''} | {one.outcome} "
            f"| {first} | {said.confidence:.2f} |"
        )
    if wrong:
        lines += ["", "## Taken for another mode", "", "| mode | taken for | arms | why |", "| --- | --- | --- | --- |"]
        pairs = Counter((one.truth, one.diagnosis.failure_mode) for one in wrong)
        for (truth, said_mode), count in sorted(pairs.items()):
            why = next(one for one in wrong if (one.truth, one.diagnosis.failure_mode) == (truth, said_mode)).diagnosis.because
            lines.append(f"| `{truth}` | `{said_mode}` | {count} | {_cell(why)} |")
    unknown = [one for one in found if one.diagnosis.failure_mode == UNDETERMINED]
    if unknown:
        lines += [
            "",
            "## Undetermined",
            "",
            "| fault arm | what the artifacts lead to | what would decide |",
            "| --- | --- | --- |",
        ]
        lines += [
            f"| `{one.name}` | {_cell(one.diagnosis.because)} | {_cell(one.diagnosis.not_proven) or '-'} |" for one in unknown
        ]
    return "\n".join(lines) + "\n"


_MEANING = {
    Outcome.RIGHT: "the arm's own mode",
    Outcome.ALIKE: "a mode that leaves the same evidence, as the scenario's author declares (`looks_like`)",
    Outcome.SILENT: "`undetermined`, and no artifact differs from the healthy control arm's in anything but values: records, errors, "
    "printed lines, collectives and exits are the same",
    Outcome.NOTHING: "the run refuted the documented claim, every rank ended with code 0, and no failure is named",
    Outcome.UNDETERMINED: "`undetermined`, though the arm left other signs than its control",
    Outcome.WRONG: "an answer that is wrong",
}


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
        print(f"{mark} {one.name}: {one.diagnosis.failure_mode} ({one.truth}): {one.outcome}", file=sys.stderr)
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
