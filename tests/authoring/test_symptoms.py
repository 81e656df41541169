"""What judges see of tries: those that ended, raised, or never came to an end, by arm."""

from __future__ import annotations

import pandas as pd
import pytest

from dtprobe import Metric, VerdictKind
from dtprobe.authoring import symptoms
from dtprobe.evidence import OUTCOMES, Evidence
from dtprobe.readers.events import read_events
from dtprobe.worker import attempt


def left_by(tmp_path, arm, code, exit_code=0):
    """What a rank of an arm left that ran `code` with its environment."""
    folder = tmp_path / arm / "rank1"
    folder.mkdir(parents=True)
    code({"RANK": "1", "DTPROBE_RANK_FOLDER": str(folder)})
    path = folder / "events.jsonl"
    events = read_events(path) if path.exists() else pd.DataFrame()
    outcome = {"arm": arm, "repeat": 0, "rank": 1, "pid": 1, "exit_code": exit_code, "timed_out": False}
    return events.assign(arm=arm, repeat=0), outcome


def evidence(tmp_path, **codes):
    parts = [left_by(tmp_path, arm, code) for arm, code in codes.items()]
    return Evidence(
        folder=tmp_path,
        seed=0,
        world_size=2,
        outcomes=pd.DataFrame([outcome for _, outcome in parts], columns=list(OUTCOMES)).astype(OUTCOMES),
        frames={"events": pd.concat([frame for frame, _ in parts if len(frame)]).astype({"arm": "string", "repeat": "Int64"})}
        if any(len(frame) for frame, _ in parts)
        else {},
        unavailable={},
        suspicions=pd.DataFrame(),
    )


def well(environ):
    with attempt("step", environ=environ, size=4) as one:
        one.note(total=3.0)


def raises(environ):
    with attempt("step", environ=environ, size=4):
        raise KeyError("rank 0 and ranks 2, 3")


def hangs(environ):
    class Killed(BaseException):
        pass

    with pytest.raises(Killed), attempt("step", environ=environ):
        raise Killed


def test_what_is_asked_of_numbers_and_of_texts_can_be_combined_though_a_try_never_ended(tmp_path):
    rows = symptoms.attempts(evidence(tmp_path, control=well, fault=raises, mitigated=hangs)).set_index("arm")

    raised = rows["rank"].eq(1) & rows["error"].eq("KeyError") & rows["text"].str.contains("ranks", regex=False)

    assert raised["fault"] and not raised["control"] and pd.isna(raised["mitigated"])


def test_a_try_is_seen_as_it_ended(tmp_path):
    rows = symptoms.attempts(evidence(tmp_path, control=well, fault=raises, mitigated=hangs)).set_index("arm")
    assert rows["ended"].tolist() == [True, True, False]
    assert rows["error"].tolist()[:2] == ["", "KeyError"] and pd.isna(rows.loc["mitigated", "error"])
    assert rows.loc["control", "total"] == 3.0 and rows.loc["control", "size"] == 4
    assert rows.loc["control", "took_s"] >= 0 and pd.isna(rows.loc["mitigated", "took_s"])
    assert (rows["rank"] == 1).all()


def test_an_arm_is_well_only_where_something_was_tried_and_nothing_raised(tmp_path):
    seen = evidence(tmp_path, control=well, fault=raises, mitigated=hangs)
    rows = symptoms.attempts(seen)
    assert [symptoms.unmarred(rows, arm) for arm in ("control", "fault", "mitigated")] == [True, False, False]
    assert not symptoms.unmarred(symptoms.attempts(seen, "another"), "control")
    assert symptoms.ended_well(seen, "control")
    assert not symptoms.ended_well(evidence(tmp_path / "two", fault=well), "control")


def test_shares_and_measures_are_by_arm_with_their_n(tmp_path):
    rows = symptoms.attempts(evidence(tmp_path, control=well, fault=raises))
    metric = symptoms.share(rows, rows["error"] != "")
    assert (metric.control.value, metric.fault.value, metric.mitigated) == (0, 1, None)
    assert symptoms.counts(rows, rows["error"] != "", "fault") == (1, 1)
    assert symptoms.measure(rows, "total").control.value == 3.0 and symptoms.measure(rows, "total").fault is None
    assert symptoms.measure(rows, "no such column") == Metric(unit="s")


def test_where_an_arm_is_missing_nothing_is_decided(tmp_path):
    both = evidence(tmp_path, control=well, fault=raises)
    rows = symptoms.attempts(both)
    assert symptoms.undecided(both, {"tries": rows}) is None
    for seen, why in (
        (evidence(tmp_path / "one", control=well), "fault did not run"),
        (evidence(tmp_path / "none", control=well, fault=lambda environ: None), "fault left no tries"),
    ):
        verdict = symptoms.undecided(seen, {"tries": symptoms.attempts(seen)})
        assert verdict.kind is VerdictKind.INCONCLUSIVE and not verdict.control_healthy and verdict.because == why


@pytest.mark.parametrize(
    ("text", "ranks", "names"),
    [
        ("rank 1 is missing", {1}, True),
        ("ranks 1, 2 and 3 are missing", {1, 2, 3}, True),
        ("rank 1 called all_reduce, rank 2 broadcast", {1}, False),
        ("timed out", {1}, False),
        ("ranks 10, 1", {1, 10}, True),
    ],
)
def test_a_text_names_ranks_when_it_names_these_and_no_other(text, ranks, names):
    rows = pd.DataFrame({"text": [text]})
    assert symptoms.naming(rows, ranks).tolist() == [names]


@pytest.mark.parametrize(
    ("fault", "control", "kind"),
    [
        ((8, 8), (0, 8), VerdictKind.REPRODUCED),
        ((7, 8), (0, 8), VerdictKind.PARTLY),
        ((3, 3), (0, 3), VerdictKind.INCONCLUSIVE),
        ((0, 8), (0, 8), VerdictKind.NOT_REPRODUCED),
        ((8, 8), (8, 8), VerdictKind.NOT_REPRODUCED),
    ],
)
def test_what_too_few_tries_show_decides_nothing(fault, control, kind):
    assert symptoms.apart(fault, control) is kind
