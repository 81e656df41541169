"""Faults of a process: killed, stopped, told to end, crashed, its interpreter held, an exception out of nowhere, a fork."""

from __future__ import annotations

import builtins
import signal
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, is_dataclass, replace
from functools import partial
from pathlib import Path

from dtprobe import processes
from dtprobe.errors import Unavailable
from dtprobe.inject import Firing, Injection, Injector, Site
from dtprobe.inject.counted import COUNTED, check_op, part, why_not
from dtprobe.inject.inrank import Plan, firings, lines, refusals
from dtprobe.inject.ranks import Seen, Watch
from dtprobe.inject.spec import Fault
from dtprobe.probes import RankProcess

CAP_S = 600.0
"""How long a stop lasts at most where for_s does not say."""
STOPPED_WITHIN_S = 2.0
SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "term": signal.SIGTERM, "int": signal.SIGINT}
FOLLOW_S = 0.05


@dataclass(frozen=True, kw_only=True)
class Kill:
    """SIGKILL: the process is gone at once, as when a node's memory runs out."""


@dataclass(frozen=True, kw_only=True)
class Stop:
    """SIGSTOP: the process stands still with all its threads, until for_s is over or the run ends."""


@dataclass(frozen=True, kw_only=True)
class Term:
    """SIGTERM, as a scheduler sends it before it kills."""


@dataclass(frozen=True, kw_only=True)
class Int:
    """SIGINT, as from Ctrl-C: KeyboardInterrupt in Python's main thread."""


@dataclass(frozen=True, kw_only=True)
class Exit:
    """The process ends with `code`: at once, or where `clean` by SystemExit in its main thread."""

    code: int
    clean: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.code <= 255:
            raise ValueError(f"code={self.code} is not between 0 and 255")


@dataclass(frozen=True, kw_only=True)
class Exit0:
    """The process ends with success although its work is not done: at once, or where `clean` by SystemExit in its main thread."""

    clean: bool = False


@dataclass(frozen=True, kw_only=True)
class Abort:
    """abort(3), as from a failed assertion in C++. No core file is written."""


@dataclass(frozen=True, kw_only=True)
class Segfault:
    """A read at address 0. No core file is written."""


@dataclass(frozen=True, kw_only=True)
class Gil:
    """Python's global lock is held in C for `seconds`: no Python thread of the process runs, its C++ threads do."""

    seconds: float

    def __post_init__(self) -> None:
        _seconds(self.seconds)


@dataclass(frozen=True, kw_only=True)
class Exception_:
    """A built-in exception of `type` is raised in the main thread from another one. It waits until a call into C returns."""

    type: str = "RuntimeError"

    def __post_init__(self) -> None:
        kind = getattr(builtins, self.type, None)
        if not (isinstance(kind, type) and issubclass(kind, BaseException)) or self.type.startswith("Unicode"):
            raise ValueError(f"type={self.type} is no built-in exception that a text alone makes")


@dataclass(frozen=True, kw_only=True)
class Fork:
    """The process forks a child that does nothing for `seconds` but keep everything open that the process had."""

    seconds: float = 600.0

    def __post_init__(self) -> None:
        _seconds(self.seconds)


def _seconds(value: float) -> None:
    if not 0 < value <= 3600:
        raise ValueError(f"seconds={value:g} is not between 0 and 3600")


