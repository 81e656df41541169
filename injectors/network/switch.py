"""The helper behind network faults: a bridge, a namespace and a cable for each rank, and what the faults do to the cables.

Runs as root. `effects` of a part names a Python file with `make(part, rank, net, log)`: an `Effect`, which can be put on a cable
and taken off. An effect that met no packet is said not to have fired. The configuration file is the only argument.
"""

from __future__ import annotations

import importlib.util
import json
import queue
import sys
from pathlib import Path
from typing import Any, Protocol

from cables import Net

from dtprobe.inject.helper import Log, hits, listen


class Effect(Protocol):
    """What one fault does to one rank's cable."""

    def on(self) -> None: ...

    def off(self) -> None: ...

    def met(self) -> tuple[int, str]:
        """After `off`: how many packets (or what else it counts) it met, and that in words."""


class Switch:
    """The network of one arm run with all faults on it."""

    def __init__(self, config: dict[str, Any], log: Log) -> None:
        self.parts: dict[int, dict[str, Any]] = {part["index"]: part for part in config["parts"]}
        self.ranks = range(config["ranks"])
        self.log = log
        self.net = Net(config["prefix"], config["subnet"], len(self.ranks), config["parts"], log)
        self._on: dict[tuple[int, int], tuple[int, Effect]] = {}

    def build(self) -> None:
        self.net.build()
        for part in self.parts.values():
            if part["on"]:
                self.begin(part["index"], None)

    def begin(self, index: int, rank: int | None) -> None:
        """A fault begins for a rank (None: for all that are meant)."""
        part = self.parts[index]
        for one in self.ranks if rank is None else [rank]:
            if hits(part, one) and one in self.ranks and (index, one) not in self._on:
                effect: Effect = _module(part["effects"]).make(part, one, self.net, self.log)
                begun_ns = self.log.now_ns()
                effect.on()
                self._on[(index, one)] = (begun_ns, effect)

    def end(self, index: int, rank: int | None) -> None:
        """It ends; now it is known whether it met anything."""
        for key in [key for key in self._on if key[0] == index and rank in (None, key[1])]:
            begun_ns, effect = self._on.pop(key)
            effect.off()
            count, words = effect.met()
            if count:
                number = self.log.fired(index, key[1], call=self.parts[index]["action"], detail=words, t_ns=begun_ns)
                self.log.ended(number)
            else:
                self.log.say("refused", index=index, detail=f"rank {key[1]}: no packet met it while it was on")

    def stop(self) -> None:
        for index in self.parts:
            self.end(index, None)
        self.net.close()


def _module(path: str) -> Any:
    name = f"_effects_{Path(path).parent.name.replace('-', '_')}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None and spec.loader is not None, path
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


def main(path: str) -> None:
    log = Log()
    switch = Switch(json.loads(Path(path).read_text(encoding="utf-8")), log)
    switch.build()
    commands: queue.Queue[dict[str, Any]] = queue.Queue()
    listen(commands.put)
    log.say("ready")
    while (command := commands.get())["do"] != "stop":
        act = switch.begin if command["do"] == "begin" else switch.end
        try:
            act(command["index"], command["rank"])
        except Exception as error:  # noqa: BLE001  said; the other faults' turn still comes
            log.say("refused", index=command["index"], detail=f"{type(error).__name__}: {error}")
    switch.stop()
    log.close()


if __name__ == "__main__":
    main(sys.argv[1])
