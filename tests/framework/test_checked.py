"""Checked mode: every kind of difference is caught on every rank, before anything runs, and names who differs."""

from __future__ import annotations

import pytest

from dtprobe.framework.checked import described, predicted

CHECKED = """
from dtprobe.framework.checked import checked
from dtprobe.framework.groups import Groups
plain(60)
x = torch.ones(4)
odd = RANK == 1
"""


def body(lines: str, timeout_s: float = 30) -> str:
    indented = "\n".join("        " + line for line in lines.strip().splitlines())
    return (
        CHECKED
        + f"def work():\n    with checked(timeout_s={timeout_s}) as group:\n{indented}\nsay(**caught(work))\ndist.barrier()\n"
    )


DIFFERENCES = {
    "op": "dist.broadcast(x, 0) if odd else dist.all_reduce(x)",
    "shape": "dist.all_reduce(torch.ones(6 if odd else 4))",
    "dtype": "dist.all_reduce(torch.ones(4, dtype=torch.int32 if odd else torch.float32))",
    "reduce_op": "dist.all_reduce(x, dist.ReduceOp.PRODUCT if odd else dist.ReduceOp.SUM)",
    "root": "dist.broadcast(x, 1 if odd else 0)",
}


@pytest.mark.parametrize("field", DIFFERENCES)
def test_the_one_rank_of_three_that_differs_is_named_on_all(job, field):
    for rank in job(body(DIFFERENCES[field]), world_size=3):
        assert (rank.only["error"], rank.only["ranks"], rank.only["decided"]) == ("CollectiveMismatch", [1], True), rank.output
        assert field in rank.only["fields"]
        assert "rank 1: " in rank.only["text"] and "ranks 0, 2: " in rank.only["text"] and "program.py:" in rank.only["text"]


@pytest.mark.parametrize("field", DIFFERENCES)
def test_of_two_ranks_both_are_named_when_nothing_decides(job, field):
    for rank in job(body(DIFFERENCES[field])):
        assert (rank.only["error"], rank.only["ranks"], rank.only["decided"]) == ("CollectiveMismatch", [0, 1], False)
        assert field in rank.only["fields"]


def test_a_loops_own_past_decides_between_two_ranks(job):
    loop = """
for step in range(6):
    if not (odd and step == 4):
        dist.all_reduce(x)
    dist.broadcast(x, 0)
"""
    for rank in job(body(loop)):
        assert (rank.only["error"], rank.only["ranks"], rank.only["decided"]) == ("CollectiveMismatch", [1], True)
        assert "collective 8" in rank.only["text"]


def test_a_skipped_collective_in_a_loop_of_equal_ones_is_found_at_its_end(job):
    for rank in job(body("for step in range(6):\n    if not (odd and step == 2):\n        dist.all_reduce(x)")):
        assert (rank.only["error"], rank.only["ranks"]) == ("CollectiveMismatch", [1])
        assert "the end of checking" in rank.only["text"] and "collective 5" in rank.only["text"]


def test_a_rank_that_never_comes_is_named_on_every_rank_and_where_it_was_last_seen(job):
    ranks = job(body("dist.barrier()\nif odd:\n    time.sleep(2.5)\nelse:\n    dist.all_reduce(x)", timeout_s=1), world_size=3)
    for rank in ranks:
        assert (rank.only["error"], rank.only["ranks"]) == ("MissingRanks", [1])
        assert "rank 1 was last seen at collective 0 of group 'world', barrier" in rank.only["text"]


def test_a_rank_that_fails_is_named_at_once_not_at_the_deadline(job):
    ranks = job(body("dist.all_reduce(x)\nif odd:\n    raise ValueError('bad batch')\ndist.all_reduce(x)"), world_size=3)
    assert ranks[1].only["error"] == "ValueError"
    for rank in (ranks[0], ranks[2]):
        assert (rank.only["error"], rank.only["ranks"]) == ("MissingRanks", [1])
        assert "bad batch" in rank.only["text"] and rank.only["took_s"] < 20


def test_groups_used_in_another_order_are_caught(job):
    ranks = job(
        CHECKED
        + """
def work(names):
    with Groups(timeout_s=30) as groups:
        made = {name: groups.create(name) for name in ("a", "b")}
        with checked(made["a"], timeout_s=1.5) as a, checked(made["b"], timeout_s=1.5) as b:
            for name in names:
                dist.all_reduce(x, group={"a": a, "b": b}[name])
say(**caught(lambda: work("ba" if odd else "ab")))
dist.barrier()
""",
    )
    for rank in ranks:
        assert rank.only["error"] == "MissingRanks"
    told = ranks[0].only["text"] + ranks[1].only["text"]
    assert "group 'a'" in told and "group 'b'" in told and "last seen" in told


