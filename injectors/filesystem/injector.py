"""A folder as an ailing file system shows it: stale, slow, failing, full, or losing what is written, rank by rank."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from dtprobe.errors import Unavailable, UsageError
from dtprobe.inject import Injector
from dtprobe.inject.helped import HelpedInjection
from dtprobe.inject.spec import Fault
from dtprobe.probes import RankProcess

HERE = Path(__file__).resolve().parent
LASTING_S = 600.0
SCRATCH = "{scratch}"
"""In `path`: the run's scratch folder, which the ranks know as DTPROBE_SCRATCH."""

CALLS = (
    *("getattr", "readdir", "readlink", "statfs"),
    *("create", "mkdir", "symlink", "link", "unlink", "rmdir", "rename", "chmod", "chown", "utimens", "truncate", "fallocate"),
    *("open", "read", "write", "flush", "fsync", "lock"),
)
"""What the kernel asks of a file system, under libfuse's names: `flush` is close(2), `getattr` also looks a name up."""

MEANT: Mapping[str, tuple[str, ...]] = {
    "delay": CALLS,
    "eio": ("read", "write", "fsync"),
    "enospc": ("write", "create", "mkdir", "symlink", "link", "truncate", "fallocate"),
    "torn": ("write",),
    "lost": ("write",),
}
"""Action -> the calls that it meets where `op` names none."""

MAY: Mapping[str, tuple[str, ...]] = {**MEANT, "eio": CALLS}
"""Action -> the calls that `op` may name."""

KERNEL = ("/proc", "/sys", "/dev")


def _seconds(value: float) -> None:
    if not 0 < value <= LASTING_S:
        raise ValueError(f"seconds={value:g} is not between 0 and {LASTING_S:g}")


@dataclass(frozen=True, kw_only=True)
class Cache:
    """Answers are told again for `seconds` after they were found, as an NFS client does: attributes (`attr`), names that
    are gone (`entry`) and names that were not there (`negative`). `cto=no`: opening a file asks nothing anew (NFS's nocto)."""

    path: str
    files: str = "*"
    seconds: float = 6.0
    what: tuple[Literal["attr", "entry", "negative"], ...] = ("attr", "entry", "negative")
    cto: bool = True

    def __post_init__(self) -> None:
        _seconds(self.seconds)


@dataclass(frozen=True, kw_only=True)
class Delay:
    """A call takes `seconds` longer."""

    path: str
    files: str = "*"
    seconds: float

    def __post_init__(self) -> None:
        _seconds(self.seconds)


@dataclass(frozen=True, kw_only=True)
class Eio:
    """A call fails with EIO; reads, writes and fsync where `op` names no other."""

    path: str
    files: str = "*"


@dataclass(frozen=True, kw_only=True)
class Enospc:
    """Writing, creating and growing fail with ENOSPC."""

    path: str
    files: str = "*"


@dataclass(frozen=True, kw_only=True)
class Torn:
    """Only the first `bytes` of a write (half of it by default) reach the folder; the writer is told that all did."""

    path: str
    files: str = "*"
    bytes: int | None = None

    def __post_init__(self) -> None:
        if self.bytes is not None and self.bytes < 0:
            raise ValueError(f"bytes={self.bytes} is negative")


@dataclass(frozen=True, kw_only=True)
class Lost:
    """Nothing of a write reaches the folder; the writer is told that all did."""

    path: str
    files: str = "*"


def _check(fault: Fault) -> None:
    target = fault.target
    if fault.action == "cache":
        for key in ("op", "nth", "every", "times", "probability"):
            if getattr(target, key) is not None:
                raise ValueError(f"a cache is no call that can be counted: leave {key} out")
    elif target.op is not None and target.op not in MAY[fault.action]:
        raise ValueError(f"op={target.op} is none of {', '.join(MAY[fault.action])}")


class FilesystemInjection(HelpedInjection):
    """A view of the folder for each rank, as clients of one server have; faults of one folder share a rank's view."""

    name = "filesystem"
    program = HERE / "views.py"

    @property
    def root(self) -> Path:
        config: Any = self.fault.config
        return Path(config.path.replace(SCRATCH, str(self.site.scratch))).absolute().resolve()

    def check(self) -> Unavailable | None:
        root, config = self.root, self.fault.config
        path = getattr(config, "path")  # noqa: B009
        if root == Path("/") or any(root.is_relative_to(part) for part in KERNEL):
            return Unavailable(f"path={path}: {root} cannot be viewed through another file system", "name a folder below it")
        if self._ours():
            return None
        if not root.exists():
            return Unavailable(f"path={path}: there is no folder {root}", "make it first, or check the path")
        if not root.is_dir():
            return Unavailable(f"path={path}: {root} is no folder", f"path={root.parent},files={root.name}")
        return None

    def prepare(self) -> None:
        if self._ours():
            self.root.mkdir(parents=True, exist_ok=True)
        for other in self.shared.parts() if self.shared.folder.is_dir() else ():
            first, second = Path(other["place"]), self.root
            if first != second and (first.is_relative_to(second) or second.is_relative_to(first)):
                raise UsageError(
                    f"filesystem faults on {first} and {second}: one lies in the other", "aim one of them by files="
                )
        super().prepare()

    def part(self) -> Mapping[str, Any]:
        config: Any = self.fault.config
        op, action = self.fault.target.op, self.fault.action
        return {**asdict(config), "calls": [op] if op else list(MEANT.get(action, ()))}

    def place(self) -> str:
        return str(self.root)

    def front(self) -> Sequence[str]:
        enter = (sys.executable, "-I", "-S", str(HERE / "enter.py"))
        return (*enter, str(self.shared.folder), self.socket, str(self.log), str(self.site.index), str(self.root), "{folder}")

    def config(self, parts: Sequence[Mapping[str, Any]], held: Sequence[RankProcess]) -> Mapping[str, Any]:
        return {
            "parts": parts,
            "root": str(self.root),
            "folder": str(self.shared.folder),
            "views": str(self.shared.folder / f"views-{self.leader:03}"),
            "socket": self.socket,
            "spared": str(self.site.folder.resolve()),
        }

    @property
    def socket(self) -> str:
        return f"{self.leader:03}.sock"

    def silence(self) -> str:
        what = "told of a change too late" if self.fault.action == "cache" else "met by it"
        return (
            f"no call on {self.root} was {what}: no rank that is meant did anything like it there, or it runs no Python that takes"
            " the hook"
        )

    def _ours(self) -> bool:
        """Whether the folder is in the run's scratch folder: then it is made."""
        return self.root.is_relative_to(self.site.scratch.resolve())


injector = Injector(
    name="filesystem",
    layer="filesystem",
    title="ranks see a folder through a file system that caches as NFS does, is slow, fails, is full, or loses what is written",
    certifies_not="An NFS, Lustre or object store client: how long each of them keeps what, and what makes it ask anew. Nor what lies"
    " in the page cache: a rank that reads back what it wrote may see it although it was lost.",
    needs=("linux>=5.2", "fuse", "mount"),
    actions={"cache": Cache, "delay": Delay, "eio": Eio, "enospc": Enospc, "torn": Torn, "lost": Lost},
    targets=("rank", "op", "nth", "after_s", "every", "times", "probability", "for_s"),
    make=FilesystemInjection,
    check=_check,
)
