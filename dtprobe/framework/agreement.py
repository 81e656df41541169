"""Agreement of a fixed set of ranks over a c10d store: everyone says what it is about to do, one judges, all learn it.

The cost is four short store messages a rank and agreement, whatever the number of ranks. The last rank to arrive judges, so
no rank is special, and nothing but the store is needed: it works before, between and instead of collectives.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import torch.distributed as dist

from dtprobe.framework.errors import FrameworkError, MissingRanks, StoreLost


class KeyValueStore(Protocol):
    """What an agreement needs of a c10d store (torch's type stubs leave half of it out)."""

    def has_extended_api(self) -> bool: ...
    def clone(self) -> KeyValueStore: ...
    def set(self, key: str, value: str) -> None: ...
    def get(self, key: str) -> bytes: ...
    def add(self, key: str, amount: int) -> int: ...
    def append(self, key: str, value: str) -> None: ...
    def check(self, keys: list[str]) -> bool: ...
    def compare_set(self, key: str, expected: str, desired: str) -> bytes: ...
    def delete_key(self, key: str) -> bool: ...
    def wait(self, keys: list[str], timeout: timedelta) -> None: ...


Said = Mapping[str, Any]
"""What a rank says: plain JSON."""

Judge = Callable[[Mapping[int, list[Said]]], Said]
"""From what each rank said (a list: two processes may claim one rank) to the verdict that every rank receives.

A verdict with the key `wrong` says that ranks contradict each other, and how.
"""


_LINGER_S = 1.0

BOARD = "dtprobe.board"
"""Store prefix under which each rank writes where it was last seen, shared by all agreements of a job."""


class Agreement:
    """One rank's side of a sequence of agreements among `members` (global ranks) under one `prefix` of a store.

    All members make the same number of calls of `reach`; one thread at a time is let in. The store is used through a
    connection of its own where it can be cloned: a waiting TCPStore client blocks every other user of the same client.
    Raises FrameworkError when the store cannot append (`torch.distributed.FileStore` cannot), StoreLost when it is gone.
    """

    def __init__(self, store: Any, *, rank: int, members: tuple[int, ...], prefix: str, board: str = BOARD) -> None:
        if not store.has_extended_api():
            raise FrameworkError(
                f"{type(store).__name__} cannot append to a key", "use TCPStore or dtprobe.framework.stores.SafeFileStore"
            )
        self._rank = rank
        try:
            self._store: KeyValueStore | None = store.clone()
        except dist.DistError as error:
            raise self._lost(f"agreement {prefix}", error) from None
        self._members = members
        self._prefix = prefix
        self._board = board
        self._turn = threading.Lock()
        self._done = 0

    @property
    def done(self) -> int:
        """How many agreements this rank has taken part in."""
        return self._done

    def reach(self, said: Said, judge: Judge, timeout_s: float, *, what: str, early: Judge | None = None) -> Said:
        """Say `said`, wait until every member has spoken, and return the judge's verdict, the same on every rank.

        `early` judges what has been said so far each time a rank arrives; a verdict that is not empty counts at once. Without
        it nothing is decided before all have come.

        Raises `MissingRanks` on every rank, also on those that come later, once a rank has waited `timeout_s` seconds for
        others; `what` names the occasion in the message. Raises `StoreLost` when the store does not answer.
        """
        with self._turn:
            key = f"{self._prefix}/{self._done}"
            try:
                self._open.set(f"{self._board}/{self._rank}", what)
                answer = self._exchange(key, said, judge, early, timeout_s)
                if "wrong" in answer.get("verdict", {"wrong": ""}):
                    self._linger(key)
            except dist.DistError as error:
                raise self._lost(what, error) from None
            self._done += 1
        if "missing" in answer:
            raise MissingRanks(
                f"{what}: {named(answer['missing'])} of {len(self._members)} did not come within {answer['timeout_s']:.3g} s",
                "look at the named ranks first"
                + "".join(f"; rank {rank} was last seen at {where}" for rank, where in sorted(answer["seen"].items())),
                ranks=answer["missing"],
            )
        if "left" in answer:
            raise MissingRanks(f"{what}: rank {answer['left']} left: {answer['reason']}", ranks=(answer["left"],))
        return answer["verdict"]

    def close(self) -> None:
        """Let the connection go. No agreement can be reached afterwards."""
        self._store = None

    def leave(self, reason: str) -> None:
        """Tell the others that this rank will not come to the next agreement, so that they need not wait for it."""
        with self._turn:
            try:
                self._decide(f"{self._prefix}/{self._done}", {"left": self._rank, "reason": reason})
            except dist.DistError:
                return  # the store is gone, and with it all who could have read this

    @property
    def _open(self) -> KeyValueStore:
        if self._store is None:
            raise FrameworkError(f"the agreements under {self._prefix!r} were closed")
        return self._store

    def _exchange(self, key: str, said: Said, judge: Judge, early: Judge | None, timeout_s: float) -> dict[str, Any]:
        self._open.append(f"{key}/said", json.dumps([self._rank, said]) + "\n")
        arrived = self._open.add(f"{key}/arrived", 1)
        if early is not None and (verdict := early(self._heard(key))):
            return self._decide(key, {"verdict": verdict})
        if arrived == len(self._members):
            verdict = judge(self._heard(key))
            if self._done:  # whoever is here has left the previous one, so nobody reads its keys any more
                for part in ("said", "arrived", "verdict"):
                    self._open.delete_key(f"{self._prefix}/{self._done - 1}/{part}")
            return self._decide(key, {"verdict": verdict})
        try:
            self._open.wait([f"{key}/verdict"], timedelta(seconds=timeout_s))
        except dist.DistStoreError:
            heard = self._heard(key)
            # Whoever spoke last has to judge: where all have spoken and none judged, that one is gone.
            missing = [rank for rank in self._members if rank not in heard] or [list(heard)[-1]]
            return self._decide(key, {"missing": missing, "timeout_s": timeout_s, "seen": self._seen(missing)})
        return json.loads(self._open.get(f"{key}/verdict"))

    def _linger(self, key: str) -> None:
        """An error ends programs, and rank 0's program takes the store along: it stays until the others have read why."""
        with contextlib.suppress(
            dist.DistError
        ):  # this rank knows its answer: neither a wait too long nor a lost store matters
            if self._open.add(f"{key}/read", 1) >= self._open.add(f"{key}/arrived", 0):
                self._open.set(f"{key}/all-read", "")
            if self._rank == 0:
                self._open.wait([f"{key}/all-read"], timedelta(seconds=_LINGER_S))

    def _heard(self, key: str) -> dict[int, list[Said]]:
        heard: dict[int, list[Said]] = {}
        for line in self._open.get(f"{key}/said").splitlines():
            rank, said = json.loads(line)
            heard.setdefault(rank, []).append(said)
        return heard

    def _seen(self, ranks: Iterable[int]) -> dict[int, str]:
        """Where ranks were last seen, or that they never spoke."""
        return {
            rank: self._open.get(key).decode() if self._open.check([key]) else "no point of this job: it never spoke"
            for rank in ranks
            for key in [f"{self._board}/{rank}"]
        }

    def _decide(self, key: str, verdict: Said) -> dict[str, Any]:
        """The first verdict that reaches the store counts, for everyone."""
        return json.loads(self._open.compare_set(f"{key}/verdict", "", json.dumps(verdict)))

    def _lost(self, what: str, error: BaseException) -> StoreLost:
        return StoreLost(
            f"{what}: the store stopped answering rank {self._rank} ({str(error).partition(chr(10))[0][:200]})",
            "look at the process that hosts the store (rank 0, or the launcher): it ended or cannot be reached",
        )


def named(ranks: Iterable[int]) -> str:
    """`rank 3`, or `ranks 1, 3`."""
    found = sorted(ranks)
    return ("rank " if len(found) == 1 else "ranks ") + ", ".join(str(rank) for rank in found)


@dataclass(frozen=True)
class Difference:
    """How ranks differ: `ranks` deviate from the majority; with no majority all ranks are listed and `decided` is False."""

    ranks: tuple[int, ...]
    decided: bool
    fields: Mapping[str, Mapping[int, str]]
    """Name of each field that differs -> rank -> what that rank has."""


def difference(
    heard: Mapping[int, Said], fields: Iterable[str], right: Callable[[Said], bool] | None = None
) -> Difference | None:
    """None when all ranks say the same in `fields`; else who differs.

    Where two camps are of equal size, `right` may tell which kind is the expected one.
    """
    names = tuple(fields)
    key = {rank: json.dumps([said.get(name) for name in names]) for rank, said in heard.items()}
    counts = Counter(key.values()).most_common()
    if len(counts) <= 1:
        return None
    chosen = counts[0][0] if counts[0][1] > counts[1][1] else None
    if chosen is None and right is not None:
        expected = {key[rank] for rank, said in heard.items() if right(said)}
        chosen = expected.pop() if len(expected) == 1 else None
    return Difference(
        ranks=tuple(sorted(rank for rank in heard if chosen is None or key[rank] != chosen)),
        decided=chosen is not None,
        fields={
            name: {rank: str(said.get(name)) for rank, said in heard.items()}
            for name in names
            if len({json.dumps(said.get(name)) for said in heard.values()}) > 1
        },
    )
