"""Signatures find the lines that software prints, only those, and all of them in one pass."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dtprobe.diagnose.case import Artifact, Line
from dtprobe.diagnose.modes import modes
from dtprobe.diagnose.signatures import LONGEST, anchors, events_of, signatures

ARTIFACT = Artifact(name="job.log", path=Path("job.log"), kind="text", size=1)
ALL = list(signatures().values())
EXAMPLES = [text for one in ALL for text in one.examples]


def _line(text: str, **more) -> Line:
    return Line(artifact=ARTIFACT, number=1, text=text, raw=text, **more)


def _found(text: str) -> list[str]:
    return [event.signature for event in events_of([_line(text)])]


@pytest.mark.parametrize("one", ALL, ids=lambda one: one.id)
def test_a_signature_finds_its_examples_and_not_its_counterexamples(one):
    assert [text for text in one.examples if one.id not in _found(text)] == []
    assert [text for text in one.counterexamples if one.id in _found(text)] == []


@pytest.mark.parametrize("one", ALL, ids=lambda one: one.id)
def test_every_wording_of_a_signature_has_an_example(one):
    assert [wording.pattern for wording in one.patterns if not any(wording.search(text) for text in one.examples)] == []


def test_signatures_name_modes_that_exist_and_how_likely_they_are():
    known = set(modes())
    assert [one.id for one in ALL if one.mode is not None and one.mode not in known] == []
    assert [one.id for one in ALL if one.mode is not None and not 0.2 <= one.likelihood < 1] == []
    assert [one.id for one in ALL if one.mode is None and one.likelihood] == []


def test_a_line_without_any_anchor_is_no_event():
    harmless = "step 412 tokens/s 9000"
    assert not any(anchor in harmless for anchor in anchors())
    assert _found(harmless) == []


def test_the_rank_in_a_line_is_the_events_and_not_its_printers():
    text = "n1:500:611 [0] bootstrap.cc:190 NCCL WARN Bootstrap Root : rank 2 of 4 ranks has already checked in"
    (event,) = [event for event in events_of([_line(text, rank=0, host="n1")]) if event.signature == "duplicate-rank"]
    assert (event.rank, event.host) == (2, "n1")


def test_what_stands_beyond_the_longest_line_is_not_looked_at():
    assert _found("x" * LONGEST + " CUDA out of memory. Tried to allocate") == []


@settings(max_examples=120, deadline=None)
@given(st.lists(st.sampled_from(EXAMPLES), min_size=1, max_size=3), st.text(max_size=20))
def test_one_pass_over_all_anchors_finds_what_each_signature_finds_alone(pieces, noise):
    line = _line(noise.join(pieces))
    alone = [one.id for one in ALL if one.event(line) is not None]
    assert _found(line.text) == alone
