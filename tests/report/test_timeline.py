"""The ranks on one clock: waiting, silence, start-up, endings."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

from dtprobe.report.load import load
from dtprobe.report.timeline import BARS, LANES, timelines


def test_ranks_that_never_left_a_collective_wait_to_their_end(tmp_path: Path, samples: ModuleType) -> None:
    fault, mitigated, control = timelines(load(samples.skipped(tmp_path)))
    assert [fault.arm, mitigated.arm, control.arm] == ["fault", "mitigated", "control"]
    waiting = {lane.name: [span for span in lane.spans if span.kind == "waiting"] for lane in fault.lanes}
    assert {rank: len(spans) for rank, spans in waiting.items()} == {"rank 0": 1, "rank 1": 0, "rank 2": 1, "rank 3": 1}
    assert (waiting["rank 0"][0].text, round(waiting["rank 0"][0].begin_s, 3), waiting["rank 0"][0].end_s) == (
        "all_reduce #5",
        3.0,
        9.1,
    )
    assert "rank 0: exit 1, waited in all_reduce #5 for 6.1 s" in fault.summary
    assert not [span for lane in control.lanes for span in lane.spans if span.kind in ("waiting", "stall")]
    assert fault.suspected_s == (5.2,)


def test_a_long_silence_is_a_stall_and_the_start_is_none(tmp_path: Path, samples: ModuleType) -> None:
    made = samples.Made(tmp_path, "stall")
    run = made.arm_run("fault", 2, at_s=0, wall_s=[20.0], exits=[0])
    for at_s in (4.0, 4.5, 5.0, 14.0, 14.5, 19.5):
        made.row("events", run, 0, at_s, "events.jsonl", kind="step")
    (timeline,) = timelines(load(made.write()))
    (lane,) = timeline.lanes
    stalls = [(span.begin_s, span.end_s, span.text) for span in lane.spans if span.kind == "stall"]
    assert stalls == [(5.0, 14.0, "silent for 9 s"), (14.5, 19.5, "silent for 5 s")]
    assert [(span.begin_s, span.end_s) for span in lane.spans if span.kind == "start"] == [(0.0, 4.0)]


def test_thousands_of_collectives_become_few_bars_that_name_their_span(tmp_path: Path, samples: ModuleType) -> None:
    made = samples.Made(tmp_path, "many")
    run = made.arm_run("fault", 2, at_s=0, wall_s=[10.0], exits=[0])
    for seq in range(3000):
        made.row(
            "collectives",
            run,
            0,
            1 + seq * 0.002,
            "fr.json",
            kind="collective",
            group="0",
            op="all_reduce",
            seq=seq,
            op_id=seq,
            retired=True,
        )
    ((lane,),) = [timeline.lanes for timeline in timelines(load(made.write()))]
    bars = [span for span in lane.spans if span.kind == "collective"]
    assert len(bars) <= BARS
    assert bars[0].text.startswith("all_reduce #0 to all_reduce #")
    assert bars[0].text.count(" to ") == 1


def test_a_collective_seen_by_several_dumps_is_drawn_once_with_its_completion(tmp_path: Path, samples: ModuleType) -> None:
    made = samples.Made(tmp_path, "dumps")
    run = made.arm_run("fault", 2, at_s=0, wall_s=[4.0], exits=[0])
    done_ns = run["started_ns"] + 3 * samples.SECOND
    for number, done in enumerate((None, done_ns, None)):
        made.row(
            "collectives", run, 0, 2.0, f"fr-{number}.json", kind="collective", group="0", op="all_reduce", seq=1, op_id=1,
            state="completed" if done else "started", retired=done is not None, t_completed_ns=done,
        )  # fmt: skip
    ((lane,),) = [timeline.lanes for timeline in timelines(load(made.write()))]
    (bar,) = [span for span in lane.spans if span.kind != "start"]
    assert (bar.kind, bar.begin_s, bar.end_s) == ("collective", 2.0, 3.0)


def test_of_more_ranks_than_fit_those_that_ended_badly_are_kept(tmp_path: Path, samples: ModuleType) -> None:
    made = samples.Made(tmp_path, "wide")
    made.arm_run("fault", 2, at_s=0, wall_s=[2.0] * 64, exits=[None if rank == 61 else 0 for rank in range(64)])
    (timeline,) = timelines(load(made.write()))
    assert len(timeline.lanes) == LANES
    assert timeline.left_out == 64 - LANES
    assert (timeline.lanes[-1].name, timeline.lanes[-1].ending, timeline.lanes[-1].bad) == (
        "rank 61",
        "killed by SIGKILL",
        True,
    )


def test_an_arm_run_that_has_no_end_and_left_nothing_has_no_timeline(tmp_path: Path, samples: ModuleType) -> None:
    assert [timeline.arm for timeline in timelines(load(samples.unfinished(tmp_path)))] == ["control"]


def test_a_failed_wait_that_an_early_dump_saw_is_a_wait_up_to_the_next_sign_of_life(
    tmp_path: Path, samples: ModuleType
) -> None:
    made = samples.Made(tmp_path, "gloo")
    run = made.arm_run("fault", 2, at_s=0, wall_s=[12.0], exits=[1])
    for dump, seqs in ((0, (1, 2)), (1, (1, 2))):
        for seq in seqs:
            made.row(
                "collectives", run, 0, 2.0 + seq, f"fr-{dump}.json", kind="collective", group="0", op="all_reduce", seq=seq, op_id=seq,
                state="scheduled", retired=dump == 1 or seq == 1,
            )  # fmt: skip
    made.row("events", run, 0, 9.0, "events.jsonl", kind="error")
    ((lane,),) = [timeline.lanes for timeline in timelines(load(made.write()))]
    assert [(span.begin_s, span.end_s, span.text) for span in lane.spans if span.kind == "waiting"] == [
        (4.0, 9.0, "all_reduce #2")
    ]
    assert not [span for span in lane.spans if span.kind == "stall"]


def test_the_silence_before_a_clean_exit_is_no_stall_but_before_a_kill_it_is(tmp_path: Path, samples: ModuleType) -> None:
    made = samples.Made(tmp_path, "tail")
    run = made.arm_run("fault", 2, at_s=0, wall_s=[12.0] * 3, exits=[0, 1, None])
    for rank in range(3):
        made.row(
            "collectives",
            run,
            rank,
            1.5,
            "fr.json",
            kind="collective",
            group="0",
            op="all_reduce",
            seq=1,
            op_id=1,
            retired=True,
        )
    made.row("events", run, 1, 2.0, "events.jsonl", kind="error")
    (timeline,) = timelines(load(made.write()))
    assert {lane.name: [span.text for span in lane.spans if span.kind == "stall"] for lane in timeline.lanes} == {
        "rank 0": [],
        "rank 1": [],
        "rank 2": ["silent for 10.5 s"],
    }


def test_a_launchers_ranks_are_drawn_from_what_they_left(tmp_path: Path, samples: ModuleType) -> None:
    (timeline,) = timelines(load(samples.injection(tmp_path)))
    assert [(lane.name, lane.ending) for lane in timeline.lanes] == [("command", "exit 1"), ("rank 0", ""), ("rank 1", "")]
    assert "rank 1: end not recorded" in timeline.summary


def test_rare_events_are_marked_as_such(tmp_path: Path, samples: ModuleType) -> None:
    made = samples.Made(tmp_path, "rare")
    run = made.arm_run("fault", 2, at_s=0, wall_s=[10.0, 10.0], exits=[0, 0])
    for rank in range(2):
        for step in range(100):
            made.row("events", run, rank, 1 + step / 20, "events.jsonl", kind="step")
    made.row("events", run, 1, 3.0, "events.jsonl", kind="skipped")
    (timeline,) = timelines(load(made.write()))
    assert {(mark.text, mark.common) for lane in timeline.lanes for mark in lane.marks} == {("step", 200), ("skipped", 1)}
