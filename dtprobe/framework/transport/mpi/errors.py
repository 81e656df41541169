"""What the MPI transport raises."""

from __future__ import annotations

from collections.abc import Iterable

from dtprobe.framework.errors import FrameworkError, MissingRanks, RankError


class MpiUnavailable(FrameworkError):
    """MPI cannot be used in this process: not installed, not started in time, already finalised, or forked away from."""


class ThreadLevelTooLow(FrameworkError):
    """Whoever initialised MPI did not ask for threads; the transport calls MPI from a thread of its own."""


class RankDisagreement(RankError):
    """torch and MPI number this process, or count the world, differently."""


class Unsupported(FrameworkError):
    """A tensor or reduce operation that this transport refuses; nothing was sent."""


class CollectiveTimeout(MissingRanks):
    """An operation did not complete within its timeout; `ranks` are the global ranks known not to have begun it."""

    def __init__(self, message: str, remedy: str = "", *, ranks: Iterable[int] = (), operation: str = "") -> None:
        super().__init__(message, remedy, ranks=ranks)
        self.operation = operation


class PeerLost(RankError):
    """A rank that an operation needs has died, has left the job, or gave the group up after a failure of its own."""


class MpiFailed(FrameworkError):
    """The MPI library reported an error; its class and text are in the message."""
