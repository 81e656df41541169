"""What the engine is handed: groups, operations on them, and calls."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from dtprobe.framework.errors import FrameworkError
from dtprobe.framework.transport.mpi.work import MpiWork

if TYPE_CHECKING:
    from mpi4py import MPI

_ASK_S = 2.0


@dataclass(eq=False)
class Channel:
    """What the engine knows of a group: its communicator, its members by global rank, and how far it is."""

    name: str
    shown: str
    members: tuple[int, ...]
    comm: Any = None
    box: Any = None
    """Receives on `comm`."""
    beside: Any = None
    """Receives on a second communicator of the same members, for the messages of sums by exchange."""
    issued: int = 0
    """How many collectives this rank has issued on it."""
    doing: str = "nothing yet"
    failure: FrameworkError | None = None


@dataclass(eq=False, slots=True)
class Operation:
    """An operation on its way: `start` gives MPI's requests, `finish` runs when all are complete."""

    what: str
    channel: Channel
    start: Callable[[], list[MPI.Request]]
    work: MpiWork
    deadline: float
    timeout_s: float
    number: int | None
    """Its place among the collectives of the channel; None for point-to-point."""
    needs: tuple[int, ...]
    """Global ranks without which it cannot complete."""
    finish: Callable[[], int | None]
    """Runs when all is complete; gives the rank a message came from, where that is the question."""
    then: Callable[[], list[MPI.Request]] | None = None
    """Gives the requests of a second round once those of the first are complete."""
    requests: list[Any] = field(default_factory=list)
    asked: bool = False

    def test(self, null: MPI.Request) -> bool:
        """Whether all requests are complete; raises MPI's error. A complete request becomes null."""
        return all([request.Test() for request in self.requests if request != null])

    @property
    def ask_at(self) -> float:
        return self.deadline - min(_ASK_S, self.timeout_s / 4)


@dataclass(eq=False, slots=True)
class Call:
    """Something to run in the engine's thread, outside any group's order."""

    run: Callable[[], Any]
    ended: threading.Event = field(default_factory=threading.Event)
    result: Any = None
    error: BaseException | None = None
