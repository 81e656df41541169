"""The stage at the root of a standstill is found from what the ranks say: every message skipped, in schedules run on paper."""

from __future__ import annotations

from collections import Counter

import pytest

from dtprobe.framework.pipeline.blame import Item, Report, root
from dtprobe.framework.pipeline.messages import Channel, Message

Op = tuple[int, str, Message]
"""The step, the direction, and the message."""


def forward(stage: int, microbatch: int) -> Message:
    return Message(microbatch, Channel("forward", stage, stage + 1))


def backward(stage: int, microbatch: int) -> Message:
    return Message(microbatch, Channel("backward", stage, stage - 1))


def batches(name: str, stage: int, stages: int, microbatches: int, steps: int) -> list[list[Op]]:
    """What a stage posts and waits for, batch after batch, in the schedules of torch's pipelining."""

    def taken(step: int, kind: str, number: int) -> list[Op]:
        source = stage - 1 if kind == "F" else stage + 1
        make = forward if kind == "F" else backward
        return [(step, "receive", make(source, number))] if 0 <= source < stages else []

    def given(step: int, kind: str, number: int) -> list[Op]:
        target = stage + 1 if kind == "F" else stage - 1
        make = forward if kind == "F" else backward
        return [(step, "send", make(stage, number))] if 0 <= target < stages else []

    warmup = microbatches if name == "gpipe" else min(microbatches, stages - stage)
    order = [("F", number) for number in range(warmup)]
    for number in range(microbatches):
        order.append(("B", number))
        if warmup + number < microbatches:
            order.append(("F", warmup + number))
    found: list[list[Op]] = []
    for step in range(steps):
        sends: list[Op] = []
        for kind, number in order:
            found.append(sends + taken(step, kind, number))
            sends = given(step, kind, number)
        found.append(sends)
    return [batch for batch in found if batch]


def standstill(programs: dict[int, list[list[Op]]]) -> dict[int, Report]:
    """Run the programs as far as they come: the reports of the ranks that wait."""
    at = dict.fromkeys(programs, 0)
    done: set[tuple[int, Op]] = set()
    moved = True
    while moved:
        moved = False
        posted = {
            (rank, op[1], op[2]): op
            for rank, program in programs.items()
            if at[rank] < len(program)
            for op in program[at[rank]]
            if (rank, op) not in done
        }
        for (rank, direction, message), op in posted.items():
            peer = message.channel.destination
            if direction == "send" and (other := posted.get((peer, "receive", message))):
                done |= {(rank, op), (peer, other)}
                moved = True
        for rank, program in programs.items():
            while at[rank] < len(program) and all((rank, op) in done for op in program[at[rank]]):
                at[rank] += 1
                moved = True
    return {
        rank: reported(rank, program[: at[rank] + 1], done) for rank, program in programs.items() if at[rank] < len(program)
    }


def reported(rank: int, posted: list[list[Op]], done: set[tuple[int, Op]]) -> Report:
    number: Counter[Channel] = Counter()
    received: Counter[Channel] = Counter()
    items = {}
    for op in [op for batch in posted for op in batch]:
        items[op] = Item(op[1], op[2], number[op[2].channel], "float32 [4]")
        number[op[2].channel] += 1
        received[op[2].channel] += op[1] == "receive" and (rank, op) in done
    waits = tuple(items[op] for op in posted[-1] if (rank, op) not in done)
    return Report(waits, waits, number, received)


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@pytest.mark.parametrize("stages", [2, 3, 4, 5])
def test_whatever_message_a_stage_skips_every_waiting_rank_names_that_stage(name, stages):
    place = {stage: stage for stage in range(stages)}
    skipped = 0
    for microbatches, steps in ((1, 1), (1, 2), (2, 1), (3, 2), (5, 1)):
        whole = {stage: batches(name, stage, stages, microbatches, steps) for stage in range(stages)}
        assert standstill(whole) == {}
        for culprit in range(stages):
            for omitted in [op for batch in whole[culprit] for op in batch if op[1] == "send"]:
                left = [[op for op in batch if op != omitted] for batch in whole[culprit]]
                reports = standstill({**whole, culprit: [batch for batch in left if batch]})
                assert reports
                for rank in reports:
                    assert root(rank, reports, frozenset(), place).stage == culprit, (omitted, rank)
                    skipped += 1
    assert skipped > 10


def item(direction: str, message: Message) -> Item:
    return Item(direction, message, 0, "float32 [4]")


def test_a_silent_rank_is_the_root_whatever_it_said_last():
    reports = {
        0: Report((item("receive", backward(1, 0)),)),
        1: Report((item("receive", backward(2, 0)),)),
        2: Report((item("receive", backward(3, 0)),)),
    }
    found = root(0, reports, frozenset({2}), {stage: stage for stage in range(4)})
    assert (found.stage, found.rank, found.certain) == (2, 2, True)
    assert "no sign of life" in found.how and "stage 0 waits for stage 1" in found.how


def test_a_rank_that_waits_for_nobody_is_the_root():
    reports = {0: Report((item("receive", backward(1, 0)),)), 1: Report((item("receive", backward(2, 0)),))}
    found = root(0, reports, frozenset(), {stage: stage for stage in range(4)})
    assert found.stage == 2 and "it computes still, or never sent it" in found.how


def test_of_several_awaited_messages_the_one_that_the_other_end_has_not_posted_counts():
    on_its_way, missing = item("receive", backward(1, 0)), item("receive", backward(3, 0))
    reports = {0: Report((on_its_way, missing)), 1: Report((item("receive", backward(2, 0)),), (item("send", backward(1, 0)),))}
    assert root(0, reports, frozenset(), {stage: stage for stage in range(4)}).stage == 3
