"""Where a version of Python lies on this machine."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from dtprobe.errors import Unavailable

ASK = "import json, platform, sys; print(json.dumps([platform.python_version(), platform.python_implementation()]))"
ASK_TIMEOUT_S = 20.0


@dataclass(frozen=True, kw_only=True)
class Interpreter:
    """A Python that was asked and answered; `version` has three numbers."""

    path: Path
    version: str


def find(version: str, environ: Mapping[str, str]) -> Interpreter | Unavailable:
    """The CPython of this version (`3.12`, or `3.12.1` for just that): ours, one on PATH, of pyenv or of uv.

    Each is asked before it is believed: the shims of pyenv stand on PATH for versions that they then refuse to run.
    """
    seen: list[str] = []
    for path in dict.fromkeys(_candidates(version, environ)):
        found = _asked(path, environ)
        if found is not None and _fits(found.version, version):
            return found
        seen.append(f"{path} {'does not run' if found is None else f'is {found.version}'}")
    tried = f" ({'; '.join(seen)})" if seen else ""
    return Unavailable(
        f"no Python {version} on this machine{tried}", f"uv python install {version}, or pyenv install {version}"
    )


def _candidates(version: str, environ: Mapping[str, str]) -> Iterator[Path]:
    minor = ".".join(version.split(".")[:2])
    if sys.version_info[:2] == tuple(int(number) for number in minor.split(".")):
        yield Path(sys.base_prefix) / "bin" / f"python{minor}"
        yield Path(sys.executable)
    if on_path := shutil.which(f"python{minor}", path=environ.get("PATH")):
        yield Path(on_path)
    home = Path(environ.get("HOME", "/nonexistent"))
    roots = (
        Path(environ.get("PYENV_ROOT") or home / ".pyenv") / "versions",
        Path(environ.get("UV_PYTHON_INSTALL_DIR") or _data(environ, home) / "uv" / "python"),
    )
    for root in roots:
        for prefix in ("", "cpython-"):
            yield from sorted(root.glob(f"{prefix}{minor}[.-]*/bin/python{minor}"), reverse=True)


def _data(environ: Mapping[str, str], home: Path) -> Path:
    return Path(environ.get("XDG_DATA_HOME") or home / ".local" / "share")


def _asked(path: Path, environ: Mapping[str, str]) -> Interpreter | None:
    try:
        answer = subprocess.run(
            [path, "-I", "-c", ASK], check=False, env=environ, capture_output=True, text=True, timeout=ASK_TIMEOUT_S
        )
        version, implementation = json.loads(answer.stdout)
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return None
    return Interpreter(path=path, version=version) if implementation == "CPython" else None


def _fits(found: str, wanted: str) -> bool:
    return found.split(".")[: wanted.count(".") + 1] == wanted.split(".")
