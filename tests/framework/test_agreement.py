"""Agreement over a store, where a rank goes in the middle of one."""

from __future__ import annotations

import gc
import json
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist

from dtprobe.framework.agreement import Agreement
from dtprobe.framework.errors import MissingRanks, StoreLost


def test_a_rank_that_spoke_last_and_did_not_judge_is_the_missing_one():
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ranks = [Agreement(store, rank=rank, members=(0, 1, 2), prefix="test") for rank in (0, 2)]

    def reach(agreement):
        with pytest.raises(MissingRanks) as caught:
            agreement.reach({}, lambda heard: {}, 1.5, what="a step")
        return caught.value

    with ThreadPoolExecutor() as pool:
        waiting = [pool.submit(reach, agreement) for agreement in ranks]
        other = store.clone()
        while not other.check(["test/0/arrived"]) or other.add("test/0/arrived", 0) < 2:
            time.sleep(0.01)
        other.append("test/0/said", json.dumps([1, {}]) + "\n")  # rank 1 speaks, and its connection is cut
        errors = [one.result() for one in waiting]

    assert [error.ranks for error in errors] == [(1,), (1,)]
    assert all("rank 1 of 3 did not come" in str(error) for error in errors)


def test_a_store_whose_host_has_gone_is_a_typed_error():
    host = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    late = dist.TCPStore("127.0.0.1", host.port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=1))
    del host
    gc.collect()
    with pytest.raises(StoreLost, match="agreement test: the store stopped answering rank 1"):
        Agreement(late, rank=1, members=(0, 1), prefix="test")