class ProcessInjection(Injection):
    """A fault by time is sent from outside where a signal does it; everything else happens inside the rank, by the hook."""

    def __init__(self, fault: Fault, site: Site) -> None:
        self.fault = fault
        self.site = site
        self.counted = any(getattr(fault.target, name) is not None for name in COUNTED)
        self.outside = fault.action in SIGNALS and not self.counted
        self._plan = Plan(site, "process", Path(__file__).with_name("process_faults.py"))
        self._watch = Watch(site, fault.target, self._send if self.outside else self._note)
        self._fired: list[Firing] = []
        self._stopped: list[tuple[processes.Identity, int | None]] = []
        self._followed: dict[int, processes.Identity | None] = {}
        self._continued: dict[int, int] = {}
        self._seen: set[int | None] = set()
        self._hit = False

    def check(self) -> Unavailable | None:
        target, action = self.fault.target, self.fault.action
        if target.for_s is not None and action != "stop":
            return Unavailable(f"process:{action} does not last, so for_s={target.for_s:g} means nothing", "leave for_s out")
        try:
            check_op(target.op)
        except ValueError as error:
            return Unavailable(str(error))
        return None

    def prepare(self) -> None:
        if self.outside:
            return
        config = self.fault.config
        assert is_dataclass(config) and not isinstance(config, type)
        target = self.fault.target
        if self.counted and target.nth is None and target.every is None and target.probability is None:
            # Else a rank that is started anew would meet its end again at its next call.
            target = replace(target, times=target.times or 1)
        self._plan.write(
            {
                "code": 0,
                **asdict(config),
                **part(target, self.site),
                **({} if self.counted else {"counted": None}),
                "action": self.fault.action,
                "detail": DETAILS.get(self.fault.action, "{action}").format(action=self.fault.action, **asdict(config)),
                "text": f"injected: {self.fault}",
            }
        )

    def environ(self, rank: int | None) -> Mapping[str, str]:
        return {} if self.outside else self._plan.environ()

    def start(self, held: Sequence[RankProcess]) -> None:
        self._watch.start(held)

    def stop(self) -> tuple[Firing, ...]:
        self._watch.stop()
        self._plan.remove()
        for stopped, rank in self._stopped:
            self._continue(stopped, rank)
        for fired_ns, who in self._followed.items():
            if who is not None:
                self._let_go(fired_ns, who)
        inside = () if self.outside else tuple(self._ended(one) for one in firings(self.site))
        self._hit = bool(self._fired or inside)
        return tuple(sorted([*self._fired, *inside], key=lambda one: one.t_ns))

    def problems(self) -> tuple[str, ...]:
        """Why the fault did not fire, as far as it is known; one sentence each."""
        found = [*self._watch.problems, *refusals(self.site)]
        if self._hit:
            return tuple(found)
        if self.counted:
            found += why_not(self.fault.target, self.site)
        elif self._watch.waited and not self._seen:
            ran = ", ".join(
                f"rank {rank} ran for {age_s:.1f} s" for rank, age_s in self._watch.waited.items() if rank is not None
            )
            found.append(f"{ran or 'the command'} ended before after_s={self.fault.target.after_s:g}")
        elif self.fault.target.rank is not None and not self._seen:
            found.append(f"no rank {'+'.join(map(str, self.fault.target.rank))} was seen on this machine")
        elif not self.outside:
            found.append("no rank that is meant ran Python with the hook until its time (python -I, -E and -S pass it by)")
        return tuple(found)

    def _ended(self, one: Firing) -> Firing:
        """A firing inside a rank with the moment at which we let the rank go on."""
        return replace(one, ended_ns=self._continued.get(one.t_ns, one.ended_ns))

    def _note(self, seen: Seen) -> None:
        self._seen.add(seen.rank)
        if self.counted and self.fault.action == "stop" and len(self._seen) == 1:
            self._follow()

    def _follow(self) -> None:
        """Ranks that stopped themselves at a collective are let go after their time."""
        for line in lines(self.site):
            if line["kind"] == "fired" and line["t_ns"] not in self._followed:
                who = self._followed[line["t_ns"]] = processes.identity(line["pid"])
                if who is not None:
                    cap_s = CAP_S if self.fault.target.for_s is None else self.fault.target.for_s
                    self._watch.later(cap_s, partial(self._let_go, line["t_ns"], who))
        self._watch.later(FOLLOW_S, self._follow)

    def _let_go(self, fired_ns: int, who: processes.Identity) -> None:
        if fired_ns not in self._continued:
            self._continued[fired_ns] = self.site.clock.now_ns()
            processes.send(who, signal.SIGCONT)

    def _send(self, seen: Seen) -> None:
        """Outside: the signal, exactly to this process."""
        self._seen.add(seen.rank)
        number = SIGNALS[self.fault.action]
        now_ns = self.site.clock.now_ns()
        if not processes.send(seen.who, number):
            self._watch.problems[f"pid {seen.who.pid} had ended before {number.name} could be sent"] = None
            return
        whom = "the command" if seen.rank is None else "the rank"
        detail = f"{number.name} to pid {seen.who.pid}, {whom}"
        if number == signal.SIGSTOP:
            self._stopped.append((seen.who, seen.rank))
            if not self._stands_still(seen.who):
                detail += ", which did not stop"
            cap_s = CAP_S if self.fault.target.for_s is None else self.fault.target.for_s
            self._watch.later(cap_s, lambda: self._continue(seen.who, seen.rank))
        self._fired.append(Firing(t_ns=now_ns, rank=seen.rank, detail=detail))

    def _stands_still(self, who: processes.Identity) -> bool:
        give_up = self.site.clock.monotonic() + STOPPED_WITHIN_S
        while (found := processes.read(who.pid)) is not None and found.start == who.start and not found.ended:
            if found.state in "Tt":
                return True
            if self.site.clock.monotonic() > give_up:
                return False
            self.site.clock.sleep(0.005)
        return False

    def _continue(self, who: processes.Identity, rank: int | None) -> None:
        """SIGCONT, once, and the moment noted in the firing."""
        now_ns = self.site.clock.now_ns()
        sent = processes.send(who, signal.SIGCONT)
        self._fired = [
            replace(one, ended_ns=now_ns, detail=one.detail + ("" if sent else ", which ended while it was stopped"))
            if one.rank == rank and one.ended_ns is None
            else one
            for one in self._fired
        ]


DETAILS = {
    "exit": "exit with {code}",
    "exit0": "exit with 0",
    "gil": "GIL held for {seconds:g} s",
    "exception": "{type} in the main thread",
    "fork": "a child that lives for {seconds:g} s",
}

injector = Injector(
    name="process",
    layer="process",
    title="a rank is killed, stopped, told to end, crashes, holds its interpreter, is interrupted by an exception, or forks",
    certifies_not="That other ranks notice: that is what is to be found out. A lost node loses its network and page cache too;"
    " here only the process goes, its sockets are closed by the kernel at once.",
    needs=("linux",),
    actions={
        "kill": Kill,
        "stop": Stop,
        "term": Term,
        "int": Int,
        "exit": Exit,
        "exit0": Exit0,
        "abort": Abort,
        "segfault": Segfault,
        "gil": Gil,
        "exception": Exception_,
        "fork": Fork,
    },
    targets=("rank", "op", "group", "nth", "after_s", "every", "times", "probability", "for_s"),
    make=ProcessInjection,
)
