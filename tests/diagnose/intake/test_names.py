"""What names say that launchers and recorders document."""

from __future__ import annotations

import pytest

from dtprobe.diagnose.intake.names import Named, named


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("run_1/attempt_0/3/stderr.log", Named(local_rank=3)),
        ("none_k3x/attempt_2/11/error.json", Named(local_rank=11)),
        ("nccl_trace_rank_3", Named(rank=3)),
        ("node1/_dump_12", Named(rank=12)),
        ("40218855_3_log.err", Named(rank=3)),
        ("40218855_7_3_log.out", Named(rank=3)),
        ("out/1/rank.3/stderr", Named(rank=3)),
        ("logs/rank3.log", Named(rank=3)),
        ("train.log", Named()),
        ("stack.py.0", Named()),
    ],
)
def test_a_name_says_its_rank_where_that_is_documented(name: str, said: Named) -> None:
    assert named(name) == said
