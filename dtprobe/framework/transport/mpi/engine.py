"""The one thread of a process that calls MPI.

It initialises MPI, starts operations in the order in which they were issued, polls them, ends those whose time is over, and
finalises MPI. Because nobody else calls MPI, the thread level SERIALIZED is enough; it asks for MULTIPLE, so that a program
may use mpi4py beside it. Operations are MPI's non-blocking ones, so none of them can hold the thread.
"""

from __future__ import annotations

import atexit
import os
import queue
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from dtprobe.framework.errors import FrameworkError
from dtprobe.framework.transport.mpi.errors import (
    CollectiveTimeout,
    MpiFailed,
    MpiUnavailable,
    PeerLost,
)
from dtprobe.framework.transport.mpi.library import load
from dtprobe.framework.transport.mpi.operation import Call, Channel, Operation

if TYPE_CHECKING:
    from mpi4py import MPI

    from dtprobe.framework.transport.mpi.talk import Talk

_YIELDS = 20
_QUICK_S, _CALM_S, _IDLE_S = 50e-6, 1e-3, 20e-3
_QUICK_FOR_S = 0.05
_MARGIN_S = 5.0
_DRAIN_S = 2.0


class Engine:
    """MPI in this process; get it from `running`. `rank` and `size` are MPI's."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self.rank, self.size = -1, -1
        self.channels: dict[str, Channel] = {}
        self._pid = os.getpid()
        self._inbox: queue.SimpleQueue[Operation | Call | None] = queue.SimpleQueue()
        self._flying: list[Operation] = []
        self._kept: list[Operation] = []
        self._begun = threading.Event()
        self._refused: FrameworkError | None = None
        self._doing = "starting MPI (MPI_Init waits until every rank of the job has called it)"
        self._ours = False
        self._held = False
        """Whether the thread did not come back from a blocking call of MPI."""
        self._retiring: list[Channel] = []
        self._mpi: Any
        self._talk: Talk
        self._spins, self._moved_at = 0, 0.0
        self._thread = threading.Thread(target=self._run, name="dtprobe-mpi", daemon=True)
        self._thread.start()

    # called by any thread

    def await_start(self, timeout_s: float) -> None:
        """Raises MpiUnavailable or ThreadLevelTooLow when MPI could not be started within `timeout_s` seconds."""
        if not self._begun.wait(timeout_s):
            self._held = True
            raise MpiUnavailable(
                f"MPI did not start within {timeout_s:.3g} s: a rank of this job has not come",
                "see with `ps` which rank has not called register() or imported mpi4py yet",
            )
        if self._refused is not None:
            raise self._refused

    def issue(self, operation: Operation) -> None:
        """Hand an operation to the thread; its work is settled in any case."""
        self._check_alive()
        self._inbox.put(operation)

    def call(self, what: str, run: Callable[[], Any], timeout_s: float) -> Any:
        """The result of `run` in the thread; raises what it raises, or CollectiveTimeout."""
        self._check_alive()
        call = Call(run)
        self._inbox.put(call)
        if not call.ended.wait(timeout_s):
            self._held = True
            raise CollectiveTimeout(f"{what}: not done within {timeout_s:.3g} s ({self._doing})", operation=what)
        if call.error is not None:
            raise call.error
        return call.result

    def tell_all(self, data: bytes, what: str, timeout_s: float) -> bytes:
        """Rank 0's `data` (at most 1 KiB) on every rank; all ranks of the world call it. Raises CollectiveTimeout."""
        room = bytearray(data.ljust(1024))
        self.call(what, lambda: self._talk.spread(room, what, timeout_s), timeout_s + _MARGIN_S)
        return bytes(room).rstrip()

    def post(self, run: Callable[[], None]) -> None:
        """Let the thread run something after what was issued before."""
        self._check_alive()
        self._inbox.put(Call(run))

    def retire(self, channel: Channel) -> None:
        """Free a group's communicator once nothing is in flight on it."""
        self.post(lambda: self._retiring.append(channel))

    def close(self) -> None:
        """At the end of the process: complete what is in flight, wait for the other ranks and finalise MPI.

        Operations that are not complete after two seconds are given up, and the others are told. MPI is left unfinalised
        then, for MPI_Finalize could wait for ever. The launcher reports that this rank ended early, which it did.
        """
        if os.getpid() != self._pid or not self._thread.is_alive():
            return
        if self._held:
            if self._begun.is_set() and not self._ours:
                self._mpi.COMM_WORLD.Abort(1)  # mpi4py itself would finalise at exit, and wait for ever
            return
        self._inbox.put(None)
        self._thread.join()

    def _check_alive(self) -> None:
        if os.getpid() != self._pid:
            raise MpiUnavailable("this process was forked from the one that runs MPI", "start ranks with mpirun, never by fork")
        if not self._thread.is_alive():
            raise self._refused or MpiUnavailable("MPI has been finalised in this process")

    # the thread

    def _run(self) -> None:
        try:
            self._begin()
        except FrameworkError as error:
            self._refused = error
        finally:
            self._begun.set()
        if self._refused is not None:
            return
        try:
            with torch.no_grad():
                while not self._turn():
                    pass
                self._drain()
                self._end()
        except BaseException as error:
            self._die(error)
            raise

    def _drain(self) -> None:
        """Let what is in flight complete for a moment, then give it up, so that others need not wait for this rank."""
        until = self.clock() + _DRAIN_S
        while self._flying and self.clock() < until:
            self._turn()
        for operation in list(self._flying):
            why = f"{operation.what}: rank {self.rank} ended before it was complete"
            self.fail(operation, PeerLost(why, "wait() for every operation before the end", ranks=(self.rank,)))

    def _die(self, error: BaseException) -> None:
        """Nobody must wait for a thread that is no more."""
        self._refused = MpiFailed(f"the thread that calls MPI has ended: {type(error).__name__}: {error}")
        for operation in self._flying:
            operation.work.settle(self._refused)
        while not self._inbox.empty():
            item = self._inbox.get_nowait()
            if isinstance(item, Operation):
                item.work.settle(self._refused)
            elif isinstance(item, Call):
                item.error = self._refused
                item.ended.set()

    def _begin(self) -> None:
        MPI, self._ours = load(os.environ)
        from dtprobe.framework.transport.mpi.talk import Talk

        self._mpi = MPI
        self.rank, self.size = MPI.COMM_WORLD.Get_rank(), MPI.COMM_WORLD.Get_size()
        try:
            self._talk = Talk(self)
        except MPI.Exception as error:
            raise MpiFailed(f"MPI_Comm_dup of the world: {error}") from None
        self._doing = "idle"

    def _turn(self) -> bool:
        """Take one item, or none, and look at everything in flight; True when it is time to close."""
        closing = False
        try:
            item = self._inbox.get_nowait() if self._spinning() else self._inbox.get(timeout=self._pause_s())
        except queue.Empty:
            pass
        else:
            if item is None:
                closing = True
            elif isinstance(item, Call):
                self._answer(item)
            else:
                self._start(item)
        for operation in list(self._flying):
            self._look(operation)
        self._talk.listen()
        if self._retiring:
            self._free()
        return closing

    def _free(self) -> None:
        busy = [each.channel for each in self._flying]
        for channel in [each for each in self._retiring if each not in busy]:
            self._retiring.remove(channel)
            self.channels.pop(channel.name, None)
            if channel.failure is None:
                channel.comm.Free()
                channel.beside.comm.Free()

    def _spinning(self) -> bool:
        """A few rounds without sleep after something moved: small operations between processes of one host take microseconds."""
        if self._flying and self._spins < _YIELDS:
            self._spins += 1
            os.sched_yield()
            return True
        return False

    def _pause_s(self) -> float:
        if not self._flying:
            return _IDLE_S
        return _QUICK_S if self.clock() - self._moved_at < _QUICK_FOR_S else _CALM_S

    def _moved(self) -> None:
        self._spins, self._moved_at = 0, self.clock()

    def _answer(self, call: Call) -> None:
        self._doing = "in a call that all members of a group make"
        try:
            call.result = call.run()
        except Exception as error:  # noqa: BLE001  (handed to the caller, who raises it)
            call.error = error
        self._doing = "idle"
        call.ended.set()

    def _start(self, operation: Operation) -> None:
        if operation.channel.failure is not None:
            operation.work.settle(operation.channel.failure)
        elif self._begin_round(operation, operation.start):
            self._flying.append(operation)

    def _begin_round(self, operation: Operation, start: Callable[[], list[MPI.Request]]) -> bool:
        try:
            operation.requests = start()
        except self._mpi.Exception as error:
            self.fail(operation, self._typed(operation, error))
            return False
        except FrameworkError as error:
            self.fail(operation, error)
            return False
        except Exception as error:  # noqa: BLE001  (mpi4py's own checks: it belongs to whoever waits for the operation)
            self.fail(operation, MpiFailed(f"{operation.what}: mpi4py refused it: {error}"))
            return False
        self._moved()
        return True

    def _look(self, operation: Operation) -> None:
        if operation not in self._flying:
            return
        try:
            done = operation.test(self._mpi.REQUEST_NULL)
        except self._mpi.Exception as error:
            failure = self._typed(operation, error)
            if operation in self._flying:  # what another rank says about it may have come in between
                self.fail(operation, failure)
            return
        if done and operation.then is not None:
            start, operation.then = operation.then, None
            self._begin_round(operation, start)
            return
        if done:
            self._flying.remove(operation)
            self._moved()
            self._complete(operation)
            return
        now = self.clock()
        if now >= operation.deadline:
            self.fail(operation, self._talk.late(operation))
        elif not operation.asked and now >= operation.ask_at:
            operation.asked = True
            self._talk.ask(operation)
        elif (lost := self._talk.lost(operation)) is not None:
            self.fail(operation, lost)

    def _complete(self, operation: Operation) -> None:
        try:
            source = operation.finish()
        except FrameworkError as error:
            operation.work.settle(error)
        except RuntimeError as error:
            operation.work.settle(MpiFailed(f"{operation.what}: the result could not be delivered: {error}"))
        else:
            operation.work.settle(source=-1 if source is None else source)

    def fail(self, operation: Operation, failure: FrameworkError) -> None:
        """End an operation with an error. A collective, or a request that MPI will not give back, ends its group as well."""
        if operation in self._flying:
            self._flying.remove(operation)
        if operation.number is not None:
            self.break_channel(operation.channel, failure)
        if not self._give_back(operation):
            self.break_channel(operation.channel, failure)
        operation.work.settle(failure)

    def break_channel(self, channel: Channel, failure: FrameworkError, *, tell: bool = True) -> None:
        """No operation on this group from now on; those in flight end with the same error, here and on the other members."""
        if channel.failure is not None:
            return
        channel.failure = failure.detached()
        if tell:
            self._talk.tell_broken(channel, failure)
        self._talk.revoke(channel)
        for operation in [each for each in self._flying if each.channel is channel]:
            self._flying.remove(operation)
            self._give_back(operation)
            operation.work.settle(channel.failure)

    def _give_back(self, operation: Operation) -> bool:
        """Whether MPI has let go of the operation's memory; if not, it is kept for the life of the process."""
        for request in operation.requests:
            if request == self._mpi.REQUEST_NULL:
                continue
            try:
                if hasattr(request, "drop"):
                    request.drop()
                if not request.Test():
                    self._kept.append(operation)
                    return False
            except self._mpi.Exception:
                continue  # an error completes a request
        return True

    def _typed(self, operation: Operation, error: MPI.Exception) -> FrameworkError:
        kind = error.Get_error_class()
        lost = (self._mpi.ERR_PROC_FAILED, self._mpi.ERR_PROC_FAILED_PENDING, self._mpi.ERR_REVOKED)
        if kind in lost or self._talk.revoked(operation.channel):
            return self._talk.peer_lost(operation)
        return MpiFailed(f"{operation.what}: {error.Get_error_string()}")

    def _end(self) -> None:
        self._doing = "waiting for the other ranks to end"
        safe = self._talk.farewell()
        kept, self._kept = self._kept, []
        for operation in kept:
            safe &= self._give_back(operation)
        if self._ours and safe:
            self._mpi.Finalize()
        elif not self._ours and not safe:
            self._mpi.COMM_WORLD.Abort(1)  # mpi4py itself would finalise at exit, and wait for ever

    def rest(self) -> None:
        """A short sleep of the thread, for whoever waits in it."""
        time.sleep(_CALM_S)


_running: Engine | None = None
_starting = threading.Lock()


def running(timeout_s: float, clock: Callable[[], float] = time.monotonic) -> Engine:
    """MPI of this process, started if need be. Raises MpiUnavailable or ThreadLevelTooLow."""
    global _running  # noqa: PLW0603
    with _starting:
        if _running is None:
            _running = Engine(clock)
            atexit.register(_running.close)
        _running.await_start(timeout_s)
        return _running
