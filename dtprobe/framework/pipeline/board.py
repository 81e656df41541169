"""The board of an exchange: what its ranks tell one another through the store, beside the messages themselves.

Signs of life, what a rank waits for, what a channel carries, and the verdict once the exchange has failed. The first verdict
to reach the board counts for everyone.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

import psutil

from dtprobe.framework.agreement import KeyValueStore
from dtprobe.framework.pipeline.blame import Item, Report
from dtprobe.framework.pipeline.messages import Channel

How = Literal["timeout", "lost", "mismatch"]


@dataclass(frozen=True)
class Verdict:
    """Why an exchange failed: the stage and group rank at the root (None where unknown), and the evidence in words."""

    how: How
    stage: int | None
    rank: int | None
    text: str


class Board:
    """One thread's view of the board. A call on a store whose host is stopped does not return, except for `promise`."""

    def __init__(self, store: KeyValueStore, prefix: str, rank: int) -> None:
        self._store = store
        self._prefix = prefix
        self._rank = rank

    def beat(self) -> None:
        """Give a sign of life."""
        self._store.add(f"{self._prefix}/beat/{self._rank}", 1)

    def beats(self, ranks: Iterable[int]) -> dict[int, int]:
        """How many signs of life each rank has given."""
        return {rank: self._store.add(f"{self._prefix}/beat/{rank}", 0) for rank in ranks}

    def say(self, report: Report | None) -> None:
        """Say what this rank waits for; None when it has stopped waiting."""
        self._store.set(f"{self._prefix}/waits/{self._rank}", "" if report is None else _written(report))

    def reports(self, ranks: Iterable[int]) -> dict[int, Report]:
        """What the ranks that wait have said."""
        found = {}
        for rank in ranks:
            key = f"{self._prefix}/waits/{rank}"
            if self._store.check([key]) and (text := self._store.get(key).decode()):
                found[rank] = _read(text)
        return found

    def promise(self, channel: Channel, occasion: str, contract: str) -> None:
        """As a sender: what a message is (dtype and shape): the channel's first for all, or that of an `occasion`."""
        self._store.set(self._contract(channel, occasion), contract)

    def promised(self, channel: Channel, occasion: str, *, forget: bool) -> str | None:
        """As a receiver: what the sender promised, None while it has said nothing. `forget` takes it off the board."""
        key = self._contract(channel, occasion)
        if not self._store.check([key]):
            return None
        text = self._store.get(key).decode()
        if forget:
            self._store.delete_key(key)
        return text

    def verdict(self) -> Verdict | None:
        """Why the exchange failed, None while it has not."""
        key = f"{self._prefix}/verdict"
        return Verdict(**json.loads(self._store.get(key))) if self._store.check([key]) else None

    def decide(self, verdict: Verdict) -> Verdict:
        """Put a verdict on the board; the one that counts, which may be another rank's."""
        return Verdict(**json.loads(self._store.compare_set(f"{self._prefix}/verdict", "", json.dumps(asdict(verdict)))))

    def acknowledge(self) -> None:
        """Having read the verdict, say so."""
        self._store.set(f"{self._prefix}/read/{self._rank}", "")

    def acknowledged(self, ranks: Iterable[int]) -> bool:
        """Whether all of these ranks have read the verdict."""
        return self._store.check([f"{self._prefix}/read/{rank}" for rank in ranks])

    def _contract(self, channel: Channel, occasion: str) -> str:
        return f"{self._prefix}/contract/{channel.kind}/{channel.source}/{channel.destination}/{channel.slot}/{occasion}"


def mismatch(item: Item, sent: str, expected: str, placement: Mapping[int, int]) -> Verdict:
    """The verdict on a message of which one end has another dtype or shape; it names the sender."""
    channel = item.message.channel
    text = f"{item.message} does not fit: stage {channel.source} sends {sent}, stage {channel.destination} expects {expected}"
    return Verdict("mismatch", channel.source, placement[channel.source], text)


def serves(store: Any) -> bool:
    """Whether this process hosts the TCPStore behind `store`: then a rank that is stopped takes the board along."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    port = getattr(store, "port", None)
    return any(
        each.status == psutil.CONN_LISTEN and each.laddr.port == port for each in psutil.Process().net_connections("tcp")
    )


def _written(report: Report) -> str:
    return json.dumps(
        {
            "waits": [item.plain() for item in report.waits],
            "pending": [item.plain() for item in report.pending],
            "posted": [[*_fields(channel), count] for channel, count in report.posted.items()],
            "received": [[*_fields(channel), count] for channel, count in report.received.items()],
        }
    )


def _read(text: str) -> Report:
    said = json.loads(text)
    return Report(
        waits=tuple(Item.read(each) for each in said["waits"]),
        pending=tuple(Item.read(each) for each in said["pending"]),
        posted={Channel(*fields): count for *fields, count in said["posted"]},
        received={Channel(*fields): count for *fields, count in said["received"]},
    )


def _fields(channel: Channel) -> tuple[str, int, int, int]:
    return channel.kind, channel.source, channel.destination, channel.slot
