"""Events of several hosts on one clock."""

from __future__ import annotations

from pathlib import Path

import pytest

from dtprobe.diagnose import read
from dtprobe.diagnose.case import Artifact, Line
from dtprobe.diagnose.clock import SECOND, SYNCHRONISED, ZONES, one_clock, ran_for_ns, timeline
from dtprobe.diagnose.lines import read_lines

FIRST = 1_735_689_600 * SECOND  # 2025-01-01


def _line(host: str | None, t_ns: int | None, text: str, rank: int = 0, zoned: bool = True) -> Line:
    artifact = Artifact(name="a", path=Path("a"), kind="text", size=1)
    return Line(artifact=artifact, number=1, text=text, raw=text, t_ns=t_ns, host=host, rank=rank, zoned=zoned)


def _given_up(host: str, skew_ns: int, seq: int, ran_ms: int) -> Line:
    text = f"[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum={seq}, OpType=ALLREDUCE, Timeout(ms)=1000) ran for {ran_ms} milliseconds"
    return _line(host, FIRST + seq * SECOND + ran_ms * 10**6 + skew_ns, text)


def test_clocks_apart_are_found_by_what_both_hosts_waited_for() -> None:
    skew = 37 * SECOND
    lines = [_given_up("a", 0, seq, 1000 + 7 * seq) for seq in (1, 2, 3)] + [_given_up("b", skew, seq, 1300) for seq in (1, 2)]
    clock = one_clock(lines)
    assert clock.reference == "a"
    assert abs(clock.offset("b").offset_ns + skew) < SECOND // 10
    there, here = clock.moment(lines[-1], "x"), clock.moment(lines[1], "x")
    assert abs(there.t_ns - here.t_ns) < SECOND  # type: ignore[operator]
    assert there.uncertainty_ns >= SYNCHRONISED > here.uncertainty_ns


def test_a_time_zone_is_told_from_skew() -> None:
    lines = [_given_up("a", 0, 1, 1000), _given_up("a", 0, 2, 1000), _given_up("b", 8 * 3600 * SECOND, 1, 1000)]
    offset = one_clock(lines).offset("b")
    assert abs(offset.offset_ns + 8 * 3600 * SECOND) < SECOND and "-480 minutes" in offset.why


def test_a_rank_that_came_a_little_late_is_not_taken_for_a_wrong_clock() -> None:
    offset = one_clock([_given_up("a", 0, 1, 1000), _given_up("a", 0, 2, 1000), _given_up("b", 2 * SECOND, 1, 1000)]).offset(
        "b"
    )
    assert offset.offset_ns == 0 and offset.uncertainty_ns >= 2 * SECOND


def test_hosts_that_nothing_compares_may_differ_by_what_time_servers_leave() -> None:
    clock = one_clock([_line("a", FIRST, "x"), _line("a", FIRST, "y"), _line("b", FIRST + 1, "z")])
    assert clock.offset("b").offset_ns == 0 and clock.offset("b").uncertainty_ns == SYNCHRONISED


def test_a_stamp_without_a_zone_beside_ones_with_is_uncertain_by_the_zones_of_the_world() -> None:
    lines = [_line("a", FIRST, "x"), _line("a", FIRST + 1, "y", zoned=False)]
    clock = one_clock(lines)
    assert clock.moment(lines[1], "y").uncertainty_ns >= ZONES > clock.moment(lines[0], "x").uncertainty_ns
    assert one_clock(lines[1:]).moment(lines[1], "y").uncertainty_ns < SECOND


@pytest.mark.parametrize(
    ("text", "ns"),
    [
        ("ran for 600021 milliseconds before timing out", 600_021 * 10**6),
        ("Timed out waiting 1800000ms for recv operation to complete", 1800 * SECOND),
        ("Timed out after 61 seconds waiting for clients. 1/2 clients joined.", 61 * SECOND),
        ("ran for a while", None),
    ],
)
def test_how_long_was_waited_is_read(text: str, ns: int | None) -> None:
    assert ran_for_ns(text) == ns


def test_the_timeline_begins_when_the_stuck_collective_began(tmp_path: Path) -> None:
    (tmp_path / "log").write_text(
        "2025-01-01 00:00:30 [rank1]: step 3\n"
        "[rank0]:[E101 00:10:05.000000 ProcessGroupNCCL.cpp:1] [Rank 0] Watchdog caught collective operation timeout: "
        "WorkNCCL(SeqNum=7, OpType=ALLREDUCE, NumelIn=1, NumelOut=1, Timeout(ms)=600000) ran for 600000 milliseconds before timing out.\n"
    )
    moments = timeline(read([tmp_path]))
    assert moments[0].text == "began to wait in ALLREDUCE number 7"
    assert moments[0].t_ns == FIRST + 5 * SECOND and moments[0].rank == 0
    assert moments[0].file == "log" and moments[0].line == 2


def test_the_zone_of_a_stamp_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_text("2025-01-01T00:00:00Z x\n2025-01-01 00:00:00 y\n")
    lines = list(read_lines(Artifact(name="a", path=path, kind="text", size=1)))
    assert [one.zoned for one in lines] == [True, False]
