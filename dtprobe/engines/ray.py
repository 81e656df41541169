"""Tasks on a Ray cluster that runs already. Its nodes need dtprobe installed, and share no files with us.

Ray chooses the nodes and says when one died; its tasks are then given to Ray again, by us and not by `max_retries`, since Ray does not
tell which attempt of a task it was that ended. A task that is to be alone takes all processors of one node.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import shutil
import socket
import sys
import tarfile
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dtprobe.engines import ATTEMPTS, Done, Task, check
from dtprobe.engines.node import GRACE_S, Outcome
from dtprobe.errors import DtprobeError, Unavailable, UsageError
from dtprobe.interrupts import interruptible

ADDRESS = "RAY_ADDRESS"
CPUS = 2
"""Processors of a task: the smallest scenarios have two ranks."""
CONNECT_S = 5.0
TICK_S = 1.0
_COUNTS = ("cpus", "gpus")
_NAME_ONE = "set RAY_ADDRESS or write --on ray:address=HOST:PORT; dtprobe starts no cluster"


@dataclass(frozen=True, kw_only=True)
class Ray:
    """The cluster at `address` (`host:port` of its head); each task takes `cpus` processors and `gpus` GPUs of a node."""

    address: str
    cpus: int = CPUS
    gpus: int = 0

    @classmethod
    def of(cls, options: Mapping[str, str], environ: Mapping[str, str]) -> Ray:
        for key, value in options.items():
            if key not in ("address", *_COUNTS) or (key in _COUNTS and not value.isdecimal()):
                raise UsageError(f"--on ray: no option {key}={value}", "write ray:address=HOST:PORT,cpus=2,gpus=1")
        counts = {key: int(options[key]) for key in _COUNTS if key in options}
        return cls(address=options.get("address", environ.get(ADDRESS, "")), **counts)

    @property
    def name(self) -> str:
        return "ray"

    def probe(self) -> Unavailable | None:
        if importlib.util.find_spec("ray") is None:
            return Unavailable("Ray is not installed", "pip install 'dtprobe[ray]'")
        if not self.address:
            return Unavailable("no Ray cluster is named", _NAME_ONE)
        host, _, port = self.address.rpartition(":")
        if not host or not port.isdecimal():
            return Unavailable(f"{self.address!r} is no address of a Ray cluster", _NAME_ONE)
        try:
            socket.create_connection((host, int(port)), CONNECT_S).close()
        except (OSError, OverflowError) as error:
            return Unavailable(f"no Ray cluster answers at {self.address}: {error}", "look at `ray status`")
        return None

    def run(self, tasks: Sequence[Task], *, into: Path, ended: Callable[[Done], None]) -> None:
        """As Engine.run says. This machine has to be a node of the cluster."""
        check(tasks)
        if (unavailable := self.probe()) is not None:
            raise UsageError(f"--on ray: {unavailable.reason}", unavailable.remedy)
        import ray

        into.mkdir(parents=True, exist_ok=True)
        try:
            ray.init(self.address, log_to_driver=False, logging_level=logging.ERROR)
        except (ConnectionError, RuntimeError, ValueError, TimeoutError) as error:
            words = " ".join(str(error).split())[:300]
            raise DtprobeError(
                f"the Ray cluster at {self.address} does not take us: {words}", "look at `ray status`"
            ) from error
        said = sys.stdout

        def told(done: Done) -> None:
            with contextlib.redirect_stdout(said):
                ended(done)

        try:
            with (
                interruptible(),
                tempfile.TemporaryDirectory(prefix=".ray-", dir=into) as spool,
                contextlib.redirect_stdout(
                    sys.stderr
                ),  # a thread of Ray's prints there of nodes that died, whatever log_to_driver is
            ):
                spread = _Spread(self, tasks, into, Path(spool), told)
                try:
                    spread.run()
                except BaseException:
                    spread.cancel()
                    raise
        finally:
            with contextlib.redirect_stdout(sys.stderr):
                ray.shutdown()


class _Spread:
    """One spread: what runs, and what waits to be alone."""

    def __init__(self, engine: Ray, tasks: Sequence[Task], into: Path, spool: Path, ended: Callable[[Done], None]) -> None:
        import ray

        from dtprobe.engines.ray_node import work

        self._ray: Any = ray
        self._engine = engine
        self._work: Any = ray.remote(max_retries=0, num_returns=1)(work)
        self._into = into
        self._spool = spool
        self._ended = ended
        self._attempts = dict.fromkeys((task.id for task in tasks), 0)
        self._waiting = [task for task in tasks if task.alone]
        self._running: dict[Any, tuple[Task, str]] = {}
        """By reference: the task, and the node that it has for itself."""
        self._plain = [task for task in tasks if not task.alone]

    def run(self) -> None:
        most = max((size for _, size in self._nodes()), default=0)
        if most < self._engine.cpus:
            raise UsageError(
                f"--on ray: a task takes {self._engine.cpus} processors, the largest node has {most}", "write ray:cpus=1"
            )
        for task in self._plain:
            self._submit(task)
        while self._running or self._waiting:
            self._place()
            ready, _ = self._ray.wait(list(self._running), num_returns=1, timeout=TICK_S)
            for one in ready:
                self._take(one)

    def cancel(self) -> None:
        """Interrupt what runs, and wait until it has ended."""
        for one in self._running:
            with contextlib.suppress(self._ray.exceptions.RayError):  # it has just ended, or its node has
                self._ray.cancel(one)
        if self._running:
            self._ray.wait(list(self._running), num_returns=len(self._running), timeout=GRACE_S + CONNECT_S)

    def _place(self) -> None:
        """Give tasks that are to be alone to nodes that have none of these, all of a node's processors each."""
        taken = {node for _, node in self._running.values()}
        for node, size in self._nodes():
            if self._waiting and node not in taken and size >= self._engine.cpus:
                from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

                pinned = NodeAffinitySchedulingStrategy(node, soft=False)
                self._submit(self._waiting.pop(0), node, num_cpus=size, scheduling_strategy=pinned)

    def _submit(self, task: Task, node: str = "", **how: Any) -> None:
        given = {"num_cpus": self._engine.cpus, "num_gpus": self._engine.gpus, "name": f"dtprobe {task.id}", **how}
        self._attempts[task.id] += 1
        self._running[self._work.options(**given).remote(asdict(task))] = (task, node)

    def _take(self, one: Any) -> None:
        task, _ = self._running.pop(one)
        attempts = self._attempts[task.id]
        errors = self._ray.exceptions
        try:
            told, packed = self._ray.get(one)
        except (errors.RayTaskError, errors.TaskCancelledError, errors.RuntimeEnvSetupError) as error:
            self._ended(Done(task=task.id, exit_code=None, attempts=attempts, problem=_words(error)))
        except errors.RayError as error:  # its node, its worker, or what it had answered is lost
            if attempts >= ATTEMPTS:
                said = f"it was lost {attempts} times: {_words(error)}"
                self._ended(Done(task=task.id, exit_code=None, attempts=attempts, problem=said))
            elif task.alone:
                self._waiting.append(task)
            else:
                self._submit(task)
        else:
            self._bring(task, told, packed)
            self._ended(Outcome(**told).done(task, attempts))

    def _bring(self, task: Task, told: dict[str, Any], packed: bytes) -> None:
        from dtprobe.engines.ray_node import unpack

        if not packed:
            return
        place = self._into / task.id
        try:
            unpack(packed, self._spool / task.id)
        except tarfile.TarError as error:
            told["problem"] = f"what it left cannot be unpacked here: {error}"
            return
        if place.exists():
            shutil.rmtree(place)
        (self._spool / task.id).rename(place)

    def _nodes(self) -> list[tuple[str, int]]:
        """The living nodes, and how many processors each offers."""
        return [(one["NodeID"], int(one["Resources"].get("CPU", 0))) for one in self._ray.nodes() if one["Alive"]]


def _words(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[-1][:300]}" if lines else type(error).__name__
