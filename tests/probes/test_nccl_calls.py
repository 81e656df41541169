"""Calls into NCCL that are not the same on all ranks of a communicator."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pandas as pd
import pytest

from dtprobe.probes.nccl_calls import Differing, differing
from dtprobe.readers.nccl_ring import SCHEMA

Call = Mapping[str, object]
SUM: Call = {"call": "ncclAllReduce", "count": 8, "dtype": "float32", "redop": "sum"}
ROOT: Call = {"call": "ncclBroadcast", "count": 8, "dtype": "float32", "root": 0}


def frame(calls: Sequence[Call], *, comm: str = "c0ffee0123456789", first: int = 1, begun_ns: int = 0) -> pd.DataFrame:
    rows = [
        {"t_ns": begun_ns + 10 * number, "kind": "collective", "comm": comm, "seq": number, **call}
        for number, call in enumerate(calls, start=first)
    ]
    return SCHEMA.frame({name: [row.get(name) for row in rows] for name in ("t_ns", "kind", *SCHEMA.columns)})


def found(*ranks: Sequence[Call]) -> Differing | None:
    return differing({rank: frame(calls) for rank, calls in enumerate(ranks)})


def test_equal_calls_differ_nowhere_however_far_each_rank_is():
    assert found([SUM, ROOT, SUM], [SUM, ROOT], [SUM]) is None
    assert differing({0: frame([SUM]), 1: SCHEMA.empty()}) is None and differing({}) is None


@pytest.mark.parametrize(
    "other",
    [{**ROOT, "root": 1}, {**ROOT, "count": 4}, {**ROOT, "dtype": "float16"}, {**SUM}],
    ids=["root", "count", "dtype", "call"],
)
def test_the_first_call_with_other_arguments_is_found_and_the_rank_that_departs_from_most(other):
    one = found([SUM, ROOT, SUM], [SUM, other, SUM], [SUM, ROOT])
    assert one is not None and (one.seq, one.odd) == (2, (1,))
    assert "rank 0, 2: ncclBroadcast 8 float32 root 0; rank 1: " in str(one)


def test_of_two_the_one_is_odd_that_departs_from_what_was_called_before():
    assert found([SUM, {**SUM, "redop": "max"}], [SUM, SUM]).odd == (0,)
    assert found([SUM, ROOT], [SUM, {**ROOT, "root": 1}]).odd == (), "neither was called before"
    assert found([ROOT, SUM, ROOT], [ROOT, SUM, SUM]).odd == (), "both were"


def test_a_ring_that_has_turned_is_compared_where_all_still_have_the_calls():
    rings = {0: frame([SUM, SUM, ROOT], first=5), 1: frame([ROOT, SUM, SUM, SUM], first=4)}
    assert differing(rings) is not None and differing(rings).seq == 7


def test_where_ranks_also_send_and_receive_numbers_do_not_tell_which_calls_belong_together():
    assert found([{"call": "ncclSend", "kind": "p2p", "count": 8}, SUM, ROOT], [SUM, ROOT]) is None


def test_of_several_communicators_the_earliest_difference_counts():
    other = {**SUM, "count": 1}
    data = {rank: frame([SUM, call], comm="d" * 16, begun_ns=500) for rank, call in enumerate([SUM, other])}
    tensor = {rank: frame([SUM, call], comm="e" * 16) for rank, call in enumerate([SUM, other])}
    one = differing({rank: pd.concat([data[rank], tensor[rank]], ignore_index=True) for rank in data})
    assert one is not None and one.comm == "e" * 16
