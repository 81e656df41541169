"""Faults at the entry points of libnccl, by a preloaded library that also records every call into a ring."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import psutil

from dtprobe.catalog import load_module
from dtprobe.errors import Unavailable, UsageError
from dtprobe.inject import Firing, Injection, Injector, Site, Target
from dtprobe.inject.spec import Fault
from dtprobe.probes import RankProcess
from dtprobe.readers.artifact import ReaderError, json_lines
from dtprobe.readers.nccl_ring import REDOPS, RESULTS, read_nccl_header

HERE = Path(__file__).resolve().parent
build = load_module(HERE / "build.py", "_dtprobe_injector_nccl_build")

CAP_S = 600.0
"""How long a block lasts at most where for_s does not say."""
NANO = 1_000_000_000
GROUPS = ("collective", "p2p", "init", "any")
"""Words that stand for several calls: every collective; send and receive; every form of communicator creation; everything."""


@dataclass(frozen=True)
class Call:
    """An entry point that the shim stands in front of; `may` are the faults it takes beside fail, delay and block."""

    name: str
    family: str
    kind: str
    may: frozenset[str]


def calls() -> dict[str, Call]:
    """The entry points, read from the table that the C compiler reads."""
    lines = re.findall(r"^CALL\((\w+), (\w+), (\w+), ([A-Z0-9 |]+)\)", (HERE / "calls.h").read_text("utf-8"), re.MULTILINE)
    return {
        name: Call(name, family, kind.lower(), frozenset(part.strip().lower() for part in may.split("|")) - {"0"})
        for name, family, kind, may in lines
    }


Result = Literal[
    "ncclUnhandledCudaError",
    "ncclSystemError",
    "ncclInternalError",
    "ncclInvalidArgument",
    "ncclInvalidUsage",
    "ncclRemoteError",
    "ncclInProgress",
    "ncclTimeout",
]
Operation = Literal["sum", "prod", "max", "min", "avg"]


class _Action(Protocol):
    """What all actions share: which call, on which communicator."""

    @property
    def call(self) -> str: ...

    @property
    def comm(self) -> str | None: ...


def _check(action: _Action, needs: str | None = None) -> None:
    """Raises ValueError for a call that the shim does not know, or that cannot take this fault."""
    known = calls()
    if action.call not in known and action.call not in GROUPS:
        raise ValueError(f"call={action.call} is none of {', '.join(GROUPS)}, {', '.join(known)}")
    if action.comm is not None and not re.fullmatch(r"[0-9]{1,6}|[0-9a-f]{16}", action.comm):
        raise ValueError(f"comm={action.comm} is neither an index from 0 nor 16 hexadecimal digits")
    if needs is None or action.call == "any":
        return
    able = [call.name for call in known.values() if needs in call.may]
    reached = [call for call in known.values() if action.call in (call.name, call.family, call.kind)]
    if not any(needs in call.may for call in reached):
        raise ValueError(f"{action.call} cannot take this fault; it is for {', '.join(able)}")


@dataclass(frozen=True, kw_only=True)
class Fail:
    """The call returns an error without reaching NCCL (ncclGroupEnd: it closes the group, then reports the error)."""

    call: str
    result: Result = "ncclSystemError"
    comm: str | None = None

    def __post_init__(self) -> None:
        _check(self)

    def words(self, target: Target) -> dict[str, object]:
        return {"action": "fail", "result": RESULTS.index(self.result)}


@dataclass(frozen=True, kw_only=True)
class Delay:
    """The call comes late: the host waits before it, or the stream does (`where=stream`, needs CUDA)."""

    call: str = "collective"
    seconds: float
    where: Literal["host", "stream"] = "host"
    comm: str | None = None

    def __post_init__(self) -> None:
        _check(self)
        if not 0 < self.seconds <= 3600:
            raise ValueError(f"seconds={self.seconds:g} is not between 0 and 3600")

    def words(self, target: Target) -> dict[str, object]:
        return {"action": "delay", "hold_ns": round(self.seconds * NANO), "stream": int(self.where == "stream")}


@dataclass(frozen=True, kw_only=True)
class Block:
    """The call does not return until the injection ends or for_s is over. `where=stream` is a black hole: the call returns,
    its work never begins (needs CUDA)."""

    call: str = "collective"
    where: Literal["host", "stream"] = "host"
    comm: str | None = None

    def __post_init__(self) -> None:
        _check(self)

    def words(self, target: Target) -> dict[str, object]:
        cap_s = CAP_S if target.for_s is None else target.for_s
        return {"action": "block", "hold_ns": round(cap_s * NANO), "stream": int(self.where == "stream")}


@dataclass(frozen=True, kw_only=True)
class Drop:
    """The call returns success and NCCL never hears of it."""

    call: str = "collective"
    comm: str | None = None

    def __post_init__(self) -> None:
        _check(self, "drop")

    def words(self, target: Target) -> dict[str, object]:
        return {"action": "drop"}


@dataclass(frozen=True, kw_only=True)
class Count:
    """The call moves fewer elements than asked: `count` of them, by default half. Never more: buffers end where they end."""

    call: str = "collective"
    count: int | None = None
    comm: str | None = None

    def __post_init__(self) -> None:
        _check(self, "count")
        if self.count is not None and self.count < 0:
            raise ValueError(f"count={self.count} is negative")

    def words(self, target: Target) -> dict[str, object]:
        return {"action": "count", "value": self.count}


@dataclass(frozen=True, kw_only=True)
class Root:
    """The call goes to another root or peer: `root`, by default the next rank of the communicator."""

    call: str = "ncclBroadcast"
    root: int | None = None
    comm: str | None = None

    def __post_init__(self) -> None:
        _check(self, "root")
        if self.root is not None and self.root < 0:
            raise ValueError(f"root={self.root} is negative")

    def words(self, target: Target) -> dict[str, object]:
        return {"action": "root", "value": self.root}


@dataclass(frozen=True, kw_only=True)
class Op:
    """The call reduces by another operation: `redop`, by default max instead of sum and sum instead of any other."""

    call: str = "ncclAllReduce"
    redop: Operation | None = None
    comm: str | None = None

    def __post_init__(self) -> None:
        _check(self, "op")

    def words(self, target: Target) -> dict[str, object]:
        return {"action": "op", "value": None if self.redop is None else REDOPS.index(self.redop)}


@dataclass(frozen=True, kw_only=True)
class AsyncError:
    """From this call on its communicator reports an asynchronous error, as after a broken connection."""

    call: str = "ncclCommGetAsyncError"
    result: Result = "ncclRemoteError"
    comm: str | None = None

    def __post_init__(self) -> None:
        _check(self)

    def words(self, target: Target) -> dict[str, object]:
        return {"action": "async", "result": RESULTS.index(self.result)}


def plan_line(fault: Fault, seed: int, index: int) -> str:
    """The fault as the shim reads it: `fault key=value ... label=<the fault in the grammar>`."""
    config: Any = fault.config
    target = fault.target
    words: dict[str, object] = config.words(target)
    words["call"] = config.call
    if config.comm is not None:
        words["comm" if len(config.comm) == 16 else "comm_index"] = config.comm
    if target.rank is not None:
        words["rank"] = "+".join(map(str, target.rank))
    if target.nth is not None:
        words["nth"] = "+".join(map(str, target.nth))
    words["every"] = target.every
    words["times"] = target.times
    if target.probability is not None:
        words["ppm"] = round(target.probability * 1_000_000)
        words["seed"] = int.from_bytes(hashlib.sha256(f"{seed} {index}".encode()).digest()[:8], "little")
    if target.after_s:
        words["after_ns"] = round(target.after_s * NANO)
    pairs = [f"{key}={value}" for key, value in words.items() if value is not None]
    return " ".join(["fault", *pairs, f"label={fault}"])


PLAN_HEAD = "dtprobe-nccl-plan 1\n"
MOST_FAULTS, MOST_BYTES, MOST_NUMBERS = 64, 128 * 1024, 16000


class NcclInjection(Injection):
    """One fault of the plan that all nccl faults of an arm run share; ranks that are not aimed at are recorded too."""

    def __init__(self, fault: Fault, site: Site) -> None:
        self.fault = fault
        self.site = site
        own = hashlib.sha256(str(site.folder).encode()).hexdigest()[:12]
        self.plan = site.scratch / f"nccl-{own}.plan"
        self._position = 0
        self._shim: Path | None = None
        self._pids: list[int] = []

    def check(self) -> Unavailable | None:
        made = build.shim(self.site.box.environ)
        if isinstance(made, Unavailable):
            return made
        self._shim = made
        if not libraries(self.site.box.environ):
            return Unavailable(
                "no libnccl.so is found: not with this Python's torch or nvidia packages, not in LD_LIBRARY_PATH,"
                " not in the loader's cache",
                "add its folder to LD_LIBRARY_PATH, or use collective:, which reaches gloo too",
            )
        return None

    def prepare(self) -> None:
        if self._shim is None and (reason := self.check()):
            raise UsageError(f"fault {str(self.fault)!r} cannot reach its target here: {reason.reason}", reason.remedy)
        lines = self.plan.read_text("utf-8") if self.plan.exists() else PLAN_HEAD
        self._position = lines.count("\n") - 1
        lines += plan_line(self.fault, self.site.seed, self.site.index) + "\n"
        if self._position >= MOST_FAULTS or len(lines) >= MOST_BYTES or lines.count("+") >= MOST_NUMBERS:
            raise UsageError(
                f"a plan of {self._position + 1} faults and {len(lines)} bytes is more than the shim takes",
                f"keep below {MOST_FAULTS} nccl faults that name {MOST_NUMBERS} calls and ranks in all",
            )
        fresh = self.plan.with_suffix(".new")
        fresh.write_text(lines, "utf-8")
        fresh.replace(self.plan)

    def environ(self, rank: int | None) -> Mapping[str, str]:
        return recording(self._shim, self.site.folder, self.site.box.environ) | {"DTPROBE_NCCL_PLAN": str(self.plan)}

    def start(self, processes: Sequence[RankProcess]) -> None:
        self._pids = [one.pid for one in processes]

    def stop(self) -> tuple[Firing, ...]:
        """Blocks end, for the plan is gone; what fired is read from the logs of the shim."""
        self.plan.unlink(missing_ok=True)
        return tuple(sorted(_firings(self._lines()), key=lambda one: one.t_ns))

    def problems(self) -> tuple[str, ...]:
        """Why the fault did not fire, or not always, as far as the shim and the processes tell; one sentence each."""
        found: dict[str, None] = {}
        for line in _logs(self.site.folder):
            where = "" if line.get("rank") is None else f"rank {line['rank']}: "
            if line.get("kind") == "problem":
                found[f"{where}{line.get('text')}"] = None
            elif line.get("kind") == "not_applied" and line.get("index") == self._position:
                found[f"{where}not applied to {line.get('call')} {line.get('nth')}: {line.get('text')}"] = None
        rings = [read for path in _files(self.site.folder, "ring") if (read := _ring(path))]
        called = {ring.pid for ring in rings}
        for pid, path in _bypassed(self._pids):
            if pid not in called:
                found[f"pid {pid}: {path} is loaded but was never called through the shim"] = None
        if not rings:
            found["no NCCL call came through the shim"] = None
        return tuple(found)

    def _lines(self) -> list[dict[str, Any]]:
        return [line for line in _logs(self.site.folder) if line.get("index") == self._position]


def recording(shim: Path | None, folder: Path, environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The variables under which a job records its NCCL calls into `folder`/rank<k>/nccl-<pid>.ring, without any fault.

    What `environ` preloads already is kept, behind the shim.
    """
    others = environ.get("LD_PRELOAD", "").replace(":", " ").split()
    return {"LD_PRELOAD": ":".join([str(shim), *others]), "DTPROBE_NCCL_FOLDER": str(folder)}


