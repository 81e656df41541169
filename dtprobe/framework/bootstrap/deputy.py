"""Who answers for a rank whose main thread cannot: NCCL offers no way out of an initialisation that another rank has left.

Measured on two H200 with NCCL 2.28.9: where `ncclCommInitRankConfig` fails on one rank, the other spins in it until somebody ends it.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import torch.distributed as dist

from dtprobe.framework.errors import FrameworkError

_POLL_S = 0.2
_LAST_S = 2.0
"""So long before the deadline a back end that is still at it is given up, so that all can agree on that."""

_FAILED = "dtprobe.start/failed"


class Deputy:
    """A thread that waits for a failure on another rank, or for the deadline, while the main thread makes the default group.

    If the main thread is still at it then, `speak` is called with this rank's own failure (empty where another's is known), which agrees
    with the others and raises; the error goes to stderr and the process ends with code 1, for nothing else ends the call it is in.
    `left` gives the seconds to the deadline; a back end that notices another's failure by itself gets `grace_s` seconds to say so.
    """

    def __init__(self, store: Any, *, speak: Callable[[str], object], left: Callable[[], float], grace_s: float) -> None:
        self._store = store
        self._speak = speak
        self._left = left
        self._whole_s = left()
        self._grace_s = grace_s
        self._turn = threading.Lock()
        self._done = threading.Event()

    @contextlib.contextmanager
    def on_duty(self) -> Iterator[None]:
        """For the length of the block; whoever leaves it speaks for itself."""
        thread = threading.Thread(target=self._wait, args=(self._store.clone(),), name="dtprobe-deputy", daemon=True)
        thread.start()
        try:
            yield
        finally:
            with self._turn:  # a deputy that has begun to speak goes on to the end of the process
                self._done.set()
            thread.join()

    def failed(self) -> None:
        """Tell the deputies of the others that the back end failed here."""
        self._store.set(_FAILED, "")

    def _wait(self, store: Any) -> None:
        last_s = min(_LAST_S, self._whole_s / 4)
        with contextlib.suppress(dist.DistError):  # without the store there is nobody to agree with; the launcher ends the rank
            while not self._done.wait(_POLL_S):
                if store.check([_FAILED]):
                    if not self._done.wait(min(self._grace_s, max(self._left() - last_s, 0))):
                        self._step_in("")
                    return
                if self._left() <= last_s:
                    self._step_in(f"it was still being made after {self._whole_s - last_s:.0f} s")
                    return

    def _step_in(self, failure: str) -> None:
        with self._turn:
            if not self._done.is_set():
                _end(self._said(failure))

    def _said(self, failure: str) -> str:
        try:
            self._speak(failure)
        except FrameworkError as error:
            return f"{type(error).__name__}: {error}"
        return "the others have made the default group"


def _end(why: str) -> NoReturn:
    sys.stderr.write(f"{why}; this rank is in its back end's initialisation, which nothing interrupts, and ends\n")
    sys.stderr.flush()
    os._exit(1)
