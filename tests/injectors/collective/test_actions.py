"""What each fault does to the rank that is meant, and to nobody else."""

from __future__ import annotations

import math

import pytest

from dtprobe import catalog
from dtprobe.errors import UsageError
from dtprobe.inject.counted import NAMES
from dtprobe.inject.spec import parse

pytestmark = pytest.mark.needs("gloo")
KNOWN = catalog.injectors()[0]


@pytest.mark.parametrize(
    "text",
    [
        "collective:skip,rank=1,op=all_reduce,nth=5",
        "collective:delay,rank=1,op=all_reduce,nth=3,seconds=1",
        "collective:corrupt,rank=0+1,op=broadcast,probability=0.1,element=3,where=input",
        "collective:raise,group=default,every=3,times=2,type=TimeoutError",
    ],
)
def test_the_grammar_of_the_design_is_understood(text):
    fault = parse(text, KNOWN, world_size=2)
    assert parse(str(fault), KNOWN) == fault


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("collective:skip,op=allreduce", "no collective is called 'allreduce'; did you mean all_reduce"),
        ("collective:skip,op=isend", "did you mean send"),
        ("collective:skip,rank=2,op=barrier", "rank 2 is outside world size 2"),
        ("collective:skipp", "did you mean skip"),
        ("collective:delay,op=barrier", "needs seconds"),
        ("collective:delay,second=1", "did you mean seconds"),
        ("collective:delay,seconds=-1", "not between 0 and 3600"),
        ("collective:reduce_op,op=broadcast", "broadcast cannot take reduce_op; it is for all_reduce"),
        ("collective:root,op=all_reduce", "cannot take root"),
        ("collective:drop_handle,op=all_reduce", "it is for send, recv"),
        ("collective:other_op,op=all_reduce,instead=all_reduce", "the same collective"),
        ("collective:group_order,op=barrier", "means nothing"),
        ("collective:size,elements=0", "elements=0"),
        ("collective:nan,op=barrier", "barrier cannot take nan"),
        ("collective:skip,node=1", "cannot aim by node"),
    ],
)
def test_what_cannot_be_is_refused_with_the_remedy(text, words):
    with pytest.raises(UsageError) as refused:
        parse(text, KNOWN, world_size=2)
    assert words in str(refused.value)


def test_a_refusal_is_one_line_of_the_command_line_and_nothing_is_started(job):
    assert "did you mean all_reduce" in job.refused("collective:skip,op=all-reduce,nth=5")


def test_changed_data_is_seen_by_the_rank_that_is_meant_only(job, facts):
    """Without a hang: faults of values, each on a group of its own, the second of three calls each."""
    code = """
def three(name, make=lambda: torch.tensor([1.0, 2.0, 3.0, 4.0]), call=dist.all_reduce):
    own, found = group(name), []
    for _ in range(3):
        tensor = make()
        call(tensor, group=own)
        found.append([str(one) for one in tensor.tolist()])
    facts[name] = found

for name in ("corrupt", "corrupt-input", "bit", "nan", "reduce", "product", "delay"):
    begun = time.monotonic()
    three(name)
    facts[name + "_s"] = time.monotonic() - begun
three("size", lambda: torch.full((4,), 1.0 + rank), lambda tensor, group: dist.broadcast(tensor, 0, group=group))
three("integer", lambda: torch.tensor([1, 2]))
"""
    texts = [
        "collective:corrupt,rank=1,group=corrupt,op=all_reduce,nth=2,element=1",
        "collective:corrupt,rank=1,group=corrupt-input,nth=2,element=1,where=input",
        "collective:corrupt,rank=1,group=bit,nth=2,bit=31",
        "collective:nan,rank=1,group=nan,nth=2,element=3",
        "collective:reduce_op,rank=0+1,group=reduce,nth=2",
        "collective:reduce_op,rank=0+1,group=product,nth=2,to=product",
        "collective:delay,rank=1,group=delay,nth=2,seconds=1.5",
        "collective:size,rank=0,group=size,nth=2",
        "collective:nan,rank=1,group=integer,nth=2",
    ]
    first, second = facts(texts, code)
    right = ["2.0", "4.0", "6.0", "8.0"]
    for name in ("corrupt", "corrupt-input", "bit", "nan", "reduce", "product", "delay"):
        assert [first[name][0], first[name][2], second[name][0], second[name][2]] == [right] * 4, name
    assert first["corrupt"][1] == right
    assert [second["corrupt"][1][place] for place in (0, 2, 3)] == ["2.0", "6.0", "8.0"]
    assert abs(math.log10(float(second["corrupt"][1][1]) / 4)) > 10
    assert first["corrupt-input"][1] == second["corrupt-input"][1] != right
    assert (first["bit"][1], second["bit"][1]) == (right, ["-2.0", "4.0", "6.0", "8.0"])
    assert (first["nan"][1], second["nan"][1]) == (right, ["2.0", "4.0", "6.0", "nan"])
    assert first["reduce"][1] == second["reduce"][1] == ["1.0", "2.0", "3.0", "4.0"]
    assert first["product"][1] == second["product"][1] == ["1.0", "4.0", "9.0", "16.0"]
    assert first["delay_s"] >= 1.5, "the other rank waits for the late one"
    assert second["size"] == [["1.0"] * 4, ["1.0", "1.0", "2.0", "2.0"], ["1.0"] * 4]
    assert first["integer"] == second["integer"] == [["2", "4"]] * 3

    for index, rank in ((0, 1), (1, 1), (2, 1), (3, 1), (6, 1), (7, 0)):
        assert job.where(index) == [(rank, 2)], texts[index]
    assert sorted(job.where(4)) == sorted(job.where(5)) == [(0, 2), (1, 2)]
    (late,) = job.fired(6)
    assert late.ended_ns - late.t_ns >= 1.5e9 and late.call == "all_reduce" and "(delay)" in late.detail
    assert job.where(8) == [] and "torch.int64 has no NaN" in job.problems(8)


