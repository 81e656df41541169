"""The thread of a recorder that looks again and again, and its budget: it looks less often rather than cost more."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from dtprobe.clock import Clock

SLOWEST_S = 10.0
"""No look costs so much that the next one waits longer than this."""


class Sampler:
    """Calls `look` every `interval_s` on a thread of its own, and less often where it would use more than `share` of a core.

    `look` answers the seconds of processor time that it cost elsewhere (in the rank, in a child), which count like its own.
    When it raises, the sampling ends and `problems` says so.
    """

    def __init__(
        self,
        name: str,
        look: Callable[[], float],
        *,
        interval_s: float,
        share: float,
        clock: Clock,
        cpu_time: Callable[[], float] = time.thread_time,
    ) -> None:
        self.cpu_s = 0.0
        self.looks = 0
        self.problems: list[str] = []
        self._look = look
        self._interval_s = interval_s
        self._share = share
        self._clock = clock
        self._cpu_time = cpu_time
        self._wake = threading.Event()
        self._over = False
        self._soon_s: float | None = None
        self._began: float | None = None
        self._ended = 0.0
        self._thread = threading.Thread(target=self._run, name=f"dtprobe-{name}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def soon(self, seconds: float) -> None:
        """Called from inside `look`: the next look is due in so many seconds, whatever the budget says. Once."""
        self._soon_s = seconds

    def wake(self) -> None:
        """Look now."""
        self._wake.set()

    def stop(self, timeout_s: float = 3.0) -> bool:
        """End the sampling; False where the thread is still in a look after `timeout_s`."""
        self._over = True
        self._wake.set()
        if self._thread.ident is None:
            return True
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    @property
    def rate_hz(self) -> float:
        """Looks a second that were reached; 0 where there were none."""
        lasted_s = (self._ended or self._clock.monotonic()) - self._began if self._began is not None else 0.0
        return self.looks / lasted_s if lasted_s > 0 else 0.0

    def _run(self) -> None:
        self._began = self._clock.monotonic()
        try:
            while not self._over:
                began, before = self._clock.monotonic(), self._cpu_time()
                self._soon_s = None
                elsewhere = self._look()
                own = self._cpu_time() - before
                self.cpu_s += own
                self.looks += 1
                due_s = min(max(self._interval_s, (own + elsewhere) / self._share), SLOWEST_S)
                if self._soon_s is not None:
                    due_s = min(due_s, self._soon_s)
                self._wake.wait(max(0.0, due_s - (self._clock.monotonic() - began)))
                self._wake.clear()
        except Exception as error:  # noqa: BLE001  said among the recorder's problems
            self.problems.append(f"sampling ended after {self.looks} looks: {type(error).__name__}: {error}")
        finally:
            self._ended = self._clock.monotonic()
