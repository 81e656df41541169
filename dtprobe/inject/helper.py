"""For helper programs of injectors: which counted calls a fault meets, when it is on, what is said to the harness.

Standard library only, and nothing of the harness. A helper gets its faults as a JSON file, commands as lines on standard
input, and answers with lines on standard output, which is its log in the arm run's folder.
"""

from __future__ import annotations

import json
import os
import random
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

Part = Mapping[str, Any]
"""One fault as a helper sees it: `index`, `seed`, `rank` (a list, or None for all), the targets that count, its parameters."""

FIRINGS_MAX = 10_000
"""So many firings of a fault are written one by one; the rest is only counted."""


class Log:
    """What the helper says, a line at one stroke: what was said before it died is kept. Used from any thread."""

    def __init__(self, descriptor: int = 1) -> None:
        self._descriptor = descriptor
        self._lock = threading.Lock()
        self._count: dict[int, int] = {}
        self._number = 0

    @staticmethod
    def now_ns() -> int:
        return time.time_ns()

    def say(self, kind: str, **fields: Any) -> None:
        line = json.dumps({"kind": kind, "t_ns": self.now_ns(), **fields}) + "\n"
        os.write(self._descriptor, line.encode())

    def fired(
        self,
        index: int,
        rank: int | None,
        *,
        call: str | None = None,
        nth: int | None = None,
        detail: str = "",
        t_ns: int | None = None,
    ) -> str | None:
        """A fault happens, or did at `t_ns`; a number for `ended`, None where it is one too many to be written."""
        with self._lock:
            self._number += 1
            # Several processes of a helper may write one log.
            number = f"{os.getpid()}.{self._number}"
            count = self._count[index] = self._count.get(index, 0) + 1
        if count > FIRINGS_MAX:
            return None
        when = {} if t_ns is None else {"t_ns": t_ns}
        self.say("fired", number=number, index=index, rank=rank, call=call, nth=nth, detail=detail, **when)
        return number

    def ended(self, number: str | None, detail: str | None = None) -> None:
        """A lasting firing is over; `detail` replaces what was said about it."""
        if number is not None:
            self.say("ended", number=number, detail=detail)

    def close(self) -> None:
        """Say how many firings were not written."""
        for index, count in self._count.items():
            if count > FIRINGS_MAX:
                self.say("more", index=index, count=count - FIRINGS_MAX)


class Windows:
    """Which faults are on for which ranks now; a part with `on` is on from the beginning."""

    def __init__(self, parts: list[Part]) -> None:
        self._from_the_beginning = {part["index"] for part in parts if part["on"]}
        self._said: dict[tuple[int, int | None], bool] = {}

    def turn(self, index: int, rank: int | None, on: bool) -> None:
        self._said[(index, rank)] = on

    def on(self, index: int, rank: int | None) -> bool:
        """What was said last about the rank, else about the job as a whole (None)."""
        for key in ((index, rank), (index, None)):
            if key in self._said:
                return self._said[key]
        return index in self._from_the_beginning


class Aim:
    """Counts the calls of one rank that match a fault's `op`, and says which of them it meets.

    Calls are counted from 1 whether the fault is on or not; `probability` draws once for each call from a generator seeded
    with (seed, fault, rank), so that the same calls are met again. Used by one thread at a time.
    """

    def __init__(self, part: Part, rank: int | None, windows: Windows) -> None:
        self.part = part
        self.rank = rank
        self._windows = windows
        self._random = random.Random(f"{part['seed']}/{part['index']}/{rank}")
        self._count = 0
        self._met = 0

    def meets(self, op: str) -> int | None:
        """The call's number where the fault meets it, else None."""
        part = self.part
        if part["op"] is not None and op != part["op"]:
            return None
        self._count += 1
        drawn = self._random.random()
        wanted = (
            (part["nth"] is None or self._count in part["nth"])
            and (part["every"] is None or self._count % part["every"] == 0)
            and (part["probability"] is None or drawn < part["probability"])
            and (part["times"] is None or self._met < part["times"])
        )
        if not wanted or not self._windows.on(part["index"], self.rank):
            return None
        self._met += 1
        return self._count


def hits(part: Part, rank: int | None) -> bool:
    """Whether a rank (None: the command as a whole) is among a fault's targets."""
    return part["rank"] is None or rank in part["rank"]


def listen(act: Callable[[dict[str, Any]], None]) -> threading.Thread:
    """Call `act` with every command that comes, on a thread; the last one is `{"do": "stop"}`."""

    def run() -> None:
        for line in sys.stdin:
            command = json.loads(line)
            act(command)
            if command["do"] == "stop":
                return

    thread = threading.Thread(target=run, name="commands", daemon=True)
    thread.start()
    return thread