def test_a_rank_out_of_step_is_waited_for(job, facts):
    """Faults that set ranks apart: the other rank's call times out, and what is not aimed at goes on."""
    code = """
import threading
hung = {name: group(name, 12) for name in ("skip", "other", "root", "drop", "raise", "double")}
fine = group("fine")

def work(name):
    own, found = hung[name], []
    tensor = torch.ones(2)
    if name == "drop":
        if rank == 1:
            handle = dist.isend(torch.full((1 << 20,), 7.0), 0, group=own)
            found.append(caught(handle.wait))
            (shared / "sent").touch()
        else:
            until((shared / "sent").exists)
            found.append(caught(lambda: dist.recv(torch.zeros(1 << 20), 1, group=own)))
    elif name == "root":
        found.append(caught(lambda: dist.broadcast(tensor, 0, group=own)))
        found.append(caught(lambda: dist.broadcast(tensor, 0, group=own)))
    else:
        for turn in range(3):
            found.append(caught(lambda: dist.all_reduce(tensor, group=own)))
            if found[-1]:
                break
        found.append(tensor.tolist())
    facts[name] = found

threads = [threading.Thread(target=work, args=(name,)) for name in hung]
[thread.start() for thread in threads]
tensor = torch.ones(1)
dist.all_reduce(tensor, group=fine)
facts["fine"] = tensor.item()
[thread.join() for thread in threads]
"""
    texts = [
        "collective:skip,rank=1,group=skip,op=all_reduce,nth=2",
        "collective:other_op,rank=1,group=other,op=all_reduce,nth=2,instead=barrier",
        "collective:root,rank=1,group=root,op=broadcast,nth=1",
        "collective:drop_handle,rank=1,group=drop",
        "collective:raise,rank=1,group=raise,nth=2",
        "collective:duplicate,rank=1,group=double,nth=3",
    ]
    first, second = facts(texts, code)
    assert first["fine"] == second["fine"] == 2.0
    assert first["skip"][0] == second["skip"][0] == ""
    assert second["skip"][1] == "", "the call that was skipped returns at once"
    assert "Timed out" in first["skip"][2] or "closed" in first["skip"][2] or second["skip"][2] != "", first["skip"]
    assert first["other"][0] == "" and any(first["other"][1:-1]), first["other"]
    assert any(first["root"]) or any(second["root"]), (first["root"], second["root"])
    assert second["drop"] == [""] and first["drop"][0] != ""
    assert second["raise"][:2] == ["", "DistBackendError: injected: " + texts[4]] and first["raise"][1] != ""
    assert first["double"][:3] == ["", "", ""] and first["double"][3] == [8.0, 8.0]
    for index in range(6):
        assert [rank for rank, _ in job.where(index)] == [1], texts[index]


def test_groups_in_another_order_swap_what_they_sum(job, facts):
    code = """
a, b = group("a"), group("b")
for name, own, value in (("a", a, 1.0 + rank), ("b", b, 100.0 * (1 + rank))):
    tensor = torch.tensor(value)
    work = dist.all_reduce(tensor, group=own, async_op=True)
    facts[name] = tensor, work
for name in "ab":
    tensor, work = facts[name]
    work.wait()
    facts[name] = tensor.item()
"""
    first, second = facts("collective:group_order,rank=1,nth=1", code)
    assert (first["a"], second["a"], first["b"], second["b"]) == (201.0, 102.0, 102.0, 201.0)
    assert job.where() == [(1, 1)]


