"""What the framework raises: each error carries the ranks it blames, the values in conflict and the remedy."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Self

from dtprobe.errors import DtprobeError


class FrameworkError(DtprobeError):
    """Base of everything that `dtprobe.framework` raises on purpose."""

    def detached(self) -> Self:
        """This error without the frames it passed through, nor those of what it was raised from.

        A frame holds its locals: a store or a group among them would keep its threads and sockets for as long as someone
        keeps the error.
        """
        self.__cause__ = self.__context__ = None
        return self.with_traceback(None)


class RankError(FrameworkError):
    """Something is wrong with particular ranks. `ranks` are global ranks in ascending order, possibly none."""

    def __init__(self, message: str, remedy: str = "", *, ranks: Iterable[int] = ()) -> None:
        super().__init__(message, remedy)
        self.ranks = tuple(sorted(set(ranks)))


class MissingRanks(RankError):
    """Ranks did not come before the deadline; `ranks` names them. Every rank that did come raises it."""


class StoreLost(RankError):
    """The store stopped answering: its host process ended or the network to it is gone."""


class GroupMismatch(RankError):
    """Ranks asked for different groups at the same point: another name, order, membership, backend or timeout."""


class GroupFailed(RankError):
    """The back end could not make a group on some ranks (`ranks`); no rank has it."""


class GroupEnded(FrameworkError):
    """A collective, or a wait, on a group that was ended."""


class CollectiveMismatch(RankError):
    """Ranks called different collectives at the same point of a group; raised on every rank before anything was sent.

    `ranks` are those that differ from the majority (or from what the group called after the same history before).
    Where neither decides, all ranks of the group are listed and `decided` is False. `differences` maps the name of
    each field that differs (`op`, `shape`, `dtype`, `reduce_op`, `root`, `group`) to its value by rank.
    """

    def __init__(
        self,
        message: str,
        remedy: str = "",
        *,
        ranks: Iterable[int] = (),
        decided: bool = True,
        differences: Mapping[str, Mapping[int, str]] | None = None,
    ) -> None:
        super().__init__(message, remedy, ranks=ranks)
        self.decided = decided
        self.differences = dict(differences or {})
