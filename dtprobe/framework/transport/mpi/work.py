"""A handle of an operation in flight, as torch's reducer, comm hooks and functional collectives want it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from dtprobe.framework.errors import FrameworkError
from dtprobe.framework.transport.mpi.errors import CollectiveTimeout, MpiFailed

_NO_TIMEOUT = timedelta(0)
_STUCK_S = 10.0
"""How long after its deadline an operation may stay unsettled: the progress thread is then held inside one call of MPI."""


class MpiWork(dist.Work):
    """One operation, or several coalesced ones. `wait` raises the typed error of a failed one.

    The future of `get_future` holds the list of output tensors. torch's C++ code understands only a RuntimeError in a
    future: that one carries the name and text of the typed error. `left` says how many seconds remain until the deadline.
    """

    def __init__(self, what: str, outputs: list[torch.Tensor], left: Callable[[], float]) -> None:
        super().__init__()
        self.what = what
        self._outputs = outputs
        self._left_s = left
        self._done = threading.Event()
        self._lock = threading.Lock()
        self._failure: FrameworkError | None = None
        self._source = -1
        self._promise: torch.futures.Future[Any] | None = None
        self._future: torch.futures.Future[Any] | None = None

    def settle(self, failure: FrameworkError | None = None, *, source: int = -1) -> None:
        """The operation has ended; called once, by the progress thread."""
        with self._lock:
            self._failure, self._source = failure, source
            self._done.set()
            promise = self._promise
        if promise is not None:
            promise.set_result(self._outcome())

    def wait(self, timeout: timedelta = _NO_TIMEOUT) -> bool:
        """Block until the operation ended; at most `timeout` where given, else the timeout it was issued with.

        Raises CollectiveTimeout, PeerLost, GroupEnded, Unsupported or MpiFailed.
        """
        limit = timeout.total_seconds()
        if limit > 0:
            if not self._done.wait(limit):
                raise CollectiveTimeout(f"{self.what}: not complete after a wait of {limit:.3g} s", operation=self.what)
        elif not self._done.wait(max(self._left_s(), 0) + _STUCK_S):
            raise MpiFailed(f"{self.what}: its timeout passed and MPI does not return from a call", "look at the MPI library")
        if self._failure is not None:
            raise self._failure
        return True

    def is_completed(self) -> bool:
        return self._done.is_set()

    def is_success(self) -> bool:
        return self._done.is_set() and self._failure is None

    def exception(self) -> Any:
        return self._failure

    def synchronize(self) -> None:
        self.wait()

    def block_current_stream(self) -> None:
        self.wait()

    def result(self) -> list[torch.Tensor]:
        """The output tensors; waits for them."""
        self.wait()
        return self._outputs

    def source_rank(self) -> int:
        """Rank in the group from which a receive from any source got its message; waits for it."""
        self.wait()
        return self._source

    def _source_rank(self) -> int:
        return self.source_rank()

    def get_future(self) -> torch.futures.Future[Any]:
        """A future of the list of output tensors; its `then` callbacks run in the progress thread, so keep them short."""
        with self._lock:
            if self._future is not None:
                return self._future
            promise: torch.futures.Future[Any] = torch.futures.Future()
            self._promise, self._future = promise, promise.then(_unwrapped)
            settled = self._done.is_set()
        if settled:
            promise.set_result(self._outcome())
        return self._future

    def _outcome(self) -> Any:
        return self._outputs if self._failure is None else self._failure


class JoinedWork(MpiWork):
    """Several works as one, for operations issued between the start and the end of coalescing."""

    def __init__(self, what: str, works: list[MpiWork]) -> None:
        outputs = [tensor for work in works for tensor in work._outputs]
        super().__init__(what, outputs, lambda: max((work._left_s() for work in works), default=0.0))
        self._missing = len(works)
        if not works:
            self.settle()
        for work in works:
            work.get_future().add_done_callback(partial(self._one_ended, work))

    def _one_ended(self, work: MpiWork, _: Any) -> None:
        with self._lock:
            self._missing -= 1
            last = self._missing == 0
            self._failure = self._failure or work._failure
        if last:
            self.settle(self._failure)


def _unwrapped(future: torch.futures.Future[Any]) -> Any:
    outcome = future.value()
    if isinstance(outcome, FrameworkError):
        raise outcome
    return outcome
