"""What ranks say, by whom, and how one differs from its peers."""

from __future__ import annotations

import pytest

from dtprobe.diagnose.facts.words import says, words

SAYS = {
    "says-data-end": ["data loader exhausted after 12 batches", "epoch 3 finished", "no more samples in shard list"],
    "says-clean-end": ["rank 0 done", "training finished", "exiting normally", "evaluation done, bye"],
    "says-save": ["Saving checkpoint to /data/step_10", "writing snapshot /mnt/x.pt", "uploading model weights"],
    "says-long-work": ["building the sample index", "Evaluating: 12%", "compacting the cache", "tokenizing 3 files"],
    "says-starved": ["waiting for batch 61 from the loader", "prefetch queue is empty"],
}
SAYS_NOT = {
    "says-data-end": ["epoch 3 step 20 loss 1.0"],
    "says-clean-end": ["step 40 done", "finished loading the checkpoint", "micro 0..7 done at iter 31"],
    "says-save": ["step 4 loss 0.2"],
    "says-long-work": ["Training: 12%", "Using 4 workers"],
    "says-starved": ["waiting for rank 2", "data: 0.01"],
}


@pytest.mark.parametrize(("kind", "text"), [(kind, text) for kind, texts in SAYS.items() for text in texts])
def test_general_words_are_known(case, kind, text):
    assert says(kind, case(text).lines[0])


@pytest.mark.parametrize(("kind", "text"), [(kind, text) for kind, texts in SAYS_NOT.items() for text in texts])
def test_words_of_ordinary_work_are_not_taken_for_them(case, kind, text):
    assert not says(kind, case(text).lines[0])


def test_the_rank_is_in_the_tag_in_the_text_or_first_on_the_line(case):
    found = words(case("[rank2]: one", "loss 2, rank 3", "0 ready", "1 ready"))
    assert {rank: [line.text for line in lines] for rank, lines in found.by_rank.items()}.keys() == {0, 1, 2, 3}


def test_what_the_libraries_say_is_nobodys_own_word(case):
    found = words(
        case(
            "[rank0]: hello",
            "[rank0]: x:1:2 [0] NCCL INFO Bootstrap : Using eth0",
            "[rank0]:[W318 07:41:00.1 socket.cpp:752] [c10d] The client socket has failed",
        )
    )
    assert [line.text for line in found.by_rank[0]] == ["hello"]


def test_a_number_in_which_one_rank_differs_is_found(case):
    found = words(case("[rank0]: images 5", "[rank1]: images 0", "[rank2]: images 5")).differences()
    assert [(one.rank, one.mine, one.theirs, one.noun) for one in found] == [(1, 0.0, 5.0, "images")]


def test_lines_that_are_alike_only_at_their_start_are_compared_so_far(case):
    found = words(
        case("[rank0]: took samples 8, parts 4", "[rank1]: took samples 8, parts 4", "[rank2]: took samples 5, parts 3 (+1)")
    ).differences()
    assert {one.rank for one in found} == {2}


def test_a_counter_is_no_difference(case):
    lines = [f"[rank{rank}]: samples {100 * step + 10}" for step in range(4) for rank in range(3)]
    assert not words(case(*lines[:-1])).differences()


def test_numbers_that_differ_everywhere_are_no_difference(case):
    assert not words(case("[rank0]: tokens 17", "[rank1]: tokens 21", "[rank2]: tokens 19")).differences()