def libraries(environ: Mapping[str, str] = os.environ) -> list[str]:
    """Where a libnccl that a job may use is seen: with this Python's packages, in LD_LIBRARY_PATH, in the loader's cache."""
    folders = [Path(part) for part in environ.get("LD_LIBRARY_PATH", "").split(":") if part]
    for package, below in (("torch", "lib"), ("nvidia", "nccl/lib")):
        spec = importlib.util.find_spec(package)
        folders += [Path(root) / below for root in (spec.submodule_search_locations or () if spec else ())]
    found = [str(path) for folder in folders for name in ("libnccl.so*", "libtorch_cuda.so") for path in folder.glob(name)]
    loader = Path("/etc/ld.so.cache")
    if loader.is_file() and b"libnccl.so" in loader.read_bytes():
        found.append(str(loader))
    return found


def _files(folder: Path, ending: str) -> list[Path]:
    return sorted([*folder.glob(f"nccl-*.{ending}"), *folder.glob(f"rank*/nccl-*.{ending}")])


def _logs(folder: Path) -> Iterator[dict[str, Any]]:
    for path in _files(folder, "jsonl"):
        try:
            yield from json_lines(path)
        except ReaderError as error:
            yield {"kind": "problem", "text": str(error)}


def _ring(path: Path) -> Any:
    try:
        return read_nccl_header(path)
    except ReaderError:
        return None