def test_correct_programs_pass_and_compute_the_same(job):
    ranks = job(
        CHECKED
        + """
from torch.nn.parallel import DistributedDataParallel
def everything():
    found = []
    y = torch.arange(4.0) + RANK
    dist.all_reduce(y); found.append(y.tolist())
    dist.broadcast(y, 1) if RANK else dist.broadcast(y, 1)
    parts = [torch.empty(4) for _ in range(SIZE)]
    dist.all_gather(parts, y + RANK); found.append([p.tolist() for p in parts])
    whole = torch.empty(4 * SIZE)
    dist.all_gather_into_tensor(whole, y); found.append(whole.tolist())
    piece = torch.empty(4)
    dist.reduce_scatter_tensor(piece, whole); found.append(piece.tolist())
    dist.reduce(y, 0); found.append(y.tolist())
    dist.gather(y, [torch.empty(4) for _ in range(SIZE)] if RANK == 0 else None, 0)
    dist.scatter(y, [torch.ones(4) * k for k in range(SIZE)] if RANK == 1 else None, 1); found.append(y.tolist())
    out = torch.empty(SIZE + RANK * SIZE)
    sizes = [1 + RANK] * SIZE
    dist.all_to_all_single(out, torch.ones(SIZE * (SIZE + 1) // 2), sizes, [1 + k for k in range(SIZE)]); found.append(out.tolist())
    objects = [None] * SIZE
    dist.all_gather_object(objects, "x" * (RANK + 1) * 50); found.append(objects)
    box = [RANK]
    dist.broadcast_object_list(box, 1); found.append(box)
    work = dist.all_reduce(y, async_op=True); work.wait(); found.append(y.tolist())
    if RANK == 0:
        dist.send(y, 1)
    elif RANK == 1:
        dist.recv(y, 0)
    dist.barrier()
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(4, 3))
    model(torch.ones(2, 4) * (RANK + 1)).sum().backward()
    found.append(model.module.weight.grad.tolist())
    return found
import warnings
warnings.simplefilter("ignore")
expected = everything()
with checked(timeout_s=30) as group:
    found = everything()
    compared = group.compared
after = everything()
say(equal=found == expected == after, compared=compared)
""",
        world_size=3,
    )
    for rank in ranks:
        assert rank.only["equal"] and rank.only["compared"] >= 15


@pytest.mark.parametrize(
    "call",
    [
        "dist.all_gather([torch.empty(5 if odd else 4) for _ in range(SIZE)], x)",
        "dist.gather(torch.ones(6 if odd else 4), [torch.empty(4)] * SIZE if RANK == 0 else None, 0)",
        "dist.scatter(torch.empty(6 if odd else 4), [torch.ones(4)] * SIZE if RANK == 0 else None, 0)",
        "dist.all_to_all_single(torch.empty(3), torch.ones(3), [1, 2] if odd else [2, 1], [2, 1])",
    ],
)
def test_what_one_sends_must_be_what_the_other_takes(job, call):
    for rank in job(body(call)):
        assert rank.only["error"] == "CollectiveMismatch", rank.output
        assert "elements to rank" in rank.only["text"]


def test_after_the_limit_collectives_pass_unchecked(job):
    ranks = job(
        CHECKED
        + """
with checked(timeout_s=20, limit=2) as group:
    for _ in range(5):
        dist.all_reduce(x)
say(compared=group.compared, value=x[0].item())
""",
    )
    assert [rank.only for rank in ranks] == [{"compared": 2, "value": 32.0}] * 2


def test_a_checked_block_leaves_no_connection_behind(job):
    ranks = job(
        CHECKED
        + """
with checked(timeout_s=20):
    dist.all_reduce(x)
dist.barrier()
before = held()
for _ in range(20):
    with checked(timeout_s=20):
        dist.all_reduce(x)
dist.barrier()
say(grown=[a - b for a, b in zip(held(), before)])
dist.barrier()
""",
    )
    for rank in ranks:
        assert rank.only["grown"][0] == 0 and rank.only["grown"][1] <= 1


@pytest.mark.parametrize(
    ("history", "expected"),
    [("", None), ("a", None), ("aaaa", "a"), ("ababa", "b"), ("abcabcab", "c"), ("aabaabaa", "b"), ("abac", None)],
)
def test_what_a_loop_calls_next_is_read_from_its_past(history, expected):
    assert predicted(list(history)) == expected


def test_a_fingerprint_reads_like_the_call():
    said = {"op": "all_reduce", "dtype": "float32", "shape": "[4]", "reduce_op": "SUM"}
    assert described(said) == "all_reduce(float32 [4], SUM)"
    assert described({"op": "barrier", "dtype": "", "shape": ""}) == "barrier"
