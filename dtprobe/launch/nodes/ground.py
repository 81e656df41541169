"""Where nodes come from: what the conductor asks of namespaces and of Slurm alike."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

AGENT = "dtprobe.launch.nodes.agent"


@dataclass(frozen=True, kw_only=True)
class Call:
    """What an agent is told: whom to call, with which token, and how long it waits for a sign of life."""

    to: tuple[str, int]
    token: str
    silence_s: float

    def told(self, *, node: int | None = None, name: str | None = None) -> str:
        """The value of TOLD; an agent that is not told its node knows it from its launcher."""
        said = {"node": node, "name": name, "to": list(self.to), "token": self.token, "silence_s": self.silence_s}
        return json.dumps(said)


@dataclass(frozen=True, kw_only=True)
class Attached:
    """What faults of a whole node do to how its agent is started."""

    wrap: Callable[[tuple[str, ...]], tuple[str, ...]]
    environ: Callable[[Mapping[str, str]], Mapping[str, str]]


class Ground(Protocol):
    """The nodes of one arm run."""

    nodes: int

    def build(self) -> tuple[socket.socket, str]:
        """Make what the nodes stand on; a socket that listens for their agents, and the address at which they reach it."""

    def start(self, call: Call, folder: Path, attached: Mapping[int, Attached]) -> None:
        """Start an agent on each node; what they print goes below `folder`."""

    def failed(self) -> str:
        """Why an agent that has not called will not call any more, as far as this side knows; empty where it may."""

    def close(self) -> None:
        """Remove what `build` made; the processes have ended."""


def last_words(file: Path) -> str:
    """The last line that a program printed there."""
    try:
        lines = file.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    except OSError:
        return ""
    return lines[-1][:300] if lines else ""
