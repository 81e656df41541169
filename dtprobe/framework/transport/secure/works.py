"""Handles of encrypted operations: collectives run in order on a thread of their group, messages finish in `wait`."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from dtprobe.framework.errors import FrameworkError, GroupEnded
from dtprobe.framework.transport.secure.wire import Expected, Sent, Wire

_NO_TIMEOUT = timedelta(0)
_JOIN_S = 5.0


class CollectiveWork(dist.Work):
    """A collective that waits for its turn, runs, or has run. `wait` raises what went wrong."""

    def __init__(self, description: str, outputs: list[torch.Tensor]) -> None:
        super().__init__()
        self._description = description
        self._outputs = outputs
        self._over = threading.Event()
        self._failed: BaseException | None = None
        self._done: torch.futures.Future[None] = torch.futures.Future()
        # a callback that raises is what makes an error of a future visible to C++ (DDP waits there)
        self._future = self._done.then(lambda done: self.result())

    def end(self, failed: BaseException | None = None) -> None:
        """The collective is over; `failed` says why it did not work."""
        self._failed = failed
        self._over.set()
        self._done.set_result(None)

    def wait(self, timeout: timedelta = _NO_TIMEOUT) -> bool:
        if not self._over.wait(timeout.total_seconds() if timeout > _NO_TIMEOUT else None):
            raise FrameworkError(f"{self._description} did not end within {timeout.total_seconds():g} s")
        if self._failed is not None:
            raise self._failed
        return True

    def is_completed(self) -> bool:
        return self._over.is_set()

    def is_success(self) -> bool:
        return self._over.is_set() and self._failed is None

    def exception(self) -> Any:
        return self._failed

    def synchronize(self) -> None:
        self.wait()

    def result(self) -> list[torch.Tensor]:
        self.wait()
        return self._outputs

    def get_future(self) -> torch.futures.Future:
        return self._future


class MessageWork(dist.Work):
    """A message that was sent or is waited for. `is_completed` is False until `wait`: gloo cannot tell earlier."""

    def __init__(self, finish: Callable[[timedelta], None], source: Callable[[], int]) -> None:
        super().__init__()
        self._finish = finish
        self._source = source
        self._turn = threading.Lock()
        self._done = False

    @classmethod
    def sent(cls, sent: Sent, me: int) -> MessageWork:
        return cls(sent.finish, lambda: me)

    @classmethod
    def expected(cls, wire: Wire, expected: Expected, finished: Callable[[], None]) -> MessageWork:
        def finish(timeout: timedelta) -> None:
            wire.finish(expected, timeout)
            finished()

        return cls(finish, lambda: -1 if expected.source is None else expected.source)

    def wait(self, timeout: timedelta = _NO_TIMEOUT) -> bool:
        with self._turn:
            if not self._done:
                self._finish(timeout)
                self._done = True
        return True

    def is_completed(self) -> bool:
        return self._done

    def synchronize(self) -> None:
        self.wait()

    def source_rank(self) -> int:
        return self._source()

    def _source_rank(self) -> int:
        return self._source()


class Progress:
    """Runs the collectives of one group, one after the other: on the caller's thread where it waits anyway and nothing is ahead
    of it, else on a thread that starts with the first such one.

    After one has failed the group's ranks are no longer at the same point: the following fail at once, with the reason.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._waiting: queue.SimpleQueue[tuple[CollectiveWork, Callable[[], None]] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._ended = False
        self._broken: BaseException | None = None
        self._turn = threading.Lock()
        self._running = threading.Lock()
        self._pending = 0

    def run(self, work: CollectiveWork, job: Callable[[], None], *, waits: bool) -> CollectiveWork:
        """Let `job` run in its turn; `waits` says that the caller will do nothing before it has."""
        with self._turn:
            if self._ended:
                raise GroupEnded(f"group {self._name!r} has ended", "create it again")
            here = waits and not self._pending
            self._pending += 1
            if here:
                self._running.acquire()
            else:
                self._start()
                self._waiting.put((work, job))
        if here:
            self._finish(work, job)
        return work

    @property
    def busy(self) -> bool:
        return self._pending > 0

    def end(self) -> None:
        """Let the thread end after what it is doing; what still waits fails with GroupEnded. Safe to call twice."""
        with self._turn:
            self._ended = True
            self._waiting.put(None)
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(_JOIN_S)

    def _start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name=f"secure {self._name}"[:15], daemon=True)
            self._thread.start()

    def _serve(self) -> None:
        while (item := self._waiting.get()) is not None:
            self._running.acquire()
            self._finish(*item)
            del item

    def _finish(self, work: CollectiveWork, job: Callable[[], None]) -> None:
        """Run `job`, with `_running` held, and let it go."""
        failed: BaseException | None = None
        try:
            if self._ended:
                raise GroupEnded(f"group {self._name!r} ended before the collective began", "wait() first")
            if self._broken is not None:
                raise FrameworkError(f"group {self._name!r} is broken since {self._broken}", "end it and make another")
            job()
        except BaseException as error:  # noqa: BLE001  (it belongs to whoever waits for the work)
            failed = _alone(error)
            self._broken = self._broken or failed
        self._running.release()
        with self._turn:
            self._pending -= 1
        work.end(failed)


def _alone(error: BaseException) -> BaseException:
    """The error without the frames it passed: they hold tensors and the group."""
    error.__cause__ = error.__context__ = None
    return error.with_traceback(None)
