"""Exceptions come out of interleaved, tagged and nested output, and effects are told from causes."""

from __future__ import annotations

import pytest

from dtprobe.diagnose.facts.raised import raised


def test_interleaved_tracebacks_of_two_ranks_are_kept_apart(case):
    found = raised(
        case(
            "[rank0]: Traceback (most recent call last):",
            "[rank1]: Traceback (most recent call last):",
            '[rank0]:   File "/a/x.py", line 1, in f',
            '[rank1]:   File "/a/y.py", line 2, in g',
            "[rank1]:     boom()",
            "[rank1]: ValueError: of one",
            "[rank0]:     bang()",
            "[rank0]: KeyError: 'zero'",
        )
    )
    assert {(one.rank, one.type, one.where) for one in found} == {
        (0, "KeyError", "/a/x.py:1 in f"),
        (1, "ValueError", "/a/y.py:2 in g"),
    }


def test_what_is_raised_while_another_is_handled_is_chained(case):
    found = raised(
        case(
            "Traceback (most recent call last):",
            '  File "a.py", line 1, in f',
            "ValueError: first",
            "",
            "During handling of the above exception, another exception occurred:",
            "",
            "Traceback (most recent call last):",
            '  File "a.py", line 9, in g',
            "RuntimeError: second",
        )
    )
    assert [(one.text, one.chained) for one in found] == [("first", False), ("second", True)]


def test_the_inner_exception_of_a_group_is_the_cause(case):
    found = raised(
        case(
            "  + Exception Group Traceback (most recent call last):",
            '  |   File "a.py", line 3, in <module>',
            "  | ExceptionGroup: unhandled errors in a TaskGroup (1 sub-exception)",
            "  +-+---------------- 1 ----------------",
            "    | Traceback (most recent call last):",
            '    |   File "a.py", line 1, in pull',
            "    | LookupError: nothing there",
            "    +------------------------------------",
        )
    )
    assert [one.type for one in found if not one.launcher] == ["LookupError"]


@pytest.mark.parametrize(
    "text",
    [
        "RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:598] Connection closed by peer [10.0.0.2]:411",
        "torch.distributed.DistBackendError: NCCL communicator was aborted on rank 2.",
        "torch.distributed.DistNetworkError: failed to recv, got 0 bytes",
        "RuntimeError: [pair.cc:81] Timed out waiting 5000ms for recv operation to complete",
        "BrokenPipeError: [Errno 32] Broken pipe",
    ],
)
def test_words_about_a_peer_that_is_gone_are_effects(case, text):
    (one,) = raised(case("Traceback (most recent call last):", '  File "a.py", line 1, in f', text))
    assert one.effect


def test_an_exception_of_the_program_s_own_class_is_a_cause(case):
    (one,) = raised(case("Traceback (most recent call last):", '  File "a.py", line 1, in f', "mine.BadBatch: three of four"))
    assert not one.effect
    assert not one.launcher


def test_the_last_line_alone_behind_a_ranks_tag_is_an_exception(case):
    (found,) = raised(case("[rank2]: KeyError: 'mask'", "KeyError: nobody's", "[rank1] Errors: 0"))
    assert (found.rank, found.type, found.frames) == (2, "KeyError", ())


def test_a_last_line_that_its_rank_trained_on_after_was_caught(case):
    thrown, on = "[rank1] ValueError: torn record", ["[rank1] step 6 loss 1", "[rank1] step 7 loss 1"]
    assert not raised(case(thrown, *on))
    assert len(raised(case(thrown, *(line.replace("rank1", "rank0") for line in on)))) == 1
    assert len(raised(case(thrown, "1/3 attempts left; will restart worker group", *on))) == 1
