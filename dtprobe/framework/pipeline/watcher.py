"""The thread that watches an exchange while its main thread waits inside the back end, where Python cannot run."""

from __future__ import annotations

import contextlib
import threading
import time
from typing import TYPE_CHECKING

import torch.distributed as dist

from dtprobe.framework.pipeline.blame import Report, root
from dtprobe.framework.pipeline.board import Board, Verdict

if TYPE_CHECKING:
    from dtprobe.framework.pipeline.exchange import Exchange

_TICK_S = 0.25
_HURRY_S = 0.001
"""How soon it looks again while a receiver waits to hear what its sender sends (once a channel, or each message with dynamic
shapes); the pause grows with the wait."""
_SILENT_LOOKS = 4
_LINGER_S = 1.5
_JOIN_S = 0.5


class Watcher:
    """Gives signs of life, tells the board what this rank waits for, settles receives, and finds the root at the deadline.

    `host` is the group rank whose process hosts the store; when the board is lost, or stops answering, that rank is to blame.
    """

    def __init__(self, exchange: Exchange, board: Board, *, size: int, host: int | None) -> None:
        self._exchange = exchange
        self._board = board
        self._ranks = [rank for rank in range(size) if rank != exchange.rank]
        self._host = host
        self._tick_s = min(_TICK_S, exchange.timeout_s / 8)
        self._hurried = False
        self._ended = False
        self._lost: str | None = None
        self._said: Report | None = None
        self._beats: dict[int, tuple[int, int]] = {}
        self._looked = float("-inf")
        self._thread = threading.Thread(target=self._run, name="dtprobe-exchange", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End the thread. One that is stuck in a store whose host is stopped ends when the store does."""
        with self._exchange.changed:
            self._ended = True
            self._exchange.changed.notify_all()
        self._thread.join(_JOIN_S + (_LINGER_S if self._host == self._exchange.rank else 0))

    def hurry(self) -> None:
        """Look at once, and often until nothing is unsettled; call it with `changed` held."""
        self._hurried = True
        self._exchange.changed.notify_all()

    def without_board(self, verdict: Verdict) -> Verdict:
        """What to believe when the board has not answered: its host is at the root, if it is another rank of the exchange."""
        if self._host is None or self._host in (self._exchange.rank, verdict.rank):
            return verdict
        return self._lost_board(f"{verdict.text}, and the store does not answer either", how=verdict.how)

    def _run(self) -> None:
        exchange = self._exchange
        while True:
            with exchange.changed:
                if not self._hurried and not self._ended and exchange.failure is None:
                    exchange.changed.wait(self._pause())
                if self._ended or exchange.failure is not None:
                    break
                self._hurried = False
            if self._lost is not None:
                self._do_without()
                continue
            try:
                self._look(exchange.clock())
            except dist.DistError as error:
                self._lost = str(error).partition("\n")[0][:200]
        if exchange.failure is not None and self._lost is None:
            with contextlib.suppress(dist.DistError):  # gone with its host; everyone who was going to read it has
                self._linger()

    def _linger(self) -> None:
        """Errors end programs, and one of them takes the store along: it stays a moment for the others to read the verdict."""
        exchange = self._exchange
        assert exchange.failure is not None
        self._board.acknowledge()
        if self._host != exchange.rank:
            return
        # the stage at the root may be stopped or dead
        readers = [rank for rank in self._ranks if rank != exchange.failure.rank]
        deadline = exchange.clock() + _LINGER_S
        while readers and not self._board.acknowledged(readers) and exchange.clock() < deadline:
            time.sleep(_TICK_S / 10)

    def _do_without(self) -> None:
        """The store is gone. That alone harms nobody whose messages arrive: its host may have finished its work."""
        exchange, wait = self._exchange, self._exchange.waiting
        if exchange.proposal is not None:
            exchange.fail(self.without_board(exchange.proposal))
        elif wait is not None and (exchange.unsettled() or exchange.clock() >= wait.deadline):
            exchange.fail(self._lost_board(f"the store stopped answering ({self._lost})", how="lost"))

    def _pause(self) -> float:
        wait, now = self._exchange.waiting, self._exchange.clock()
        if wait is None:
            return self._tick_s
        if self._exchange.unsettled():
            return min(self._tick_s, max(_HURRY_S, (now - wait.since) / 20))
        return min(self._tick_s, max(wait.deadline - now, _HURRY_S))

    def _look(self, now: float) -> None:
        exchange, board = self._exchange, self._board
        wait = exchange.waiting
        if exchange.unsettled():
            exchange.settle_receives(board)
        if exchange.proposal is not None:
            exchange.fail(board.decide(exchange.proposal))
            return
        if now - self._looked < self._tick_s / 2 and not (wait and now >= wait.deadline):
            return
        self._looked = now
        board.beat()
        if (verdict := board.verdict()) is not None:
            exchange.fail(verdict)
            return
        report = exchange.report() if wait and now - wait.since > self._tick_s else None
        if report != self._said:
            board.say(report)
            self._said = report
        if report is None or wait is None:
            self._beats.clear()
            return
        self._listen()
        if now >= wait.deadline:
            exchange.fail(board.decide(self._blame(report)))

    def _listen(self) -> None:
        """Count for how many looks each rank has given no sign: looks, not seconds, for a store that stalls stalls all alike."""
        for rank, count in self._board.beats(self._ranks).items():
            before, quiet = self._beats.get(rank, (-1, 0))
            self._beats[rank] = (count, quiet + 1 if count == before else 0)

    def _blame(self, report: Report) -> Verdict:
        exchange = self._exchange
        silent = frozenset(rank for rank, (_, quiet) in self._beats.items() if quiet >= _SILENT_LOOKS)
        reports = self._board.reports(self._ranks) | {exchange.rank: report}
        found = root(exchange.rank, reports, silent, exchange.placement)
        doubt = "" if found.certain else " (the likelier reading, not a proof)"
        return Verdict("timeout", found.stage, found.rank, f"stage {found.stage} is at the root: {found.how}{doubt}")

    def _lost_board(self, text: str, *, how: str) -> Verdict:
        if self._host is None or self._host == self._exchange.rank:
            return Verdict("lost", None, None, f"{text}; which stage is at the root cannot be told")
        stages = self._exchange.stages_of(self._host)
        return Verdict(
            "timeout" if how == "timeout" else "lost",
            stages[0] if stages else None,
            self._host,
            f"{text}; it is hosted by the process of stage {', '.join(map(str, stages))}, which is at the root",
        )
