"""Findings weighed: causes before effects, independent words joined, ranks by agreement."""

from __future__ import annotations

from typing import Any

from dtprobe.diagnose.case import Finding, Quote
from dtprobe.diagnose.modes import modes
from dtprobe.diagnose.weigh import evidence, weigh

EXPLAINS = {name: one.explains for name, one in modes().items()}


def finding(mode: str, likelihood: float, analyst: str = "one", line: int = 1, **more: Any) -> Finding:
    return Finding(
        mode=mode,
        analyst=analyst,
        likelihood=likelihood,
        because="so",
        evidence=(Quote(file="a.log", line=line, text="text", role="cause"),),
        **more,
    )


def order(*findings: Finding) -> list[str]:
    return [one.mode for one in weigh(findings, EXPLAINS) if not one.explained_by]


def test_a_cause_wins_over_a_likelier_effect():
    assert order(finding("collective-skipped", 0.68), finding("cuda-oom-one-rank", 0.6, line=2)) == ["cuda-oom-one-rank"]


def test_what_the_kernel_says_explains_the_exception_it_led_to():
    assert order(finding("python-exception-one-rank", 0.85), finding("gpu-fell-off-bus", 0.9, line=2)) == ["gpu-fell-off-bus"]


def test_a_guess_does_not_explain_what_is_clearly_likelier():
    assert order(finding("slurm-preemption", 0.52), finding("rank-killed", 0.8, line=2))[0] == "rank-killed"


def test_a_specific_desync_is_told_instead_of_the_general_one():
    assert order(finding("collective-skipped", 0.66), finding("uneven-dataloader-desync", 0.7, line=2)) == [
        "uneven-dataloader-desync"
    ]


def test_two_analysts_make_a_mode_surer_than_each():
    (one,) = weigh([finding("straggler", 0.6, "a"), finding("straggler", 0.6, "b", line=2)], EXPLAINS)
    assert 0.8 < one.likelihood < 0.9


def test_two_analysts_that_read_one_line_count_less_than_two_that_read_two():
    (alike,) = weigh([finding("straggler", 0.6, "a"), finding("straggler", 0.6, "b")], EXPLAINS)
    (apart,) = weigh([finding("straggler", 0.6, "a"), finding("straggler", 0.6, "b", line=2)], EXPLAINS)
    assert 0.6 < alike.likelihood < apart.likelihood


def test_the_rank_that_most_findings_name_is_first():
    (one,) = weigh(
        [
            finding("rank-killed", 0.7, "a", first=3, suspects=(3,)),
            finding("rank-killed", 0.5, "b", first=5, suspects=(5,)),
            finding("rank-killed", 0.5, "c", first=5, suspects=(5,)),
        ],
        EXPLAINS,
    )
    assert (one.first, one.suspects) == (5, (5,))


def test_a_cause_without_a_rank_struck_the_one_that_its_effect_names():
    best = weigh(
        [finding("gpu-gsp-timeout", 0.9), finding("collective-skipped", 0.6, line=2, first=4, suspects=(4,))], EXPLAINS
    )[0]
    assert (best.mode, best.first, best.suspects) == ("gpu-gsp-timeout", 4, (4,))


def test_what_came_minutes_later_is_no_cause():
    early, late = 1_000_000_000_000, 1_300_000_000_000
    assert "python-exception-one-rank" in order(
        finding("python-exception-one-rank", 0.85, at_ns=early), finding("slurm-preemption", 0.8, line=2, at_ns=late)
    )


def test_evidence_begins_with_the_cause_and_shows_each_line_once():
    ranked = weigh([finding("cuda-oom-one-rank", 0.9), finding("collective-skipped", 0.6, line=2)], EXPLAINS)
    shown = evidence(ranked[0], ranked[1:], 5)
    assert [(one.line, one.role) for one in shown] == [(1, "cause"), (2, "effect")]


def test_one_line_of_each_kind_is_shown_before_a_second_of_the_same():
    texts = ["rank 0 saw it at 1", "rank 1 saw it at 2", "rank 2 saw it at 3", "the disk is full"]
    quotes = tuple(Quote(file="a.log", line=number, text=text, role="cause") for number, text in enumerate(texts))
    (one,) = weigh([Finding(mode="straggler", analyst="a", likelihood=0.8, because="", evidence=quotes)], EXPLAINS)
    assert [quoted.line for quoted in evidence(one, [], 2)] == [0, 3]
