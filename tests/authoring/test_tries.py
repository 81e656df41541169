"""The verdict of scenarios whose every try shows the symptom or does not."""

from __future__ import annotations

import pandas as pd
import pytest

from dtprobe import Mitigation, VerdictKind
from dtprobe.authoring import symptoms, tries
from dtprobe.evidence import OUTCOMES, Evidence
from dtprobe.readers.events import read_events
from dtprobe.worker import attempt

TRIES = 6


def verdict(tmp_path, *, control=0, fault=TRIES, mitigated=0, cured=TRIES, exit_code=0, raised=0, **options):
    """What is judged of arms in which so many of TRIES tries were wrong, and of mitigated `cured` were cured."""
    frames, outcomes = [], []
    for arm, wrong in {"control": control, "fault": fault, "mitigated": mitigated}.items():
        folder = tmp_path / arm
        folder.mkdir()
        environ = {"RANK": "0", "DTPROBE_RANK_FOLDER": str(folder)}
        for number in range(TRIES):
            with attempt("step", environ=environ, wrong=int(number < wrong), cured=arm == "mitigated" and number < cured):
                if arm == "control" and number < raised:
                    raise ValueError("no")
        frames.append(read_events(folder / "events.jsonl").assign(arm=arm, repeat=0))
        code = exit_code if arm == "mitigated" else 0
        outcomes.append({"arm": arm, "repeat": 0, "rank": 0, "pid": 1, "exit_code": code, "timed_out": False})
    evidence = Evidence(
        folder=tmp_path,
        seed=0,
        world_size=1,
        outcomes=pd.DataFrame(outcomes, columns=list(OUTCOMES)).astype(OUTCOMES),
        frames={"events": pd.concat(frames).astype({"arm": "string", "repeat": "Int64"})},
        unavailable={},
        suspicions=pd.DataFrame(),
    )
    rows = symptoms.attempts(evidence)
    return tries.judged(
        evidence,
        rows,
        tries.number(rows, "wrong").eq(1),
        shown="were wrong",
        cured=tries.number(rows, "cured").eq(1),
        healed="were right",
        **options,
    )


@pytest.mark.parametrize(
    ("wrong", "kind"),
    [
        (TRIES, VerdictKind.REPRODUCED),
        (TRIES - 1, VerdictKind.PARTLY),
        (1, VerdictKind.INCONCLUSIVE),
        (0, VerdictKind.NOT_REPRODUCED),
    ],
)
def test_all_tries_reproduce_most_do_so_in_part_and_one_could_be_chance(tmp_path, wrong, kind):
    found = verdict(tmp_path, fault=wrong)
    assert (found.kind, found.mitigation, found.control_healthy) == (kind, Mitigation.HELD, True)
    assert f"{wrong} of {TRIES} tries were wrong, 0 of {TRIES} in control." in found.because


def test_a_claim_that_is_right_in_part_only_has_its_own_verdict(tmp_path):
    assert verdict(tmp_path, kind=VerdictKind.PARTLY).kind is VerdictKind.PARTLY


@pytest.mark.parametrize("arms", [{"cured": TRIES - 1}, {"mitigated": 1}, {"exit_code": 1}])
def test_the_cure_fails_where_a_try_is_not_cured_or_shows_the_symptom_or_the_rank_ends_badly(tmp_path, arms):
    assert verdict(tmp_path, **arms).mitigation is Mitigation.FAILED


def test_a_cure_that_is_an_error_may_end_the_rank(tmp_path):
    assert verdict(tmp_path, exit_code=1, ends_with_error=True).mitigation is Mitigation.HELD


@pytest.mark.parametrize("arms", [{"control": 1}, {"raised": 1}])
def test_a_symptom_or_an_error_in_control_is_not_healthy(tmp_path, arms):
    assert not verdict(tmp_path, **arms).control_healthy


def test_what_a_hung_try_never_noted_counts_as_nothing():
    rows = pd.DataFrame({"wrong": [1, None], "how": ["a", None]})
    assert tries.number(rows, "wrong").tolist() == [1.0, 0.0] and tries.text(rows, "how").tolist() == ["a", ""]
    assert tries.number(rows, "never noted").tolist() == [0, 0] and tries.text(rows, "never noted").tolist() == ["", ""]
