"""What the checks ask of a machine: the seam through which a test can put another one in its place."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from dtprobe.errors import Unavailable

RUN_TIMEOUT_S = 3.0
_CAPABILITY_BITS = {"CAP_NET_ADMIN": 12, "CAP_SYS_PTRACE": 19, "CAP_SYS_ADMIN": 21}
_LIBRARY_FOLDERS = (
    "usr/lib",
    "usr/lib64",
    "lib",
    "lib64",
    "usr/local/lib",
    "usr/local/lib64",
    "usr/lib/*-linux-gnu",
    "lib/*-linux-gnu",
)


@dataclass(frozen=True)
class Missing(Unavailable):
    """Unavailable only because packages are not installed, `apt` and `pip` ones: the remedy is the line that installs them."""

    apt: tuple[str, ...] = ()
    pip: tuple[str, ...] = ()

    @classmethod
    def of(cls, reason: str, *, apt: Sequence[str] = (), pip: Sequence[str] = ()) -> Missing:
        quoted = (f"'{package}'" if any(mark in package for mark in "<>=!~[") else package for package in pip)
        lines = [f"apt-get install {' '.join(apt)}"] if apt else []
        lines += [f"pip install {' '.join(quoted)}"] if pip else []
        return cls(reason, " && ".join(lines), tuple(apt), tuple(pip))

    @classmethod
    def all(cls, several: Sequence[Missing], reason: str = "") -> Missing:
        """Several as one, for one reason or all of theirs; each package is named once."""
        return cls.of(
            reason or ", ".join(one.reason for one in several),
            apt=list(dict.fromkeys(package for one in several for package in one.apt)),
            pip=list(dict.fromkeys(package for one in several for package in one.pip)),
        )


@dataclass(frozen=True)
class Ran:
    """How a command ended: its exit code, None where it could not be started or took too long, and the first line it complained in."""

    code: int | None
    complaint: str


@dataclass(frozen=True)
class Machine:
    """This machine as the checks see it. `root` is where `/proc`, `/sys`, `/dev` and `/usr` lie; `euid` is the effective user."""

    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)
    root: Path = Path("/")
    euid: int = field(default_factory=os.geteuid)
    system: str = sys.platform
    python: str = field(default_factory=lambda: sys.executable)
    cores: int = field(default_factory=lambda: len(os.sched_getaffinity(0)))

    def which(self, command: str) -> Path | None:
        """The command on PATH, beside the interpreter, or where only root's PATH looks."""
        beside = str(Path(self.python).parent) if self.python else ""
        path = os.pathsep.join(filter(None, (self.environ.get("PATH", os.defpath), beside, "/usr/sbin", "/sbin")))
        found = shutil.which(command, path=path)
        return Path(found) if found else None

    def path(self, absolute: str) -> Path:
        """`/proc/...` of this machine."""
        return self.root / absolute.lstrip("/")

    def text(self, absolute: str) -> str | None:
        """A small file's text, None where it is absent or may not be read."""
        try:
            return self.path(absolute).read_text(encoding="utf-8", errors="replace")
        except OSError:
            return None

    def refusal(self, absolute: str, flags: int = os.O_RDWR) -> str | None:
        """Why a device cannot be opened; None where it can."""
        try:
            os.close(os.open(self.path(absolute), flags | os.O_CLOEXEC))
        except OSError as error:
            return error.strerror
        return None

    def library(self, *stems: str) -> Path | None:
        """The first shared library whose name begins with one of `stems`."""
        for folder in _LIBRARY_FOLDERS:
            for stem in stems:
                for found in self.root.glob(f"{folder}/{stem}*"):
                    return found
        return None

    def version(self, distribution: str) -> str | None:
        """The installed version of a Python distribution, from its metadata: nothing is imported."""
        try:
            return metadata.version(distribution)
        except metadata.PackageNotFoundError:
            return None

    def package_folder(self, module: str) -> Path | None:
        """Where a top-level package lies, without importing it."""
        try:
            spec = find_spec(module)
        except (ImportError, ValueError):
            return None
        places = list(spec.submodule_search_locations or ()) if spec else []
        return Path(places[0]) if places else None

    @cached_property
    def privileges(self) -> frozenset[str]:
        """Those of the kernel's capabilities that the checks ask about and this process has."""
        for line in (self.text("/proc/self/status") or "").splitlines():
            if line.startswith("CapEff:"):
                mask = int(line.split()[1], 16)
                return frozenset(name for name, bit in _CAPABILITY_BITS.items() if mask >> bit & 1)
        return frozenset()

    def run(self, *argv: str, timeout_s: float = RUN_TIMEOUT_S) -> Ran:
        """Runs a short command that leaves nothing behind."""
        program = self.which(argv[0])
        if program is None:
            return Ran(None, f"{argv[0]} is not installed")
        environ = {**self.environ, "LC_ALL": "C"}
        try:
            done = subprocess.run(
                (str(program), *argv[1:]),
                env=environ,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=timeout_s,
                check=False,
            )
        except OSError as error:
            return Ran(None, f"{program}: {error.strerror}")
        except subprocess.TimeoutExpired:
            return Ran(None, f"{argv[0]} did not answer in {timeout_s:g} s")
        lines = (done.stderr or done.stdout).decode(errors="replace").strip().splitlines()
        return Ran(done.returncode, lines[0][:200] if lines else f"{argv[0]} ended with {done.returncode}")

    def answers(self, socket_path: str) -> bool:
        """Whether someone accepts connections on a unix socket."""
        with socket.socket(socket.AF_UNIX) as client:
            client.settimeout(1.0)
            try:
                client.connect(str(self.path(socket_path)))
            except OSError:
                return False
        return True
