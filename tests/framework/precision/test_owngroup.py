"""A group that one part has for itself: made together, by whoever needs which, and again after it was ended."""

from __future__ import annotations

OWN = """
from dtprobe.framework.precision.owngroup import OwnGroup
plain(60)
store = dist.distributed_c10d._get_default_store()
"""


def test_ranks_ask_for_different_groups_at_once_and_again_after_the_end(job):
    ranks = job(
        OWN
        + """
found = []
for _ in range(3):  # torch would give a group of the same ranks the name, and the addresses, of the one that was ended
    group = OwnGroup((0, 2) if RANK != 1 else (1,), label="test", timeout_s=30)
    found.append(group.maximum(torch.tensor([float(RANK)]), "a test").item())
    found.append(group.gathered(RANK * 10, "a test"))
    group.close()
    group.close()
say(found=found, closed=caught(lambda: group.maximum(torch.zeros(1), "a test"))["text"])
dist.barrier()
""",
        world_size=3,
    )
    for rank, own in zip(ranks, ([2.0, {"0": 0, "2": 20}], [1.0, {"1": 10}], [2.0, {"0": 0, "2": 20}]), strict=True):
        assert rank.only["found"] == own * 3 and "was closed" in rank.only["closed"]


def test_a_rank_that_makes_none_is_named(job):
    ranks = job(
        OWN
        + """
if RANK != 1:
    say(**caught(lambda: OwnGroup(None, label="test", timeout_s=1)))
    store.set(f"said by {RANK}", "")
store.wait(["said by 0", "said by 2"], seconds(60))
dist.barrier()
""",
        world_size=3,
    )
    for rank in (ranks[0], ranks[2]):
        assert (rank.only["error"], rank.only["ranks"]) == ("MissingRanks", [1])
        assert "rank 1 did not make its test within 1 s" in rank.only["text"]
