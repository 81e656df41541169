"""The answer: two sentences, what was ruled out, or that it is not decided."""

from __future__ import annotations

from dtprobe.diagnose.analysts import conclude
from dtprobe.diagnose.case import Finding, Quote
from dtprobe.diagnose.decide import decide


def finding(mode: str, likelihood: float, line: int = 1, **more) -> Finding:
    shown = (Quote(file="a.log", line=line, text="text", role="cause"),)
    return Finding(mode=mode, analyst="test", likelihood=likelihood, because="It is so.", evidence=shown, **more)


def test_a_weak_finding_is_undetermined_and_names_nobody(case):
    answer = decide(case("x"), [finding("rank-killed", 0.3, first=2, suspects=(2,), not_proven="who sent the signal")])
    assert answer.failure_mode == "undetermined"
    assert answer.suspects == ()
    assert any("who sent the signal" in text for text in answer.missing)


def test_nothing_found_is_undetermined(case):
    assert decide(case("x"), []).failure_mode == "undetermined"


def test_a_healthy_job_is_never_blamed(case):
    read = case("[rank0]: step 3 loss 1.0", "[rank1]: step 3 loss 1.0", "[rank0]: done", "[rank1]: done")
    answer = decide(read, *conclude(read))
    assert (answer.failure_mode, answer.suspects, answer.first_failing_rank) == ("healthy", (), None)


def test_a_sign_of_failure_is_never_healthy(case):
    read = case("[rank0]: done", "[rank1]: error: no disk", "[rank1]: done")
    answer = decide(read, *conclude(read))
    assert answer.failure_mode != "healthy"


def test_the_answer_tells_what_follows_from_it_and_what_was_ruled_out(case):
    answer = decide(case("x"), [finding("cuda-oom-one-rank", 0.9, first=1), finding("collective-skipped", 0.6, 2, first=1)])
    assert answer.failure_mode == "cuda-oom-one-rank"
    assert answer.because.count(".") >= 2
    assert [one.mode for one in answer.ruled_out] == ["collective-skipped"]
    assert "follows from cuda-oom-one-rank" in answer.ruled_out[0].because
    assert answer.fix


def test_an_equally_likely_rival_lowers_the_confidence(case):
    alone = decide(case("x"), [finding("rank-killed", 0.75)])
    rival = decide(
        case("x"), [finding("rank-killed", 0.75), finding("peer-exited-early", 0.74, 2), finding("memlock-limit", 0.74, 3)]
    )
    assert rival.confidence < alone.confidence or rival.failure_mode != alone.failure_mode


def test_an_analyst_that_fails_is_said_to_be_missing_and_takes_nothing_from_the_others(case):
    def broken(_case):
        raise KeyError("hostile")

    def sound(_case):
        yield finding("rank-killed", 0.9, first=2)

    answer = decide(case("x"), *conclude(case("x"), (broken, sound)))
    assert answer.failure_mode == "rank-killed"
    assert any("could not judge" in text and "hostile" in text for text in answer.missing)
