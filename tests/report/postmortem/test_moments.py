"""The timeline: what zero is, what stands alone, which silences are cut, what is drawn of very much."""

from __future__ import annotations

from dataclasses import replace
from types import ModuleType
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtprobe.diagnose.diagnosis import Diagnosis, Moment, Operation
from dtprobe.report.postmortem import lanes_picture
from dtprobe.report.postmortem.moments import LANES, TOLD, duration, since, timeline

S = 10**9


def test_times_count_from_the_first_line_of_the_cause(diagnoses: ModuleType) -> None:
    data = timeline(diagnoses.lost_gpu())
    assert data.zero_ns == diagnoses.T0
    assert data.zero == "the first line of the cause"
    told = {row.number: (row.since, row.off, row.part) for row in data.rows}
    assert told[1] == ("-40 s", "", "other")
    assert told[3] == ("0", "2 s", "cause")
    assert told[4] == ("+1.2 s", "40 ms", "confirm")
    assert told[6] == ("+31 min", "", "effect")
    assert 10 not in told and data.untold == 1, "what has no time and is no evidence"
    assert data.rows[2].where == "node-b/kernel.log:8812" and data.rows[2].clock == "14:13:20.000"


def test_lanes_are_ranks_by_host_and_the_blamed_one_is_marked(diagnoses: ModuleType) -> None:
    lanes = timeline(diagnoses.lost_gpu()).lanes
    assert [(lane.host, lane.name) for lane in lanes] == [
        ("node-a", "node-a"), ("node-a", "rank 0"), ("node-a", "rank 1"), ("node-b", "node-b"), ("node-b", "rank 2"), ("node-b", "rank 3")
    ]  # fmt: skip
    assert [lane.name for lane in lanes if lane.blamed] == ["rank 3"]
    assert [one.end_ns for one in lanes[1].operations][-1] is None


def test_a_long_silence_is_cut_out_of_the_picture_and_said(diagnoses: ModuleType) -> None:
    data = timeline(diagnoses.lost_gpu())
    assert [one.begin_ns - diagnoses.T0 for one in data.stretches] == [-40 * S, 31 * 60 * S]
    drawn = lanes_picture.draw(data, 900, "t")
    assert "30 min 58 s cut" in drawn
    trifles = [0, 1, 2, 1000, 1001, 1002, 1003, 2000, 2001]
    some = replace(diagnoses.lost_gpu(), operations=(), timeline=tuple(Moment(t_ns=at * S, text=str(at)) for at in trifles))
    assert [(one.begin_ns // S, one.end_ns // S) for one in timeline(some).stretches] == [(0, 2), (1000, 1003), (2000, 2001)]
    even = replace(diagnoses.lost_gpu(), operations=(), timeline=tuple(Moment(t_ns=at * S, text=str(at)) for at in range(9)))
    assert len(timeline(even).stretches) == 1


def test_moments_alike_but_for_their_numbers_are_one_row_and_a_cause_is_never_among_them(diagnoses: ModuleType) -> None:
    data = timeline(diagnoses.big())
    assert [(row.who, row.more) for row in data.rows] == [
        ("ranks 0-776, 778-4095 on 512 hosts", "4,095 alike, the last +56.4 s"),
        ("rank 777 on node-97", ""),
    ]
    assert data.untold == 0
    assert len(data.lanes) <= LANES and data.undrawn == 4096 - len(data.lanes)
    assert any(lane.blamed for lane in data.lanes)


def test_of_too_many_different_moments_the_evidence_stays(diagnoses: ModuleType) -> None:
    made = diagnoses.lost_gpu()
    noise = tuple(Moment(t_ns=at * S, text="step " + "x" * at, rank=0) for at in range(500))
    data = timeline(replace(made, timeline=noise + made.timeline))
    assert len(data.rows) == TOLD and data.untold == 510 - TOLD
    assert {"cause", "confirm", "effect"} <= {row.part for row in data.rows}


def test_evidence_without_a_time_is_told_last_and_a_line_that_several_rules_saw_once(diagnoses: ModuleType) -> None:
    made = diagnoses.lost_gpu()
    timeless = tuple(replace(one, t_ns=None) if one.line == 120 else one for one in made.timeline)
    data = timeline(replace(made, timeline=timeless + timeless))
    assert [row.moments[0].line for row in data.rows if not row.since] == [120]
    assert data.rows[-1].moments[0].line == 120 and len(data.rows) == 9


def test_without_a_time_the_order_is_kept_and_nothing_is_drawn(diagnoses: ModuleType) -> None:
    made = replace(
        diagnoses.lost_gpu(), operations=(), timeline=tuple(Moment(t_ns=None, text=text) for text in ("b", "a", "c"))
    )
    data = timeline(made)
    assert [row.text for row in data.rows] == ["b", "a", "c"]
    assert data.stretches == () and data.zero_ns is None


@pytest.mark.parametrize(
    ("ns", "text"),
    [(0, "0 s"), (20_000_000, "20 ms"), (2_540_000_000, "2.5 s"), (59_990_000_000, "1 min"), (90 * S, "1 min 30 s"),
     (3 * 3600 * S + 300 * S, "3 h 5 min"), (52 * 3600 * S, "2 d 4 h"), (3599_900_000_000, "60 min")],
)  # fmt: skip
def test_durations_are_in_the_unit_that_fits(ns: int, text: str) -> None:
    assert duration(ns) == text


def test_signs_of_times() -> None:
    assert (since(0), since(499_999), since(-2 * S), since(720 * S)) == ("0", "0", "-2 s", "+12 min")


_times = st.one_of(st.none(), st.integers(0, 4 * 10**18))


@given(
    moments=st.lists(st.tuples(_times, st.one_of(st.none(), st.integers(0, 40)), st.integers(0, 10**12)), max_size=40),
    operations=st.lists(
        st.tuples(st.integers(0, 40), st.integers(0, 4 * 10**18), st.one_of(st.none(), st.integers(0, 4 * 10**18))), max_size=20
    ),
)
def test_whatever_the_times_the_picture_is_drawn_within_its_frame(
    moments: list[tuple[int | None, int | None, int]], operations: list[tuple[int, int, int | None]]
) -> None:
    made = Diagnosis(
        failure_mode="rank-lost", group="process", locus="process", first_failing_rank=2, host=None, suspects=(2,), confidence=0.7,
        because="", evidence=(), missing=(), fix="", scenario=None,
        timeline=tuple(Moment(t_ns=t_ns, text=f"{number}", rank=rank, uncertainty_ns=off) for number, (t_ns, rank, off) in enumerate(moments)),
        operations=tuple(Operation(rank=rank, name="recv", begin_ns=begin, end_ns=end) for rank, begin, end in operations),
    )  # fmt: skip
    data = timeline(made)
    assert sum(len(row.moments) for row in data.rows) + data.untold == len(moments)
    if not data.stretches:
        return
    for width in (lanes_picture.NARROW, lanes_picture.WIDE):
        root = ElementTree.fromstring(lanes_picture.draw(data, width, "t"))
        high = float(root.attrib["viewBox"].split()[3])
        for element in root.iter("rect"):
            x, y, w, h = (float(element.attrib[name]) for name in ("x", "y", "width", "height"))
            assert x >= 0 and x + w <= width + 1 and y >= 0 and y + h <= high
        for element in root.iter("text"):
            assert 0 <= float(element.attrib["x"]) <= width and 0 <= float(element.attrib["y"]) <= high
