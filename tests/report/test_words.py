"""Numbers, intervals, endings and ranks as a reader wants them."""

from __future__ import annotations

import pandas as pd
import pytest

from dtprobe.report import words


@pytest.mark.parametrize(
    ("value", "unit", "shown"),
    [
        (None, "s", "-"),
        (pd.NA, "", "-"),
        (0, "s", "0 s"),
        (0.0123, "s", "12.3 ms"),
        (4.2e-5, "s", "42 us"),
        (5.0234, "s", "5.02 s"),
        (1842, "", "1,842"),
        (3, "threads", "3 threads"),
        (360 << 20, "B", "360 MiB"),
        (512, "bytes", "512 B"),
        (0, "B", "0 B"),
        (-2048, "B", "-2 KiB"),
        (12.5, "%", "12.5%"),
        (float("inf"), "s", "infinite"),
        (1e-7, "", "1e-07"),
    ],
)
def test_a_number_carries_its_unit_and_three_digits(value: object, unit: str, shown: str) -> None:
    assert words.number(value, unit) == shown


def test_an_interval_names_its_unit_once_and_no_mere_word() -> None:
    assert words.interval(5.01, 5.04, "s") == "5.01 to 5.04 s"
    assert words.interval(0.05, 5.04, "s") == "50 ms to 5.04 s"
    assert words.interval(3, 4, "threads") == "3 to 4"
    assert words.interval(3, 3, "s") == "3 s"
    assert words.interval(None, 3, "s") == ""


def test_a_clipped_text_shows_its_end_and_its_control_characters() -> None:
    assert words.clip("abcdef" * 100, 10) == "abcdefa..."
    assert words.clip("a\x1b[31mb\tc\nd\x00", 40) == "a\\x1b[31mb c\nd\\x00"


def test_ranks_are_written_as_people_write_them() -> None:
    assert words.ranks([3]) == "rank 3"
    assert words.ranks([2, 0, 1, 5, None, pd.NA]) == "ranks 0-2, 5"
    assert words.ranks([None]) == "the launcher"


def test_an_ending_says_signal_code_or_deadline() -> None:
    assert words.ending(0, None) == "exit 0"
    assert words.ending(None, 9) == "killed by SIGKILL"
    assert words.ending(None, 64) == "killed by signal 64"
    assert words.ending(None, 9, True) == "did not end, was ended at the deadline"
    assert words.ending(None, None) == "end unknown"


def test_a_long_list_counts_what_it_leaves_out() -> None:
    assert words.listed(["a"]) == "a"
    assert words.listed(["a", "b"]) == "a and b"
    assert words.listed("abcdef", 4) == "a, b, c and 3 more"
    assert words.listed([]) == ""
