"""Faults of the rendezvous store: a proxy between a rank and the TCPStore that MASTER_ADDR and MASTER_PORT name."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dtprobe.errors import Unavailable
from dtprobe.inject import Injector
from dtprobe.inject.helped import HelpedInjection
from dtprobe.probes import RankProcess

HERE = Path(__file__).resolve().parent
LASTING_S = 600.0


def _seconds(name: str, value: float, least: float = 0.0) -> None:
    if not least < value <= LASTING_S:
        raise ValueError(f"{name}={value:g} is not between {least:g} and {LASTING_S:g}")


@dataclass(frozen=True, kw_only=True)
class Delay:
    """A message to the store is held back for `seconds`; those behind it wait too."""

    seconds: float

    def __post_init__(self) -> None:
        _seconds("seconds", self.seconds)


@dataclass(frozen=True, kw_only=True)
class Reset:
    """Instead of passing a message on, the connection is reset (RST) on both sides; once, where no count is given."""


@dataclass(frozen=True, kw_only=True)
class Slice:
    """A message arrives at the store in pieces of `bytes`, `pause_s` apart."""

    bytes: int = 1
    pause_s: float = 0.01

    def __post_init__(self) -> None:
        if self.bytes < 1:
            raise ValueError(f"bytes={self.bytes} is less than 1")
        _seconds("pause_s", self.pause_s)


@dataclass(frozen=True, kw_only=True)
class HalfOpen:
    """From a message on (the first, where no count is given) nothing passes either way, and the connection stays open."""


@dataclass(frozen=True, kw_only=True)
class Refuse:
    """Nobody listens on the store's port for `seconds` (ECONNREFUSED), as before the store's host is up."""

    seconds: float

    def __post_init__(self) -> None:
        _seconds("seconds", self.seconds)


@dataclass(frozen=True, kw_only=True)
class Drop:
    """A message to the store is lost; the connection goes on as if nothing had happened."""


class StoreInjection(HelpedInjection):
    """A proxy of its own for each fault; several faults of one rank are several proxies, one behind the other."""

    name = "store"
    program = HERE / "proxy.py"

    def check(self) -> Unavailable | None:
        target, action = self.fault.target, self.fault.action
        counted = [name for name in ("op", "nth", "every", "times", "probability") if getattr(target, name) is not None]
        if action == "refuse" and (counted or target.for_s is not None):
            return Unavailable(
                f"store:refuse is a time without a listener, not a message: {', '.join(counted) or 'for_s'} means nothing",
                "aim it by rank and after_s; seconds says how long",
            )
        return None

    def part(self) -> Mapping[str, Any]:
        target = self.fault.target
        once = self.fault.action in ("reset", "half_open") and not (target.nth or target.every or target.probability)
        return {**asdict(self.fault.config), **({"times": target.times or 1} if once else {})}  # type: ignore[call-overload]

    def whole(self) -> bool:
        """A launcher has no rank: each rank asks for itself."""
        return False

    def front(self) -> Sequence[str]:
        enter = (sys.executable, "-I", "-S", str(HERE / "enter.py"))
        return (*enter, str(self.shared.folder), self.socket, str(self.log), str(self.site.index))

    def config(self, parts: Sequence[Mapping[str, Any]], held: Sequence[RankProcess]) -> Mapping[str, Any]:
        return {"parts": parts, "folder": str(self.shared.folder), "socket": self.socket}

    @property
    def socket(self) -> str:
        return f"{self.site.index:03}.sock"

    def silence(self) -> str:
        return (
            "no rank that is meant sent such a message through the proxy: its store is not the one of MASTER_ADDR and MASTER_PORT,"
            " or it runs no Python that takes the hook"
        )


injector = Injector(
    name="store",
    layer="store",
    title="a proxy before the rendezvous store delays, drops or slices a rank's messages, resets or silences its connection",
    certifies_not="The data path: collectives do not go through the store. Nor a loss of packets, which TCP would mend: what is lost here"
    " is lost for good.",
    needs=("linux",),
    actions={"delay": Delay, "reset": Reset, "slice": Slice, "half_open": HalfOpen, "refuse": Refuse, "drop": Drop},
    targets=("rank", "op", "nth", "after_s", "every", "times", "probability", "for_s"),
    make=StoreInjection,
)
