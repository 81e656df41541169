"""Ranks in network namespaces of their own, each on a cable to a bridge in another: the base of faults on those cables.

Nothing is made in the machine's own namespace, so the addresses are private to the run. The helper `switch.py` builds all of it
while the ranks are held; a small command in front of each rank moves it in (`setns`, same pid).
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dtprobe.errors import UsageError
from dtprobe.inject import Site
from dtprobe.inject.helped import HelpedInjection
from dtprobe.inject.spec import Fault
from dtprobe.probes import RankProcess

HERE = Path(__file__).resolve().parent
RANKS_MAX = 64
PLACE = "switch"
SUBNET = "10.87.0."
"""Rank k has the address k+1 of it, the bridge 254, in namespaces that nothing else shares."""


class ApartInjection(HelpedInjection):
    """A fault on the ranks' cables; `effects` is the file that says what its actions do (see `switch.py`)."""

    name = "network"
    program = HERE / "switch.py"
    effects = HERE / "effects.py"

    def __init__(self, fault: Fault, site: Site) -> None:
        super().__init__(fault, site)
        self._command = False

    def place(self) -> str:
        return PLACE

    @property
    def prefix(self) -> str:
        """Namespaces of this arm run are called by it: `<prefix>-sw`, `<prefix>-0` and so on."""
        own = f"{self.site.box.run_id} {self.site.folder}"
        return f"dtp{hashlib.sha256(own.encode()).hexdigest()[:10]}"

    def whole(self) -> bool:
        """The command itself stays with the bridge, where its ranks reach it."""
        return True

    def wrap(self, rank: int | None, argv: tuple[str, ...]) -> tuple[str, ...]:
        if rank is None:
            self._check_command(argv)
        return super().wrap(rank, argv)

    def _meant(self, rank: int | None) -> bool:
        """Every rank gets its cable, whichever cables the fault is on."""
        return True

    def _check_command(self, argv: Sequence[str]) -> None:
        """Raise UsageError, before anything is started, for a command whose ranks cannot be told apart."""
        nodes = [word for word in argv if word.startswith("--nnodes")]
        if Path(argv[0]).name != "torchrun" and "torch.distributed.run" not in argv:
            why = "the whole command is one thing to the network: in one namespace its ranks cannot be told apart"
        elif self.site.world_size is None:
            why = "the command line does not say how many ranks there will be"
        elif nodes and nodes != ["--nnodes=1"]:
            why = "ranks of other nodes cannot be joined to a bridge on this machine"
        else:
            self._command = True
            return
        raise UsageError(
            f"fault {str(self.fault)!r} cannot reach its target: {why}", "start the ranks with torchrun --nproc-per-node=N"
        )

    def front(self) -> Sequence[str]:
        return (sys.executable, "-I", "-S", str(HERE / "enter.py"), self.prefix, SUBNET, "{folder}")

    def prepare(self) -> None:
        size = self.site.world_size
        if size is not None and size > RANKS_MAX:
            raise UsageError(f"{size} ranks are more than the {RANKS_MAX} that can be joined to one bridge", "take fewer ranks")
        super().prepare()
        part = json.loads(self._plan.file.read_text(encoding="utf-8"))
        self._plan.write({**part, "rank": None})

    def start(self, held: Sequence[RankProcess]) -> None:
        if not self._command and any(one.rank is None for one in held):
            raise UsageError(
                f"fault {str(self.fault)!r} cannot reach its target: this launcher's own process stays outside the namespaces",
                "use the local launcher",
            )
        super().start(held)

    def ledger(
        self, parts: Sequence[Mapping[str, Any]], held: Sequence[RankProcess]
    ) -> Sequence[tuple[str, Mapping[str, Any]]]:
        names = ["sw", *(str(rank) for rank in range(self.site.world_size or 0))]
        return [("netns", {"name": f"{self.prefix}-{name}"}) for name in names]

    def config(self, parts: Sequence[Mapping[str, Any]], held: Sequence[RankProcess]) -> Mapping[str, Any]:
        return {"parts": parts, "prefix": self.prefix, "ranks": self.site.world_size, "subnet": SUBNET}

    def part(self) -> Mapping[str, Any]:
        return {"effects": str(self.effects)}

    def silence(self) -> str:
        return "no packet met it: the ranks that are meant sent and got nothing while it was on"