def _firings(lines: Sequence[Mapping[str, Any]]) -> Iterator[Firing]:
    ends = {(line["pid"], line["nth"]): line for line in lines if line["kind"] == "ended"}
    for line in lines:
        if line["kind"] != "fired":
            continue
        end = ends.get((line["pid"], line["nth"]))
        yield Firing(
            t_ns=line["t_ns"],
            rank=line["rank"],
            call=line["call"],
            nth=line["nth"],
            ended_ns=end["t_ns"] if end else None,
            detail=line["text"] or (end["text"] if end else ""),
        )


def _bypassed(pids: Sequence[int]) -> Iterator[tuple[int, str]]:
    """Processes of these trees that are alive and have a libnccl in their memory, with its path."""
    for pid in pids:
        try:
            root = psutil.Process(pid)
            for process in (root, *root.children(recursive=True)):
                for mapped in process.memory_maps():
                    if Path(mapped.path).name.startswith("libnccl.so"):
                        yield process.pid, mapped.path
                        break
        except psutil.Error:
            continue


def probe() -> Unavailable | None:
    """Whether the shim can be compiled here."""
    if not sys.platform.startswith("linux"):
        return Unavailable("LD_PRELOAD and /proc are Linux's", "")
    cc = build.compiler()
    return cc if isinstance(cc, Unavailable) else None


injector = Injector(
    name="nccl",
    layer="nccl",
    title="NCCL calls fail, come late, block, get lost or carry other arguments; every call is recorded",
    certifies_not="What happens inside a collective that was launched: links, transports, GPU kernels. Programs that find"
    " libnccl by dlopen and dlsym pass by (this is reported), static copies and device-side calls too (this is not).",
    needs=("linux", "cc"),
    actions={
        "fail": Fail,
        "delay": Delay,
        "block": Block,
        "drop": Drop,
        "count": Count,
        "root": Root,
        "op": Op,
        "async_error": AsyncError,
    },
    targets=("rank", "nth", "every", "times", "probability", "after_s", "for_s"),
    make=NcclInjection,
    probe=probe,
)