def test_groups_of_other_members_are_not_exchanged_and_this_is_said(job, facts):
    first, second = facts(
        "collective:group_order,rank=1,nth=1",
        "a, b = group('a'), dist.new_group([1])\ntensor = torch.ones(1)\ndist.all_reduce(tensor, group=a)\nfacts['a'] = tensor.item()",
    )
    assert first["a"] == second["a"] == 2.0
    assert job.where() == [] and "groups 1 and 2 are of other ranks: [0, 1] and [1]" in job.problems()


CALLS = """
def every_call(own):
    ones = lambda *shape: torch.full(shape, 1.0 + rank)
    zeros = lambda many, *shape: [torch.zeros(*shape) for _ in range(many)]
    def p2p():
        tensor = torch.zeros(4)
        dist.send(ones(4), 1, group=own) if rank == 0 else dist.recv(tensor, 0, group=own)
        return tensor if rank == 1 else torch.ones(4)
    def into(call, out, *more):
        call(out, *more, group=own)
        return out
    root = lambda value: value if rank == 0 else None
    return {
        "all_reduce": lambda: into(dist.all_reduce, ones(4)),
        "all_gather": lambda: into(dist.all_gather, zeros(2, 4), ones(4)),
        "all_gather_into_tensor": lambda: into(dist.all_gather_into_tensor, torch.zeros(8), ones(4)),
        "reduce_scatter": lambda: into(dist.reduce_scatter, torch.zeros(4), [ones(4), 10 * ones(4)]),
        "reduce_scatter_tensor": lambda: into(dist.reduce_scatter_tensor, torch.zeros(4), ones(8)),
        "broadcast": lambda: into(dist.broadcast, ones(4), 0),
        "reduce": lambda: into(dist.reduce, ones(4), 0),
        "gather": lambda: (dist.gather(ones(4), root(box := zeros(2, 4)), 0, group=own), box)[1],
        "scatter": lambda: (dist.scatter(box := torch.zeros(4), root([ones(4), 5 * ones(4)]), 0, group=own), box)[1],
        "all_to_all": lambda: into(dist.all_to_all, zeros(2, 4), [ones(4), 10 * ones(4)]),
        "all_to_all_single": lambda: into(dist.all_to_all_single, torch.zeros(8), ones(8)),
        "barrier": lambda: dist.barrier(group=own),
        "monitored_barrier": lambda: dist.monitored_barrier(own),
        "send, recv": p2p,
        "all_reduce_coalesced": lambda: into(dist.all_reduce_coalesced, [ones(4), ones(2)]),
    }

def plain(value):
    return [plain(one) for one in value] if isinstance(value, (list, tuple)) else value.tolist() if value is not None else None

def results(own):
    found = {}
    for name, call in every_call(own).items():
        try:
            found[name] = plain(call())
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found

for name in ("right", *WANTED):
    facts[name] = results(group(name))
"""


def test_every_collective_can_be_acted_on(job, facts):
    """Both ranks do the same to every call, so nothing hangs, and what arrived is known exactly."""
    texts = {
        "delay": "collective:delay,group=delay,seconds=0.001",
        "twice": "collective:duplicate,group=twice",
        "skip": "collective:skip,group=skip",
        "half": "collective:size,group=half",
        "double": "collective:dtype,group=double,to=float64",
        "corrupt": "collective:corrupt,group=corrupt",
    }
    found = facts(list(texts.values()), f"WANTED = {tuple(texts)}\n" + CALLS)
    data = [name for name in found[0]["right"] if "barrier" not in name]
    for rank, here in enumerate(found):
        assert not any(isinstance(value, str) for value in here["right"].values()), here["right"]
        for name in ("delay", "twice", "double"):
            assert here[name] == here["right"], name
        for name in data:
            assert here["skip"][name] != here["right"][name] or (rank, name) in HARMLESS, name
            assert isinstance(here["half"][name], list), here["half"][name]
            assert here["half"][name] != here["right"][name] or (rank, name) in HARMLESS, name
        assert here["half"]["all_gather"] == [[1.0, 1.0, 0.0, 0.0], [2.0, 2.0, 0.0, 0.0]]
        assert here["half"]["all_reduce"] == [3.0, 3.0, 1.0 + rank, 1.0 + rank]
        for name in ("all_reduce", "all_gather", "broadcast", "scatter", "all_to_all_single"):
            assert here["corrupt"][name] != here["right"][name], name
    for index, name in enumerate(texts):
        calls = {one.call for one in job.fired(index)}
        wanted = set(data) - {"send, recv"} | {"send", "recv"} | ({"barrier", "monitored_barrier"} if index < 3 else set())
        assert wanted <= calls <= set(NAMES), (name, wanted - calls, job.problems(index))


HARMLESS = {(0, "broadcast"), (1, "reduce"), (1, "gather"), (0, "send, recv")}
"""Where a missing call leaves no mark in this rank's own tensors."""
