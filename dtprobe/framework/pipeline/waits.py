"""The thread that waits inside the back end, so that the main thread need not: out of gloo's wait nothing leads.

When a connection ends, gloo wakes whoever waits for a message that is queued, but forgets one that it is writing or reading at that moment
(`Pair::signalException` of its TCP transport looks only at pinned buffers there): that one waits for its whole timeout. A main thread
that waits here instead leaves as soon as the exchange has failed.
"""

from __future__ import annotations

import queue
import threading
from datetime import timedelta

import torch.distributed as dist

_JOIN_S = 0.5


class Waiting:
    """One message that is waited for. `error` is what the back end raised, empty where nothing was; of no meaning before `over`."""

    def __init__(self, work: dist.Work, timeout: timedelta) -> None:
        self.over = False
        self.error = ""
        self._work: dist.Work | None = work
        self._timeout = timeout
        self._told = threading.Event()

    def until(self, seconds: float) -> bool:
        """Wait until it is over or somebody calls `disturb`, `seconds` at most; whether it is over."""
        self._told.wait(seconds)
        self._told.clear()
        return self.over

    def disturb(self) -> None:
        """Wake the one who waits here; from any thread."""
        self._told.set()

    def run(self) -> None:
        """Wait inside the back end, on the thread that does so."""
        assert self._work is not None
        try:
            self._work.wait(self._timeout)
        except RuntimeError as error:
            self.error = str(error) or type(error).__name__
        self._work = None
        self.over = True
        self._told.set()


class Waits:
    """The thread. It is made at the first message, and ended by `stop`; one that gloo forgot ends at the message's timeout."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Waiting | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def begin(self, work: dist.Work, timeout: timedelta) -> Waiting:
        """Have a message waited for, `timeout` at most."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="dtprobe-exchange-waits", daemon=True)
            self._thread.start()
        waiting = Waiting(work, timeout)
        self._queue.put(waiting)
        return waiting

    def stop(self) -> None:
        """End the thread; not waited for where it is stuck."""
        self._queue.put(None)
        if self._thread is not None:
            self._thread.join(_JOIN_S)

    def _run(self) -> None:
        while (waiting := self._queue.get()) is not None:
            waiting.run()
            del waiting
