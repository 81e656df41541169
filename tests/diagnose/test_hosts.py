"""Clocks that the run itself compared: every stamp of a postmortem stands on one clock, and the right rank failed first."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dtprobe.diagnose import diagnose, read
from dtprobe.diagnose.clock import one_clock
from dtprobe.readers.hosts import Host, Hosts, Reading

SECOND = 10**9
FIRST = 1_735_689_600 * SECOND  # 2025-01-01
AHEAD_NS = 3 * SECOND
UNCERTAINTY_NS = 20_000


def clocks(ahead_ns: int = AHEAD_NS, lost: str = "") -> Hosts:
    def host(node: int, offset_ns: int) -> Host:
        before = Reading(t_ns=FIRST - offset_ns, offset_ns=offset_ns, uncertainty_ns=UNCERTAINTY_NS)
        return Host(name=f"node{node}", node=node, ranks=(node,), address="", before=before, lost=lost if node else "")

    return Hosts(reference="here", hosts=(host(0, 0), host(1, -ahead_ns)))


def traceback(second: int, error: str, function: str) -> str:
    """As a container's log has it: a stamp on each line."""
    lines = (
        "Traceback (most recent call last):",
        f'  File "train.py", line {10 + len(function)}, in {function}',
        "    work()",
        error,
    )
    return "".join(f"2025-01-01T00:00:{second:02}.000000Z {line}\n" for line in lines)


def job(folder: Path, *, measured: bool, lost: str = "") -> Path:
    """Rank 1 raised at second 10, rank 0 something else at second 11; the clock of rank 1's host is 3 s ahead."""
    for rank, text in enumerate(
        (traceback(11, "KeyError: 'batch of rank 1'", "consume"), traceback(13, "ValueError: no example", "load"))
    ):
        (folder / f"rank{rank}").mkdir(parents=True)
        (folder / f"rank{rank}" / "stderr.log").write_text(text)
        event = {"t_ns": FIRST + (11 if rank == 0 else 13) * SECOND, "kind": "failed", "rank": rank, "pid": 7 + rank}
        (folder / f"rank{rank}" / "events.jsonl").write_text(json.dumps(event) + "\n")
    if measured:
        clocks(lost=lost).write(folder)
    return folder


def test_the_first_failing_rank_is_right_although_its_hosts_clock_is_three_seconds_ahead(tmp_path: Path) -> None:
    told = diagnose([job(tmp_path / "with", measured=True)])
    blind = diagnose([job(tmp_path / "without", measured=False)])
    assert (told.first_failing_rank, told.host, blind.first_failing_rank) == (1, "node1", 0)
    assert told.failure_mode == blind.failure_mode == "python-exception-one-rank"


def test_lines_and_observations_are_corrected_alike_and_the_artifacts_are_not(tmp_path: Path) -> None:
    case = read([job(tmp_path, measured=True)])
    by_rank = {line.rank: line for line in case.lines if line.artifact.name.endswith("stderr.log") and line.t_ns}
    assert {rank: (line.t_ns - FIRST) // SECOND for rank, line in by_rank.items()} == {0: 11, 1: 10}  # type: ignore[operator]
    assert {line.host for line in by_rank.values()} == {"node0", "node1"}
    assert "00:00:13" in (tmp_path / "rank1" / "stderr.log").read_text()


def test_a_moment_is_as_uncertain_as_the_measurement_was(tmp_path: Path) -> None:
    case = read([job(tmp_path, measured=True)])
    clock = one_clock(case.lines)
    moments = [clock.moment(line, "x") for line in case.lines if line.rank == 1 and line.t_ns]
    assert {one.uncertainty_ns for one in moments} == {SECOND + UNCERTAINTY_NS}  # the stamps are whole seconds


def test_what_was_corrected_and_who_was_lost_is_said(tmp_path: Path) -> None:
    missing = diagnose([job(tmp_path, measured=True, lost="nothing came from it for 10 s")]).missing
    assert any("the clock of node1 was 3.000 s ahead of here's" in one for one in missing)
    assert any(one == "rank 1: node1 was lost in mid-run: nothing came from it for 10 s" for one in missing)


@pytest.mark.parametrize("text", ["{", "[]", '{"schema": "dtprobe.hosts/1"}', '{"schema": "other/1", "hosts": {}}'])
def test_a_damaged_measurement_is_a_problem_and_never_the_end(tmp_path: Path, text: str) -> None:
    job(tmp_path, measured=False)
    (tmp_path / "hosts.json").write_text(text)
    case = read([tmp_path])
    assert case.lines and any(one.source == "hosts.json" for one in case.problems)
