"""Faults of whole nodes (`node=1`): to the injector a node is a command of which no ranks are known, its agent, with all that it starts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from dtprobe import armrun
from dtprobe.armrun import ArmPlan, Injected
from dtprobe.clock import Clock
from dtprobe.confine import Confinement
from dtprobe.errors import UsageError
from dtprobe.inject import Injection, Site
from dtprobe.launch.nodes.ground import Attached
from dtprobe.probes import RankProcess

ANY_RANK = 0
"""How its agent is started: as any rank is that the fault means."""


class Powers:
    """The injections on nodes of one arm run, by the fault's index and the node."""

    def __init__(self, box: Confinement, plan: ArmPlan, folder: Path, nodes: int, *, seed: int, clock: Clock) -> None:
        self._plan = plan
        self._pids: dict[int, int] = {}
        self._injections: dict[tuple[int, int], Injection] = {}
        for index, fault in enumerate(plan.faults):
            for node in fault.target.node or ():
                if not 0 <= node < nodes:
                    raise UsageError(f"fault {str(fault)!r}: there is no node {node}", f"nodes are 0 to {nodes - 1}")
                site = Site(
                    folder=folder / "launcher" / f"node{node}",
                    scratch=box.scratch,
                    box=box,
                    world_size=None,
                    seed=seed + plan.repeat,
                    index=index,
                    clock=clock,
                    processes=lambda node=node: self._processes(node),  # type: ignore[misc]
                )
                own = replace(fault, target=replace(fault.target, node=None, rank=None))
                self._injections[index, node] = fault.injector.make(own, site)

    def check(self) -> None:
        """Raises UsageError for a fault that cannot reach its node here."""
        for (index, _), injection in self._injections.items():
            if reason := injection.check():
                raise UsageError(
                    f"fault {str(self._plan.faults[index])!r} cannot reach its target here: {reason.reason}", reason.remedy
                )

    def prepare(self) -> None:
        for injection in self._injections.values():
            injection.prepare()

    def attached(self, environ: Mapping[str, str]) -> dict[int, Attached]:
        """What the faults put in front of the agents of their nodes."""
        found = {}
        for node in {node for _, node in self._injections}:
            own = [injection for (_, on), injection in self._injections.items() if on == node]
            found[node] = Attached(
                wrap=lambda argv, own=own: armrun.wrapped(own, ANY_RANK, argv),  # type: ignore[misc]
                environ=lambda env, own=own: armrun.joined(own, ANY_RANK, env),  # type: ignore[misc]
            )
        return found

    def begin(self, pids: Mapping[int, int]) -> None:
        """The ranks are about to be let go: from now on time counts."""
        self._pids = dict(pids)
        for injection in self._injections.values():
            injection.start(())

    def stop(self, names: Mapping[int, str]) -> dict[int, Injected]:
        """Undo; by the fault's index, when it fired on which nodes."""
        found: dict[int, Injected] = {}
        for (index, node), injection in self._injections.items():
            name = names.get(node) or f"node{node}"
            one = armrun.ended(str(self._plan.faults[index]), injection)
            fired = tuple(replace(hit, rank=None, detail=f"{name}: {hit.detail}") for hit in one.fired)
            known = found.get(index, Injected(one.fault, (), ()))
            found[index] = Injected(
                one.fault, (*known.fired, *fired), (*known.problems, *(f"{name}: {text}" for text in one.problems))
            )
        return found

    def _processes(self, node: int) -> list[RankProcess]:
        pid = self._pids.get(node)
        return [] if pid is None else [RankProcess(None, pid, Path("/"))]
