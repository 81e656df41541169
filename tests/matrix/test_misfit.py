"""Another world size or launcher than a scenario's own: where that makes sense, and the reason where it does not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dtprobe import catalog
from dtprobe.runner import misfit


@pytest.fixture(scope="module")
def known():
    return {one.id: one for one in catalog.load().scenarios}


@pytest.mark.parametrize(
    ("name", "changes", "why"),
    [
        ("gloo-thread-leak", {"world_size": 4, "launch": "torchrun"}, ""),
        ("rank-killed", {"world_size": 8}, ""),
        ("rank-killed", {"world_size": 1}, "rank 1 is outside world size 1"),
        ("nccl-init-failure", {"launch": "local"}, "is about launcher torchrun"),
        ("nccl-init-failure", {"launch": "torchrun"}, ""),
        ("node-lost", {"launch": "torchrun"}, "is about launcher hosts:3"),
        ("filestore-race:stale", {"world_size": 4}, "is one process that starts others itself"),
        ("filestore-race:stale", {"launch": "torchrun"}, "is one process that starts others itself"),
    ],
)
def test_a_scenario_says_what_would_make_another_of_it(known, name, changes, why):
    found = misfit(known[name], replace(known[name], **changes))
    assert bool(found) == bool(why)
    assert all(why in one.reason and one.remedy for one in found.values())
