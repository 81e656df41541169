"""The thread that ends what hangs: it holds the deadline and hears the launcher's SIGTERM, whatever the main thread waits in."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Protocol

import torch.distributed as dist

from dtprobe.doctor.cluster.verdict import ClusterReport, ranks
from dtprobe.framework.bootstrap import Job, Placement
from dtprobe.framework.errors import FrameworkError, RankError

_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_ROLL_CALL_S, _QUIET_S = 3.0, 1.0
_HURRIED = ("mpirun", "pmi")
"""They kill one second after their SIGTERM: until then the ranks that live must be told from those that do not."""
_HURRIED_S, _HURRIED_QUIET_S = 0.6, 0.2
_EARLY_S = 0.7


class Examined(Protocol):
    """What the guard knows of the examination it guards."""

    placement: Placement
    deadline_s: float
    stage: str
    job: Job | None

    @property
    def left_s(self) -> float: ...
    def broken(self, error: FrameworkError) -> None: ...
    def report(self) -> ClusterReport: ...


@contextlib.contextmanager
def signals_held() -> Iterator[None]:
    """In the block SIGTERM and SIGINT reach no thread that was begun in it, but for `guarded`'s; those left over are dropped."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    try:
        yield
    finally:
        while signal.sigtimedwait(_SIGNALS, 0) is not None:
            pass
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def guarded(examination: Examined, show: Callable[[ClusterReport], None]) -> Iterator[None]:
    """In the block SIGTERM, SIGINT and the deadline are served by a thread, whatever the main thread waits in.

    Enter it within `signals_held`, which goes on until the report is out: the launcher's SIGTERM must not cut it short.
    """
    over = threading.Event()

    def watch() -> None:
        while not over.is_set():
            late = examination.left_s < min(_EARLY_S, examination.deadline_s / 8)
            told = signal.sigtimedwait(_SIGNALS, 0 if late else 0.2)
            if over.is_set():
                return
            if told is not None and told.si_signo == signal.SIGINT:
                _end(f"rank {examination.placement.rank}: interrupted while {examination.stage}", 130)
            if told is not None:
                hurried = examination.placement.source in _HURRIED
                silent = _roll_call(examination, *((_HURRIED_S, _HURRIED_QUIET_S) if hurried else (_ROLL_CALL_S, _QUIET_S)))
                _last_words(examination, show, "the launcher ended the job (SIGTERM)", (0,) if silent is None else silent)
            elif late:
                # ranks reach their deadlines one after another: who has not answered yet may be as alive as this one
                answers = _roll_call(examination, 0.0, 0.0) is not None
                why = f"no end within the deadline of {examination.deadline_s:g} s"
                _last_words(examination, show, why, () if answers else (0,))

    watcher = threading.Thread(target=watch, name="dtprobe-cluster-deadline", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        over.set()
        watcher.join()


def _roll_call(examination: Examined, wait_s: float, quiet_s: float) -> tuple[int, ...] | None:
    """The ranks that do not answer, which all that were told to end do at once; None where the store is silent.

    It takes at most `wait_s` seconds, and less once no other rank has answered for `quiet_s` seconds.
    """
    job = examination.job
    if job is None or job.store is None:
        return ()
    answered: list[tuple[int, ...]] = []
    size = examination.placement.world_size

    def call() -> None:
        with contextlib.suppress(dist.DistError):
            store = job.store.clone()
            store.set(f"dtprobe.cluster.alive/{examination.placement.rank}", "")
            silent = tuple(one for one in range(size) if one != examination.placement.rank)
            begun = heard = time.monotonic()
            while silent and time.monotonic() - begun < wait_s:
                still = tuple(one for one in silent if not store.check([f"dtprobe.cluster.alive/{one}"]))
                heard = time.monotonic() if still != silent else heard
                silent = still
                if heard > begun and time.monotonic() - heard > quiet_s:
                    break
                time.sleep(0.02)
            answered.append(silent)

    caller = threading.Thread(target=call, daemon=True)  # a store whose process is stopped answers never
    caller.start()
    caller.join(wait_s + 0.4)
    return answered[0] if answered else None


def _last_words(examination: Examined, show: Callable[[ClusterReport], None], why: str, silent: tuple[int, ...]) -> None:
    where = examination.placement
    remedy = "look at the named ranks first: they ended or were stopped" if silent else "look at what this stage waits for"
    named = f"; {ranks(silent)} no longer answered" if silent else ""
    if where.rank == 0:
        # first in one line, which takes no time: the launcher may kill this rank while it makes the report
        _say(f"while {examination.stage}: {why}{named}")
        examination.broken(RankError(f"{why}{named}", remedy, ranks=silent))
        show(examination.report())
    elif 0 in silent:
        place = f"rank {where.rank} on {socket.gethostname()}"
        _end(f"{place}: while {examination.stage}: {why}{named}; {remedy}", 1)
    _end("", 1)


def _end(text: str, code: int) -> None:
    """End this process now: its main thread cannot be called back."""
    if text:
        _say(text)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _say(text: str) -> None:
    sys.stderr.write(f"dtprobe: {text}\n")
    sys.stderr.flush()
