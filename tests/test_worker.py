"""Workers that wait for each other without a network."""

from __future__ import annotations

import threading

from dtprobe.worker import RANK_FOLDER, together


def ranks(tmp_path, count):
    for rank in range(count):
        (tmp_path / f"rank{rank}").mkdir()
    return [{RANK_FOLDER: str(tmp_path / f"rank{rank}")} for rank in range(count)]


def test_nobody_goes_on_before_the_last_has_come(tmp_path):
    first, second, last = ranks(tmp_path, 3)
    found = {}

    def come(number, environ):
        found[number] = together(3, patience_s=60, environ=environ)

    threads = [threading.Thread(target=come, args=one) for one in ((0, first), (1, second))]
    for thread in threads:
        thread.start()
    while not all((tmp_path / f"rank{rank}" / "came-here").exists() for rank in (0, 1)):
        threads[0].join(0.01)
    assert not found

    come(2, last)
    for thread in threads:
        thread.join(60)
    assert found == {0: True, 1: True, 2: True}


def test_a_rank_that_never_comes_is_not_waited_for_longer_than_patience_allows(tmp_path):
    first, _ = ranks(tmp_path, 2)
    assert not together(2, patience_s=0.05, environ=first)


def test_each_mark_is_a_meeting_of_its_own(tmp_path):
    first, second = ranks(tmp_path, 2)
    together(2, patience_s=0, mark="start", environ=first)
    assert not together(2, patience_s=0, mark="end", environ=second)
    assert together(2, patience_s=0, mark="start", environ=second)


def test_outside_the_harness_there_is_nobody_to_wait_for():
    assert not together(2, patience_s=60, environ={})
