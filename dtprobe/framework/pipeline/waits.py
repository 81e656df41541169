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
_GRACE_S = 0.5
"""Once the exchange has failed, the back end gets so long to say what became of the message that is waited for."""


class Waits:
    """Waits for one message at a time, on a thread that is made at the first one.

    `stop` ends it; one that gloo forgot ends at the message's timeout.
    """

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[_Waiting | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._waiting: _Waiting | None = None
        self._given_up = False

    def through(self, work: dist.Work, seconds: float, late_s: float) -> str:
        """Wait for a message, in the back end `seconds` and here `late_s` more at most; why it did not come, empty where it did."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="dtprobe-exchange-waits", daemon=True)
            self._thread.start()
        waiting = self._waiting = _Waiting(work, timedelta(seconds=seconds))
        self._queue.put(waiting)
        if not self._given_up:
            waiting.told.wait(seconds + late_s)  # or until it is given up
        ended = waiting.ended.wait(_GRACE_S)
        self._waiting = None
        if not ended:
            return "the exchange failed" if self._given_up else "Timed out"
        return waiting.error

    def give_up(self) -> None:
        """The exchange has failed: whoever waits, now or later, leaves soon; from any thread."""
        self._given_up = True
        if (waiting := self._waiting) is not None:
            waiting.told.set()

    def stop(self) -> None:
        """End the thread; not waited for where it is stuck."""
        self._queue.put(None)
        if self._thread is not None:
            self._thread.join(_JOIN_S)

    def _run(self) -> None:
        while (waiting := self._queue.get()) is not None:
            waiting.run()
            del waiting


class _Waiting:
    """One message. `error` is what the back end raised, empty where nothing was; of no meaning before it has `ended`."""

    def __init__(self, work: dist.Work, timeout: timedelta) -> None:
        self.error = ""
        self.ended = threading.Event()
        self.told = threading.Event()
        """Ended, or given up."""
        self._work: dist.Work | None = work
        self._timeout = timeout

    def run(self) -> None:
        """Wait inside the back end, on the thread that does so."""
        assert self._work is not None
        try:
            self._work.wait(self._timeout)
        except RuntimeError as error:
            self.error = str(error) or type(error).__name__
        self._work = None
        self.ended.set()
        self.told.set()
