"""Where the ranks of a group meet to compare: a sequence of agreements over the job's store, the same on every rank.

The store and not a collective: a rank that does not come is named before the deadline instead of hanging the others, the
comparison adds nothing to the collectives' order or streams, and what goes over it is some hundred bytes a rank.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from dtprobe.errors import UsageError
from dtprobe.framework.agreement import Agreement, Judge, Said, difference
from dtprobe.framework.consistency.report import Incomparable, shown, spans
from dtprobe.framework.errors import RankError

_ASKED = ("call", "what", "step")
"""What ranks must ask for alike before anything is compared."""

Opening = Callable[[Mapping[int, Said]], Said]
"""Judges what each rank said, one each, once it is known that all asked for the same."""


class Meeting:
    """One rank's side of the comparisons of a group."""

    def __init__(self, agreement: Agreement, *, rank: int, members: tuple[int, ...], label: str) -> None:
        self.rank = rank
        self.members = members
        self._agreement = agreement
        self._label = label
        self._opened = 0
        self._where = ""

    @property
    def where(self) -> str:
        """Names the comparison in progress in messages."""
        return self._where

    def open(self, said: Said, judge: Opening, timeout_s: float) -> Said:
        """Begin a comparison; the verdict of `judge`. Raises Incomparable on all ranks when they asked for different ones.

        A rank that cannot compare says so under the key `failed`, and all raise Incomparable with its reason.
        """
        self._opened += 1
        step = "" if said.get("step") is None else f" at step {said['step']}"
        self._where = f"{said['call']} {self._opened} of group {self._label!r}{step}"
        verdict = self.reach(said, lambda heard: _opened(heard, judge), timeout_s)
        if "refused" in verdict:
            raise Incomparable(f"{self._where}: {verdict['refused']}", ranks=verdict["ranks"])
        return verdict

    @contextlib.contextmanager
    def telling(self, said: Said, timeout_s: float) -> Iterator[None]:
        """Around what a rank does before `open(said, ...)`: where it raises, the others learn why instead of waiting.

        What cannot be compared (UsageError) becomes Incomparable here as well; any other exception is raised as it is.
        """
        try:
            yield
        except Exception as error:
            refused = isinstance(error, UsageError)
            why = str(error) if refused else f"{type(error).__name__}: {error}"
            try:
                self.open({**said, "failed": why}, lambda heard: {}, timeout_s)
            except RankError as told:
                if refused:
                    raise told from error
            raise

    def reach(self, said: Said, judge: Judge, timeout_s: float) -> Said:
        """Another exchange of the comparison in progress."""
        return self._agreement.reach(said, judge, timeout_s, what=self._where)


def _opened(heard: Mapping[int, list[Said]], judge: Opening) -> Said:
    twice = [rank for rank, said in heard.items() if len(said) > 1]
    if twice:
        return _refused(f"two processes claim to be {spans(twice)}", twice)
    said = {rank: each[0] for rank, each in heard.items()}
    failed = {rank: one["failed"] for rank, one in sorted(said.items()) if "failed" in one}
    if failed:
        return _refused(
            "; ".join(f"{spans([rank])}: {shown(why, 300)}" for rank, why in list(failed.items())[:8]), list(failed)
        )
    asked = difference(said, _ASKED)
    if asked is not None:
        kinds: dict[str, list[int]] = {}
        for rank, one in sorted(said.items()):
            kinds.setdefault(", ".join(f"{key} {one[key]}" for key in asked.fields), []).append(rank)
        told = "; ".join(f"{spans(ranks)}: {kind}" for kind, ranks in list(kinds.items())[:8])
        return _refused(f"ranks ask for different comparisons: {told}", list(asked.ranks))
    return judge(said)


def _refused(why: str, ranks: list[int]) -> Said:
    return {"wrong": True, "refused": why, "ranks": ranks}


_meetings: weakref.WeakKeyDictionary[dist.ProcessGroup, Meeting] = weakref.WeakKeyDictionary()
"""One connection to the store a group, for as long as the group lives: torch 2.13's TCPStore stops answering a process that clones
it some 25 times in a row."""

_made: Counter[str] = Counter()
"""Meetings of this process by name of the group, so that a group of the same name made later has keys of its own."""


def meeting_of(group: dist.ProcessGroup | None) -> Meeting:
    """The meeting of `group` (None: the default group). Raises UsageError without one, and on a rank that is not a member."""
    if not dist.is_initialized():
        raise UsageError("no default process group", "call dtprobe.framework.bootstrap.start or init_process_group first")
    asked = c10d._get_default_group() if group is None else group
    if not isinstance(asked, dist.ProcessGroup) or asked not in c10d._world.pg_group_ranks:
        raise UsageError(
            f"rank {dist.get_rank()} is not a member of the group, or the group has ended",
            "compare on the ranks of the group, and only on them",
        )
    if asked not in _meetings:
        name = asked.group_name
        _made[name] += 1
        rank, members = dist.get_rank(), tuple(dist.get_process_group_ranks(asked))
        agreement = Agreement(
            c10d._get_default_store(), rank=rank, members=members, prefix=f"dtprobe.consistency/{name}/{_made[name]}"
        )
        described = asked.group_desc if asked.group_desc not in ("", "undefined", "default_pg") else name
        label = "world" if asked is c10d._get_default_group() else described
        _meetings[asked] = Meeting(agreement, rank=rank, members=members, label=label)
    return _meetings[asked]
