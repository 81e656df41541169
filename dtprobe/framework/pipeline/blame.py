"""Which stage is at the root of a standstill, from what every rank says it waits for.

A rank that waits has said so on the board. Following who waits for whom ends at a rank that does not wait (it computes, or it passed
over the message), at one that does not answer (it is stopped), or in a circle. In a circle some rank has passed over a message
that another waits for; what tells is which rank had gone on to later messages, or had all it needed for that one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dtprobe.framework.pipeline.messages import KINDS, Channel, Direction, Message


@dataclass(frozen=True)
class Item:
    """A message that a rank has posted and that has not completed. `number` counts the messages of its channel at this end."""

    direction: Direction
    message: Message
    number: int
    contract: str

    @property
    def peer(self) -> int:
        """The stage at the other end."""
        channel = self.message.channel
        return channel.destination if self.direction == "send" else channel.source

    @property
    def stage(self) -> int:
        """The stage at this end."""
        channel = self.message.channel
        return channel.source if self.direction == "send" else channel.destination

    def __str__(self) -> str:
        verb = "take" if self.direction == "send" else "send"
        return f"to {verb} {self.message.channel.kind} of micro-batch {self.message.microbatch}"

    def plain(self) -> list[Any]:
        """As JSON."""
        channel = self.message.channel
        return [
            self.direction,
            self.message.microbatch,
            channel.kind,
            channel.source,
            channel.destination,
            channel.slot,
            self.number,
            self.contract,
        ]

    @classmethod
    def read(cls, plain: Sequence[Any]) -> Item:
        """From what `plain` gave."""
        direction, microbatch, kind, source, destination, slot, number, agreed = plain
        return cls(direction, Message(microbatch, Channel(kind, source, destination, slot)), number, agreed)


@dataclass(frozen=True)
class Report:
    """What a rank that waits says: what for, what else it has posted, how many messages of each channel it posted and received."""

    waits: tuple[Item, ...]
    pending: tuple[Item, ...] = ()
    posted: Mapping[Channel, int] = field(default_factory=dict)
    received: Mapping[Channel, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Root:
    """The stage at the root: `how` it came to that, and whether the evidence is `certain` or only the likelier reading."""

    stage: int
    rank: int
    how: str
    certain: bool = True


def root(me: int, reports: Mapping[int, Report], silent: frozenset[int], rank_of: Mapping[int, int]) -> Root:
    """Who is at the root of rank `me`'s wait.

    `reports` are those of the ranks that wait (mine is among them), `silent` are ranks that have stopped giving signs of life,
    `rank_of` is the placement of stages. Ranks are ranks in the exchange's group.
    """
    path = [me]
    items: list[Item] = []
    while True:
        item = _first(reports[path[-1]].waits, reports, rank_of)
        items.append(item)
        rank = rank_of[item.peer]
        if rank in silent:
            return Root(item.peer, rank, f"{_chain(items)}, which gives no sign of life: stopped, or its host is")
        if rank not in reports:
            did = "took" if item.direction == "send" else "sent"
            return Root(
                item.peer,
                rank,
                f"{_chain(items)}, which is alive and waits for nobody: it computes still, or never {did} it",
            )
        if rank in path:
            start = path.index(rank)
            return _circle(items[start:], reports, rank_of)
        path.append(rank)


def _first(waits: Sequence[Item], reports: Mapping[int, Report], rank_of: Mapping[int, int]) -> Item:
    """Of several awaited messages, the first whose other end has not posted it: the others are on their way."""
    for item in waits:
        there = reports.get(rank_of[item.peer])
        if there is None or not any(other.message == item.message for other in there.pending):
            return item
    return waits[0]


def _circle(items: Sequence[Item], reports: Mapping[int, Report], rank_of: Mapping[int, int]) -> Root:
    """Ranks wait for one another in a circle: `items` are what each awaits of the next."""

    def found(item: Item, why: str, *, certain: bool = True) -> Root:
        waiting = "; ".join(f"{each.message} is awaited" for each in items)
        return Root(item.peer, rank_of[item.peer], f"stages wait for one another ({waiting}), and {why}", certain)

    # a stage cannot go on without a message it needs, but well without one that it should have sent
    for item in sorted(items, key=lambda each: each.direction != "receive"):
        there = reports[rank_of[item.peer]]
        went_on = there.posted.get(item.message.channel, 0) > item.number
        if went_on and all(other.message != item.message for other in there.pending):
            return found(item, f"stage {item.peer} went on to later messages of {item.message.channel} without this one")
    had = {item: _had_input(item, reports[rank_of[item.peer]], len(rank_of)) for item in items}
    owed = [item for item in items if had[item]]
    if len(owed) == 1:
        return found(owed[0], f"stage {owed[0].peer} had received what {owed[0].message} is made of and went on without it")
    # the first stage's input and the last one's loss are their own: nothing shows whether they had them. A channel's messages
    # are numbered through, so number less micro-batch grows with the step: an earlier step counts first, then the way of a micro-batch
    open_ = owed or [item for item in items if had[item] is None] or items
    first = min(open_, key=lambda item: (item.number - item.message.microbatch, _depth(item.message.channel, len(rank_of))))
    return found(first, f"of these, {first.message} comes first", certain=False)


def _had_input(item: Item, there: Report, stages: int) -> bool | None:
    """Whether the sender of an awaited message had its input, which comes from the stage before it on the way; None: not known."""
    channel = item.message.channel
    if item.direction == "send" or channel.kind not in KINDS:
        return False
    before = channel.source - (1 if channel.kind == "forward" else -1)
    if not 0 <= before < stages:
        return None
    return there.received.get(Channel(channel.kind, before, channel.source), 0) > item.number


def _depth(channel: Channel, stages: int) -> int:
    """How many stages a micro-batch has passed before it is sent on `channel`."""
    return channel.source if channel.kind == "forward" else 2 * stages - channel.source


def _chain(items: Sequence[Item]) -> str:
    """`stage 0 waits for stage 1 to send forward of micro-batch 2, stage 1 waits for stage 2 to ...`."""
    return ", ".join(f"stage {item.stage} waits for stage {item.peer} {item}" for item in items)
