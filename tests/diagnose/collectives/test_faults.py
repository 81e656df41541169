"""Planted faults in jobs of many layouts: the mode and the rank are found, no innocent rank is named; healthy jobs are left alone."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest
from flight_jobs import (
    UNEVEN,
    Call,
    Job,
    Look,
    changed,
    ddp,
    edited,
    exchanged,
    frozen,
    fsdp,
    hsdp,
    mesh,
    moe,
    run,
    without,
    write,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dtprobe.diagnose import intake
from dtprobe.diagnose.analysts.collectives.findings import findings
from dtprobe.diagnose.analysts.collectives.recording import Recording, gather
from dtprobe.diagnose.case import Finding

ABSENT = {"collective-skipped", "rank-stopped", "gil-held"}
"""A rank that never comes looks the same for all of these."""
LAYOUTS: tuple[Callable[[int], Job], ...] = (
    lambda steps: ddp(3, steps),
    lambda steps: ddp(8, steps),
    lambda steps: fsdp(4, steps),
    lambda steps: moe(4, steps),
    lambda steps: hsdp(2, 3, steps),
    lambda steps: hsdp(4, 2, steps),
    lambda steps: mesh(2, 2, 2, steps),
    lambda steps: mesh(4, 1, 1, steps),
    lambda steps: mesh(3, 1, 2, steps),
    lambda steps: mesh(1, 2, 2, steps),
)
looks = st.builds(
    Look,
    version=st.sampled_from(["2.3", "2.4", "2.5", "2.7", "2.8", "2.9", "2.10"]),
    backend=st.sampled_from(["nccl", "nccl2", "xccl"]),
    timed=st.booleans(),
    frames=st.booleans(),
    history=st.sampled_from([0, 5000]),
    ring=st.sampled_from([2000, 60]),
    as_json=st.booleans(),
    prefix=st.sampled_from(["nccl_trace_rank_", "comm_lib_trace_rank_", "_dump_", "mine-"]),
)


class Planted(NamedTuple):
    job: Job
    look: Look
    run_ahead: bool
    rank: int
    place: int

    @property
    def call(self) -> Call:
        return self.job.programs[self.rank][self.place]


def recorded(job: Job, look: Look, *, run_ahead: bool = True, lenient: bool = False) -> Recording:
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder), job, run(job, run_ahead=run_ahead, lenient=lenient), look)
        with intake.taken([Path(folder)]) as taken:
            made = gather(taken.artifacts, [])
    assert made is not None
    return made


def answer(recording: Recording) -> Finding:
    return max(findings(recording), key=lambda one: one.likelihood)


def planted(
    draw: st.DataObject, suits: Callable[[Job, int, Sequence[Call], int], bool] = lambda job, rank, program, place: True
) -> Planted:
    """A job and a place in the second half of a rank's program at which a fault is to be planted."""
    job = draw.draw(st.sampled_from(LAYOUTS))(5)
    rank = draw.draw(st.integers(0, job.world - 1))
    program = job.programs[rank]
    places = [place for place in range(len(program) // 2, len(program)) if suits(job, rank, program, place)]
    if not places:
        job = ddp(4, 5) if suits(ddp(4, 5), 0, ddp(4, 5).programs[0], 12) else mesh(2, 2, 2, 5)
        rank = min(rank, job.world - 1)
        program = job.programs[rank]
        places = [place for place in range(len(program) // 2, len(program)) if suits(job, rank, program, place)]
    return Planted(job, draw.draw(looks), draw.draw(st.booleans()), rank, draw.draw(st.sampled_from(places)))


def in_company(job: Job, rank: int, program: Sequence[Call], place: int) -> bool:
    """A collective of three ranks or more: of two that differ, neither is the odd one."""
    return program[place].peer is None and len(program[place].group.ranks) > 2


def blames(finding: Finding, modes: set[str], rank: int) -> None:
    assert (finding.mode in modes, finding.first, finding.suspects) == (True, rank, (rank,)), finding


plant = settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@plant
@given(st.data())
def test_a_healthy_job_is_healthy(draw: st.DataObject) -> None:
    one = planted(draw)
    look = replace(one.look, skew_ms={one.rank: draw.draw(st.sampled_from([0.0, 4000.0]))})
    finding = answer(recorded(one.job, look, run_ahead=one.run_ahead))
    assert (finding.mode, finding.first, finding.suspects) == ("healthy", None, ())


@plant
@given(st.data())
def test_a_call_that_is_left_out(draw: st.DataObject) -> None:
    one = planted(draw, in_company)
    job = edited(one.job, one.rank, without(one.place))
    blames(answer(recorded(job, one.look, run_ahead=one.run_ahead)), {"collective-skipped"}, one.rank)


@plant
@given(st.data())
def test_a_rank_that_comes_no_further(draw: st.DataObject) -> None:
    one = planted(draw)
    job = edited(one.job, one.rank, frozen(one.place))
    blames(answer(recorded(job, one.look, run_ahead=one.run_ahead)), ABSENT, one.rank)


@plant
@given(st.data())
def test_a_rank_that_is_gone_is_lost_and_said_to_be_missing(draw: st.DataObject) -> None:
    one = planted(draw)
    job = edited(one.job, one.rank, frozen(one.place))
    recording = recorded(job, replace(one.look, missing=(one.rank,)), run_ahead=one.run_ahead)
    blames(answer(recording), {"rank-lost"}, one.rank)
    assert recording.missing == (f"no flight recorder dump of rank {one.rank}",)


@plant
@given(st.data())
def test_another_operation(draw: st.DataObject) -> None:
    one = planted(draw, in_company)
    op = "broadcast" if one.call.op == "reduce" else "reduce"
    finding = answer(recorded(edited(one.job, one.rank, changed(one.place, op=op)), one.look, run_ahead=one.run_ahead))
    blames(finding, {"collective-type-mismatch"}, one.rank)
    assert any(f"{op} seq " in quote.text for quote in finding.evidence)
    assert any(f"{one.call.op} seq " in quote.text for quote in finding.evidence)


@plant
@given(st.data())
def test_another_size(draw: st.DataObject) -> None:
    one = planted(
        draw, lambda job, rank, program, place: in_company(job, rank, program, place) and program[place].op not in UNEVEN
    )
    job = edited(one.job, one.rank, changed(one.place, elements=one.call.elements + 7))
    blames(answer(recorded(job, one.look, run_ahead=one.run_ahead)), {"collective-shape-mismatch"}, one.rank)
    silent = answer(recorded(job, one.look, run_ahead=one.run_ahead, lenient=True))
    blames(silent, {"collective-shape-mismatch"}, one.rank)
    assert "without an error" in silent.not_proven


@plant
@given(st.data())
def test_another_dtype(draw: st.DataObject) -> None:
    one = planted(draw, in_company)
    job = edited(one.job, one.rank, changed(one.place, dtype="Half"))
    blames(answer(recorded(job, one.look, run_ahead=one.run_ahead)), {"collective-dtype-mismatch"}, one.rank)


def beside(same_group: bool) -> Callable[[Job, int, Sequence[Call], int], bool]:
    def suits(job: Job, rank: int, program: Sequence[Call], place: int) -> bool:
        if not in_company(job, rank, program, place) or place + 1 == len(program):
            return False
        one, other = program[place : place + 2]
        if other.peer is not None or one.waits or other.waits or (one.group == other.group) != same_group:
            return False
        return not one.meets(other) and len(set(one.group.ranks) & set(other.group.ranks)) > 1

    return suits


@plant
@given(st.data())
def test_two_calls_exchanged_within_a_group(draw: st.DataObject) -> None:
    one = planted(draw, beside(same_group=True))
    job = edited(one.job, one.rank, exchanged(one.place))
    blames(answer(recorded(job, one.look, run_ahead=True)), {"collective-order-mismatch"}, one.rank)


def two_groups(world: int, steps: int, flipped: Sequence[int]) -> Job:
    job = Job(world)
    first, second = job.group("default_pg", range(world)), job.group("metrics", range(world))
    for step in range(steps):
        for rank in range(world):
            calls = [Call(first, "all_reduce", 8, line=1), Call(second, "broadcast", 4, line=2)]
            last = step == steps - 1 and rank in flipped
            job.programs.setdefault(rank, []).extend(calls[::-1] if last else calls)
            job.programs[rank].append(Call(first, "all_reduce", 1, waits=True, line=3))
    return job


@plant
@given(world=st.integers(3, 6), steps=st.integers(1, 5), look=looks, rank=st.integers(0, 2))
def test_two_groups_entered_in_opposite_orders(world: int, steps: int, look: Look, rank: int) -> None:
    recording = recorded(two_groups(world, steps, [rank]), look)
    finding = answer(recording)
    blames(finding, {"cross-communicator-deadlock"}, rank)
    assert {edge.awaits for edge in finding.waits if edge.rank == rank} == set(range(world)) - {rank} or len(finding.waits) > 1


def test_where_half_the_ranks_have_either_order_nobody_is_the_odd_one() -> None:
    finding = answer(recorded(two_groups(4, 1, [0, 1]), Look()))
    assert (finding.mode, finding.first, finding.suspects) == ("cross-communicator-deadlock", None, (0, 1, 2, 3))


@plant
@given(st.data())
def test_half_of_a_pair_that_is_left_out(draw: st.DataObject) -> None:
    one = planted(draw, lambda job, rank, program, place: program[place].peer is not None)
    job = edited(one.job, one.rank, without(one.place))
    blames(answer(recorded(job, one.look, run_ahead=one.run_ahead)), {"p2p-unpaired"}, one.rank)


@plant
@given(stages=st.integers(2, 5), look=looks, op=st.sampled_from(["send", "recv"]))
def test_both_ends_of_a_pair_do_the_same_half(stages: int, look: Look, op: str) -> None:
    job = mesh(stages, 1, 1, 4)
    group = job.mine("pp", 0)
    for rank, peer in ((0, 1), (1, 0)):
        job.programs[rank].append(Call(group, op, 1 << 20, "BFloat16", peer=peer, line=99))
    finding = answer(recorded(job, look))
    modes = {"send": "send-send-deadlock", "recv": "p2p-unpaired"}
    assert finding.mode == modes[op]
    assert set(finding.suspects) <= {0, 1} and finding.suspects  # it was rank 1 that had never sent first before
    assert any("0->1" in quote.text or "0<-1" in quote.text or "1->0" in quote.text for quote in finding.evidence)


@plant
@given(st.data())
def test_two_sizes_on_the_two_ends_of_a_pair(draw: st.DataObject) -> None:
    one = planted(draw, lambda job, rank, program, place: program[place].peer is not None)
    job = edited(one.job, one.rank, changed(one.place, elements=99))
    blames(answer(recorded(job, one.look, run_ahead=one.run_ahead)), {"collective-shape-mismatch"}, one.rank)


@plant
@given(st.data())
def test_a_call_that_all_are_in_and_none_leaves(draw: st.DataObject) -> None:
    one = planted(draw, in_company)
    group, job = one.call.group, one.job
    number = sum(call.group == group and call.peer is None for call in one.job.programs[one.rank][: one.place])
    for rank in group.ranks:
        places = [place for place, call in enumerate(job.programs[rank]) if call.group == group and call.peer is None]
        job = edited(job, rank, changed(places[number], never=True))
    finding = answer(recorded(job, one.look, run_ahead=one.run_ahead))
    everyone = len(group.ranks) == job.world
    assert (finding.mode, finding.first) == ("symmetric-hang", "all" if everyone else None)
    assert finding.suspects == (() if everyone else group.ranks)


def slowed(job: Job, rank: int, late_ms: Callable[[int], float]) -> Job:
    """Late by so much to the calls of each step."""

    def change(calls: list[Call]) -> list[Call]:
        step, found = 0, []
        for call in calls:
            found.append(replace(call, late_ms=late_ms(step)) if call.line in (20, 40, 50) else call)
            step += call.waits
        return found

    return edited(job, rank, change)


@plant
@given(world=st.sampled_from([3, 4, 8]), look=looks, rank=st.integers(0, 2), make=st.sampled_from([ddp, fsdp]))
def test_a_rank_that_is_late_again_and_again(world: int, look: Look, rank: int, make: Callable[[int, int], Job]) -> None:
    job = slowed(make(world, 14), rank, lambda step: 30.0)
    finding = answer(recorded(job, replace(look, ring=2000, skew_ms={1: 4000.0})))
    blames(finding, {"straggler"}, rank)


@plant
@given(layout=st.sampled_from(LAYOUTS), look=looks, seed=st.integers(0, 1000))
def test_jitter_is_nobodys_fault(layout: Callable[[int], Job], look: Look, seed: int) -> None:
    draw, job = random.Random(seed), layout(12)
    for rank in range(job.world):
        late = [draw.uniform(0, 20) for _ in range(12)]
        job = slowed(job, rank, late.__getitem__)
    assert answer(recorded(job, look)).mode == "healthy"


@pytest.mark.parametrize("timed", [False, True])
def test_a_dump_that_is_older_than_what_others_completed_with_its_help_blames_nobody(timed: bool) -> None:
    job = ddp(4, 8)
    records = run(job)
    records[3] = [replace(one, end_ns=None) if at > 18 else one for at, one in enumerate(records[3][:24])]
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder), job, records, Look(timed=timed))
        with intake.taken([Path(folder)]) as taken:
            recording = gather(taken.artifacts, [])
    assert recording is not None
    assert all(one.mode == "healthy" for one in findings(recording))


@plant
@given(st.data())
def test_several_ranks_that_leave_out_the_same_call(draw: st.DataObject) -> None:
    world = draw.draw(st.integers(5, 8))
    job, place = fsdp(world, 5), draw.draw(st.integers(16, 26))
    guilty = sorted(draw.draw(st.sets(st.integers(0, world - 1), min_size=2, max_size=2)))
    for rank in guilty:
        job = edited(job, rank, without(place))
    finding = answer(recorded(job, draw.draw(looks)))
    assert (finding.mode, sorted(finding.suspects)) == ("collective-skipped", guilty)


@plant
@given(st.data())
def test_evidence_that_is_lost_with_innocent_ranks_changes_nothing(draw: st.DataObject) -> None:
    job = ddp(8, 5)
    rank, innocent, cut = draw.draw(st.permutations(range(8)))[:3]
    job = edited(job, rank, changed(12, op="reduce"))
    recording = recorded(job, replace(draw.draw(looks), missing=(innocent,), cut=(cut,), as_json=False))
    blames(answer(recording), {"collective-type-mismatch"}, rank)
    told = " ".join(recording.missing)
    assert f"rank {innocent}" in told and f"rank {cut}" in told


def test_a_rank_whose_dump_is_cut_is_not_blamed_for_what_the_cut_took() -> None:
    job = edited(ddp(8, 5), 5, frozen(16))
    recording = recorded(job, Look(missing=(5,), cut=(2,)))
    blames(answer(recording), {"rank-lost"}, 5)


def test_members_that_differ_from_rank_to_rank() -> None:
    job = ddp(6, 4)
    group = job.group("sub", range(6))
    job.each(range(6), lambda _: Call(group, "all_reduce", 3))
    views = {(rank, group.name): (0, 1, 2) if rank < 3 else (2, 3, 4, 5) for rank in range(6)}
    finding = answer(recorded(job, Look(views=views)))
    assert (finding.mode, finding.first, finding.suspects) == ("new-group-misuse", None, ())


def test_a_member_that_never_made_the_group() -> None:
    job = ddp(4, 4)
    group = job.group("sub", range(4))
    job.each(range(3), lambda _: Call(group, "all_reduce", 3))
    finding = answer(recorded(job, Look(views={(3, group.name): ()})))
    blames(finding, {"new-group-misuse"}, 3)


def test_groups_of_one_name_without_common_members_are_different_groups() -> None:
    job = ddp(4, 4)
    for first in (0, 2):
        group = replace(job.group("half", (first, first + 1)), name="half")
        job.groups[-1] = group
        for step in range(6 + first):
            job.each(group.ranks, lambda _, step=step, first=first, group=group: Call(group, "all_reduce", 5 + step + first))
    assert answer(recorded(job, Look())).mode == "healthy"


@pytest.mark.parametrize("op", ["gather", "scatter"])
def test_two_ranks_that_act_as_root(op: str) -> None:
    job = ddp(4, 4)
    group = job.groups[0]
    whole = (8,) * 4
    for rank in range(4):
        root = rank in (1, 2)
        call = (
            Call(group, op, 8, outs=whole if root else ()) if op == "gather" else Call(group, op, 8, ins=whole if root else ())
        )
        job.programs[rank].append(replace(call, never=True))
    finding = answer(recorded(job, Look()))
    assert (finding.mode, finding.first, finding.suspects) == ("broadcast-root-mismatch", None, (1, 2))


@plant
@given(world=st.integers(3, 6), rank=st.integers(0, 2), steps=st.integers(2, 5))
def test_gloo_tells_no_states_and_no_members(world: int, rank: int, steps: int) -> None:
    job = edited(ddp(world, steps), rank, frozen(4 * steps - 3))
    finding = answer(recorded(job, Look(backend="gloo")))
    blames(finding, ABSENT, rank)
    assert answer(recorded(ddp(world, steps), Look(backend="gloo"))).mode == "healthy"


def test_dumps_of_active_calls_only() -> None:
    job = edited(ddp(6, 5), 4, frozen(14))
    blames(answer(recorded(job, Look(only_active=True))), ABSENT, 4)


def test_a_rank_that_calls_what_the_others_do_not() -> None:
    job = fsdp(5, 5)
    extra = Call(job.groups[0], "all_gather", 77, line=98)
    job = edited(job, 2, lambda calls: [*calls[:25], extra, *calls[25:]])
    blames(answer(recorded(job, Look())), {"rank-conditional-collective"}, 2)


def test_a_rank_with_fewer_batches_that_waits_at_the_end() -> None:
    job = ddp(4, 6)
    end = Call(job.groups[0], "all_reduce_barrier", 1, line=97, waits=True)
    job.each(range(4), lambda _: end)
    job = edited(job, 1, lambda calls: [*calls[:20], end])
    blames(answer(recorded(job, Look())), {"uneven-dataloader-desync"}, 1)
