"""The verdict on a rank that calls a collective differently, from tries as workers record them."""

from __future__ import annotations

import pandas as pd
import pytest

from dtprobe import Mitigation, VerdictKind
from dtprobe.authoring import mismatch
from dtprobe.evidence import OUTCOMES, Evidence
from dtprobe.readers.events import read_events
from dtprobe.worker import attempt

HEALTHY = {"wrong": 0, "changed": 4}
SILENT = {"wrong": 4, "changed": 4}


class Killed(BaseException):
    """A rank that dies in its step."""


class Detected(Exception):
    """What an error of torch's check, or of the framework's, says."""


def tried(environ, guard, *, error=None, named=None, **fields):
    with attempt(f"step {guard}", environ=environ) as one:
        if error is Killed:
            raise Killed
        one.note(**fields)
        if named is not None:
            one.note(named=named)
        if error is not None:
            raise error
    with attempt(f"next {guard}", environ=environ):
        pass


def evidence(tmp_path, arms, repeats=2, exit_code=0):
    """Each arm: a list of `tried`'s arguments that both of two ranks made, `repeats` times."""
    frames, outcomes = [], []
    for arm, tries in arms.items():
        for repeat in range(repeats):
            for rank in range(2):
                folder = tmp_path / arm / str(repeat) / f"rank{rank}"
                folder.mkdir(parents=True)
                environ = {"RANK": str(rank), "DTPROBE_RANK_FOLDER": str(folder)}
                for guard, fields in tries:
                    try:
                        tried(environ, guard, **fields)
                    except Killed:
                        break
                frames.append(read_events(folder / "events.jsonl").assign(arm=arm, repeat=repeat))
                outcomes.append(
                    {"arm": arm, "repeat": repeat, "rank": rank, "pid": 1, "exit_code": exit_code, "timed_out": False}
                )
    return Evidence(
        folder=tmp_path,
        seed=0,
        world_size=2,
        outcomes=pd.DataFrame(outcomes, columns=list(OUTCOMES)).astype(OUTCOMES),
        frames={"events": pd.concat(frames).astype({"arm": "string", "repeat": "Int64"})},
        unavailable={},
        suspicions=pd.DataFrame(),
    )


CAUGHT = {"error": Detected("Detected mismatch between collectives"), "wrong": 4, "changed": 0}
NAMED = {"error": Detected("ranks differ"), "named": "1", "wrong": 4, "changed": 0}
CONTROL = [("none", HEALTHY), ("detail", HEALTHY), ("checked", HEALTHY)]


def judged(tmp_path, fault, mitigated=(("checked", NAMED),), control=CONTROL, **options):
    seen = evidence(tmp_path, {"control": control, "fault": fault, "mitigated": mitigated})
    return mismatch.judged(seen, lambda rows: rows["silent"], "were wrong", **{"detail_catches": True} | options)


def test_wrong_in_every_step_and_caught_as_claimed_is_reproduced_and_cured(tmp_path):
    found = judged(tmp_path, [("none", SILENT), ("detail", CAUGHT)])
    assert (found.kind, found.mitigation, found.control_healthy) == (VerdictKind.REPRODUCED, Mitigation.HELD, True)
    assert found.metrics["silently_wrong"].fault.value == 1 and found.metrics["caught_by_detail"].fault.value == 1


def test_a_check_that_behaves_otherwise_than_claimed_makes_it_partly(tmp_path):
    assert judged(tmp_path, [("none", SILENT), ("detail", CAUGHT)], detail_catches=False).kind is VerdictKind.PARTLY


def test_right_numbers_are_no_symptom(tmp_path):
    assert judged(tmp_path, [("none", HEALTHY), ("detail", HEALTHY)]).kind is VerdictKind.NOT_REPRODUCED


def test_a_rank_that_dies_in_its_step_is_counted(tmp_path):
    seen = evidence(tmp_path, {"control": CONTROL, "fault": [("none", {"error": Killed})]})
    rows = mismatch.steps(seen)
    died = rows[rows["arm"].eq("fault")]
    assert len(died) == 4 and died["died"].all() and died["guard"].eq("none").all()


@pytest.mark.parametrize(
    "spoilt",
    [
        {**NAMED, "named": "0"},
        {**NAMED, "changed": 4},
        {**NAMED, "named": ""},
        HEALTHY,
    ],
    ids=["names another rank", "data already touched", "names nobody", "raises nothing"],
)
def test_the_cure_failed_where_a_rank_is_not_told_in_time_who_differs(tmp_path, spoilt):
    assert judged(tmp_path, [("none", SILENT), ("detail", CAUGHT)], [("checked", spoilt)]).mitigation is Mitigation.FAILED


def test_the_cure_failed_where_nothing_was_checked(tmp_path):
    assert judged(tmp_path, [("none", SILENT), ("detail", CAUGHT)], [("none", SILENT)]).mitigation is Mitigation.FAILED


def test_an_alarm_in_control_makes_it_unhealthy(tmp_path):
    alarmed = [("none", HEALTHY), ("detail", HEALTHY), ("checked", NAMED)]
    assert not judged(tmp_path, [("none", SILENT), ("detail", CAUGHT)], control=alarmed).control_healthy
