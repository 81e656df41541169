"""The check among real ranks: what differs is found to the bit and names who holds what; what is equal never alarms."""

from __future__ import annotations

import numpy as np
import pytest

from dtprobe.errors import UsageError
from dtprobe.framework.consistency import Every, check

USED = """
from dtprobe.framework.consistency import *
plain(60)
torch.manual_seed(0)

def told(state, **options):
    '''What require_consistent did: the error's facts and the first differences as the report has them.'''
    try:
        report = require_consistent(state, timeout_s=options.pop("timeout_s", 30), **options)
    except Inconsistent as error:
        report = error.report
        return {"error": "Inconsistent", "ranks": list(error.ranks), "decided": error.decided, "text": str(error), "more": report.more,
                "found": [[one.name, one.field, one.index, one.at and list(one.at),
                           [[list(held.ranks), held.text, held.bits] for held in one.held]] for one in report.differences]}
    except Exception as error:
        return {"error": type(error).__name__, "ranks": list(getattr(error, "ranks", ())), "text": str(error)}
    return {"error": None, "text": str(report), "alone": list(report.alone)}
"""


@pytest.mark.parametrize("every", ["one place a rank", pytest.param("all places on all ranks", marks=pytest.mark.nightly)])
def test_one_flipped_bit_among_ten_million_is_found_exactly_where_norm_and_loss_see_nothing(job, every):
    ranks = job(
        USED
        + f"whole = {every == 'all places on all ranks'}"
        + """
x = torch.randn(1000, 10_000)
flat = x.view(-1).view(torch.int32)
norm, loss = torch.linalg.vector_norm(x), x.square().mean()
said = [told(x)]
for bad in range(SIZE):
    places = 0, 9_999_999, 1_234_567
    for index in places if whole else places[bad:bad + 1]:
        if RANK == bad:
            flat[index] ^= 1
        said.append([bad, index, flat[index].item(), told({"w": x}), norm.equal(torch.linalg.vector_norm(x)), loss.equal(x.square().mean())])
        if RANK == bad:
            flat[index] ^= 1
say(said=said)
dist.barrier()
""",
        world_size=3,
    )
    healthy, *faults = zip(*[rank.only["said"] for rank in ranks], strict=True)
    assert [one["error"] for one in healthy] == [None] * 3
    assert len(faults) == (3 if every == "one place a rank" else 9)
    for fault in faults:
        bad, index = fault[0][:2]
        bits = {rank: f"{each[2] & 0xFFFFFFFF:08x}" for rank, each in enumerate(fault)}
        for _, _, _, told, norm_is_blind, loss_is_blind in fault:
            assert norm_is_blind and loss_is_blind
            assert (told["error"], told["ranks"], told["decided"]) == ("Inconsistent", [bad], True)
            [(name, field, found, at, held)] = told["found"]
            assert (name, field, found, at) == ("w", "values", index, [index // 10_000, index % 10_000])
            good = [rank for rank in range(3) if rank != bad]
            assert [(ranks, bits) for ranks, _, bits in held] == [(good, bits[good[0]]), ([bad], bits[bad])]
            assert [float(text) for _, text, _ in held] == [
                np.array([int(held[k][2], 16)], np.uint32).view(np.float32)[0].item() for k in (0, 1)
            ]
            assert "1 of 611 blocks" in told["text"]


CASES = {
    # name: (state of a rank, options, what is found first: (name, field), who deviates or None where nothing decides)
    "dtype": ("torch.ones(3, dtype=torch.int32 if odd else torch.float32)", "", ("value", "dtypes"), [1]),
    "shape": ("torch.ones(3 + odd)", "", ("value", "shapes"), [1]),
    "shape, all three": ("torch.ones(3 + RANK)", "", ("value", "shapes"), None),
    "a name": ("{'x': 1, 'z' if odd else 'y': 2}", "", ("y", "names"), [1]),
    "an entry too many": ("{'x': 1} | ({'y': 2} if odd else {})", "", ("y", "names"), [1]),
    "order": ("{'x': 1, 'y': 2} if odd else {'y': 2, 'x': 1}", "", ("y", "order"), [1]),
    "strides": ("torch.ones(4, 5) if odd else torch.ones(5, 4).t()", "", ("value", "strides"), [1]),
    "requires_grad": ("torch.ones(2, requires_grad=odd)", "", ("value", "requires_grad"), [1]),
    "the sign of zero": ("torch.tensor([0.0, -0.0 if odd else 0.0])", "", ("value", "values"), [1]),
    "a NaN's payload": (
        "torch.tensor([0x7FC00000 + odd], dtype=torch.int32).view(torch.float32)",
        "",
        ("value", "values"),
        [1],
    ),
    "no gradient here": ("{'grad': None if odd else torch.ones(2)}", "", ("grad", "dtypes"), [1]),
    "a number": ("{'lr': 0.2 if odd else 0.1}", "", ("lr", "values"), [1]),
    "a number's type": ("{'lr': 1 if odd else 1.0}", "", ("lr", "dtypes"), [1]),
    "random numbers to come": ("(torch.rand(1 + odd), rng_state())[1]", "", ("cpu", "values"), [1]),
    "only shapes asked": ("torch.ones(3 + odd)", "what=('shapes',)", ("value", "shapes"), [1]),
    "a buffer": ("bent(torch.nn.BatchNorm1d(4), 'running_var')", "", ("running_var", "values"), [1]),
}

AGREE = {
    "the same": "torch.arange(5)",
    "nothing": "{}",
    "no elements": "torch.empty(3, 0)",
    "strides of dims of one element": "torch.ones(4, 1) if odd else torch.ones(1, 4).t()",
    "values not asked": "(torch.rand(3) * RANK, 'shapes')",
    "order not asked": "({'x': 1, 'y': 2} if odd else {'y': 2, 'x': 1}, 'values')",
    "a view of another layout": "(torch.ones(4, 5) if odd else torch.ones(5, 4).t(), 'values')",
    "a conjugate view": "(torch.tensor([1 + 2j]) if odd else torch.tensor([1 - 2j]).conj(), 'values')",
    "an aligned and an unaligned part": "torch.arange(odd, 9 + odd, dtype=torch.uint8)[1 - odd:9 - odd][:8] if odd else torch.arange(9, dtype=torch.uint8)[1:]",
}


def test_each_kind_of_difference_is_found_and_names_the_rank(job):
    cases = {name: (f"lambda: {state}", options) for name, (state, options, _, _) in CASES.items()}
    ranks = job(
        USED
        + """
odd = RANK == 1
def bent(module, name):
    if odd:
        getattr(module, name)[3] += 1
    return module
"""
        + "cases = {"
        + ", ".join(f"{name!r}: ({state}, dict({options}))" for name, (state, options) in cases.items())
        + "}\n"
        + "say(**{name: told(state(), **options) for name, (state, options) in cases.items()})\ndist.barrier()\n",
        world_size=3,
    )
    assert ranks[0].only == ranks[1].only == ranks[2].only
    for name, (_, _, first, who) in CASES.items():
        told = ranks[0].only[name]
        assert told["error"] == "Inconsistent", (name, told)
        assert tuple(told["found"][0][:2]) == first, (name, told)
        assert (told["ranks"], told["decided"]) == ((who, True) if who else ([0, 1, 2], False)), (name, told)
        assert who is None or "rank 1" in told["text"]


def test_what_is_equal_in_all_that_was_asked_never_alarms(job):
    lines = [
        f"{name!r}: told(({state})[0], what=[({state})[1]])"
        if state.endswith(("'values')", "'shapes')"))
        else f"{name!r}: told({state})"
        for name, state in AGREE.items()
    ]
    ranks = job(USED + "odd = int(RANK == 1)\nsay(**{" + ", ".join(lines) + "})\ndist.barrier()\n", world_size=3)
    for rank in ranks:
        assert {name: told["error"] for name, told in rank.only.items()} == dict.fromkeys(AGREE), rank.output


def test_of_two_ranks_both_are_listed_and_nothing_is_decided(job):
    for rank in job(
        USED
        + "group = dist.new_group()\ndist.destroy_process_group(group)\nsay(**told(torch.tensor([1.0, 2.0 + RANK])), ended=caught(lambda: check(1, group=group)))\ndist.barrier()\n"
    ):
        assert (rank.only["ranks"], rank.only["decided"]) == ([0, 1], False)
        assert rank.only["found"][0][4] == [[[0], "2.0", "40000000"], [[1], "3.0", "40400000"]]
        assert "undecided" in rank.only["text"]
        assert rank.only["ended"]["error"] == "UsageError"


def test_what_cannot_be_compared_is_refused_on_every_rank_naming_the_one_that_has_it(job):
    states = {
        "meta": "torch.empty(2, device='meta')",
        "a function": "print",
    }
    lines = ", ".join(f"{name!r}: told({state} if RANK == 1 else torch.ones(2))" for name, state in states.items())
    other = "other=told(1, step=RANK // 2), kind=caught(lambda: require_distinct(1) if RANK == 1 else check(1))"
    broken = """
class Broken(dict):
    def items(self):
        raise OSError("the disk is gone")
say(broken=told(Broken() if RANK == 1 else {}), after=told(torch.ones(2)))
dist.barrier()
"""
    ranks = job(USED + f"say(**{{{lines}}}, {other})\n" + broken, world_size=3)
    for rank in ranks:
        refused, broken = rank.said
        for name in states:
            assert (refused[name]["error"], refused[name]["ranks"]) == ("Incomparable", [1]), (name, refused[name])
        assert (refused["other"]["error"], refused["other"]["ranks"]) == ("Incomparable", [2])
        assert "ranks 0-1: step 0; rank 2: step 1" in refused["other"]["text"]
        assert (refused["kind"]["error"], refused["kind"]["ranks"]) == ("Incomparable", [1])
        assert broken["broken"]["error"] == ("OSError" if rank.rank == 1 else "Incomparable")
        assert "the disk is gone" in broken["broken"]["text"]
        assert broken["after"]["error"] is None


def test_a_rank_that_never_comes_is_named_on_the_others_and_on_itself_and_the_next_check_works(job):
    ranks = job(
        USED
        + """
told(1)
if RANK == 1:
    time.sleep(2)
say(**told(torch.ones(3), timeout_s=0.7))
say(**told(torch.ones(3)))
if RANK == 2:
    os._exit(0)
say(**told(torch.ones(3), timeout_s=0.7))
""",
        world_size=3,
    )
    for rank in ranks:
        assert (rank.said[0]["error"], rank.said[0]["ranks"]) == ("MissingRanks", [1])
        assert rank.said[1]["error"] is None
    for rank in ranks[:2]:
        assert (rank.said[2]["error"], rank.said[2]["ranks"]) == ("MissingRanks", [2])


def test_a_check_of_some_ranks_leaves_the_others_alone_and_names_global_ranks(job):
    ranks = job(
        USED
        + """
group = dist.new_group([0, 2, 3])
if RANK == 1:
    say(error=caught(lambda: check(1, group=group)))
else:
    before = None
    for _ in range(40):
        check(torch.ones(2), group=group)
        before = before or held()
    say(grown=[a - b for a, b in zip(held(), before)], **told(torch.ones(2) * (RANK == 2), group=group))
dist.barrier()
""",
        world_size=4,
    )
    assert ranks[1].only["error"]["error"] == "UsageError"
    for rank in (ranks[0], ranks[2], ranks[3]):
        assert (rank.only["error"], rank.only["ranks"], rank.only["grown"]) == ("Inconsistent", [2], [0, 0])


def test_a_dtensors_part_is_compared_among_the_ranks_that_hold_it_and_its_place_is_global(job):
    ranks = job(
        USED
        + """
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
parts = [Replicate(), Shard(0)]
one = distribute_tensor(torch.arange(21.0).view(7, 3), mesh, parts)
healthy = told({"one": one})
if RANK == 3:
    one.to_local()[2, 1] += 1
bad = told({"plain": torch.ones(2), "one": one})
alone = told(distribute_tensor(torch.rand(4, 4), mesh, [Shard(0), Shard(1)]))
partial = told(DTensor.from_local(torch.ones(2), mesh, [Replicate(), Partial()]))
placed = told(distribute_tensor(torch.ones(4, 4), mesh, [Replicate(), Shard(RANK % 2)], src_data_rank=None))
odd = DTensor.from_local(torch.ones(2 + (RANK == 3), 3), mesh, parts, run_check=False, shape=(4, 3), stride=(3, 1))
say(healthy=healthy, bad=bad, alone=alone, partial=partial, placed=placed, odd=told(odd))
dist.barrier()
""",
        world_size=4,
    )
    for rank in ranks:
        said = rank.only
        assert said["healthy"] == {"error": None, "text": said["healthy"]["text"], "alone": []}
        assert (said["bad"]["ranks"], said["bad"]["decided"]) == ([1, 3], False)
        # rank 3 holds rows 4 to 6 of 7
        assert said["bad"]["found"] == [
            ["one", "values", 7, [6, 1], [[[1], "19.0", "41980000"], [[3], "20.0", "41a00000"]]],
        ]
        assert said["alone"]["error"] is None and said["alone"]["alone"] == ["value"]
        assert (said["partial"]["error"], said["partial"]["ranks"]) == ("Incomparable", [0, 1, 2, 3])
        assert said["odd"]["found"][0][:2] == ["value", "shapes"] and said["odd"]["ranks"] == [1, 3]
        assert said["placed"]["found"][0][:2] == ["value", "placements"]


def test_batches_that_two_ranks_share_are_found_and_different_ones_pass(job):
    ranks = job(
        USED
        + """
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler
data = TensorDataset(torch.rand(24, 3), torch.arange(24))
def first(rank, **options):
    return next(iter(DataLoader(data, batch_size=4, sampler=DistributedSampler(data, SIZE, rank, **options))))
def of(batch, **options):
    return caught(lambda: require_distinct(batch, timeout_s=30, **options))
say(
    good=of(first(RANK)),
    wrong_rank=of(first(min(RANK, 1))),
    empty=of(torch.empty(0, 3)),
    overlap=of(torch.arange(4) + 2 * RANK, by_sample=True),
    unseen=of(torch.arange(4) + 2 * RANK),
    apart=of((torch.arange(4) + 4 * RANK, torch.zeros(4)), by_sample=True),
    lengths=of((torch.arange(4), torch.zeros(3)), by_sample=True),
)
dist.barrier()
""",
        world_size=3,
    )
    for rank in ranks:
        said = rank.only
        assert [said[name]["error"] for name in ("good", "empty", "unseen", "apart")] == [None] * 4
        assert (said["wrong_rank"]["error"], said["wrong_rank"]["ranks"]) == ("NotDistinct", [1, 2])
        assert (said["overlap"]["error"], said["overlap"]["ranks"]) == ("NotDistinct", [0, 1, 2])
        assert "ranks 0-1 share 2 samples: 2 of rank 0, 0 of rank 1 first" in said["overlap"]["text"]
        assert said["lengths"]["error"] == "Incomparable"


def test_a_training_that_drifts_is_stopped_at_the_next_check_of_its_period(job):
    ranks = job(
        USED
        + """
model = torch.nn.Linear(8, 2)
torch.manual_seed(RANK)
guard = Every(3, timeout_s=30)
checked = []
def train():
    for step in range(9):
        model(torch.randn(4, 8)).square().mean().backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        if RANK == 1 and step == 4:
            model.bias.grad[1] *= 1 + 2**-20
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.1 * parameter.grad
        model.zero_grad()
        if guard(step, {"model": model}):
            checked.append(step)
say(**caught(train), checked=checked)
dist.barrier()
""",
        world_size=3,
    )
    for rank in ranks:
        assert (rank.only["error"], rank.only["ranks"], rank.only["checked"]) == ("Inconsistent", [1], [0, 3])
        assert "at step 6" in rank.only["text"] and "'model.bias'" in rank.only["text"]


@pytest.mark.nightly
def test_a_thousand_healthy_steps_of_ddp_raise_no_alarm(job):
    ranks = job(
        USED
        + """
from torch.nn.parallel import DistributedDataParallel
layers = torch.nn.Linear(8, 16), torch.nn.LayerNorm(16), torch.nn.Dropout(0.1), torch.nn.ReLU(), torch.nn.Linear(16, 2)
model = torch.nn.Sequential(*layers)
ddp = DistributedDataParallel(model)
optimizer = torch.optim.AdamW(ddp.parameters())
torch.manual_seed(RANK)
guard = Every(1)
checked = 0
for step in range(1000):
    optimizer.zero_grad()
    batch = torch.randn(4, 8)
    require_distinct(batch, step=step)
    ddp(batch).square().mean().backward()
    optimizer.step()
    checked += guard(step, {"model": model, "optimizer": optimizer}) is not None
say(checked=checked)
dist.barrier()
""",
        timeout_s=280,
    )
    for rank in ranks:
        assert rank.only == {"checked": 1000}


def test_a_choice_that_does_not_exist_is_refused():
    with pytest.raises(UsageError, match="colours"):
        check(1, what=("colours",))
    with pytest.raises(UsageError, match="limit=0"):
        check(1, limit=0)
    with pytest.raises(UsageError, match="no default process group"):
        check(1)
    with pytest.raises(UsageError, match="every 0 steps"):
        Every(0)
