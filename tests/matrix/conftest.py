"""A mirror without a network: a folder of tiny wheels named as dtprobe's requirements are, and torches of several versions.

Each fake torch holds its version and a `.pth` with the packages of this Python, so that a venv of nothing but tiny wheels can still run a
night; its own torch comes first there.
"""

from __future__ import annotations

import os
import sysconfig
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from dtprobe.matrix import venvs
from dtprobe.matrix.cells import EXTRAS

TORCHES = ("2.9.1", "2.10.0", "2.11.0", "2.12.0", "2.12.1", "2.13.0", "2.14.0")


def wheel(folder: Path, name: str, version: str, files: dict[str, str], requires: tuple[str, ...] = ()) -> None:
    """A wheel of just these files."""
    plain = name.lower().replace("-", "_").replace(".", "_")
    info = f"{plain}-{version}.dist-info"
    told = [f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}", *(f"Requires-Dist: {one}" for one in requires)]
    inside = {
        **files,
        f"{info}/METADATA": "\n".join(told) + "\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(f"{path},,\n" for path in (*inside, f"{info}/RECORD"))
    with zipfile.ZipFile(folder / f"{plain}-{version}-py3-none-any.whl", "w") as archive:
        for path, text in {**inside, f"{info}/RECORD": record}.items():
            archive.writestr(path, text)


@dataclass(frozen=True)
class Mirror:
    """`folder` has the wheels; `environ` makes uv and pip see nothing else, and puts every cache into a folder of the test's own."""

    folder: Path
    home: Path

    @property
    def environ(self) -> dict[str, str]:
        kept = {key: value for key, value in os.environ.items() if not key.startswith(("PIP_", "UV_", "PYTHON"))}
        return {
            **kept,
            "XDG_CACHE_HOME": str(self.home / "cache"),
            "UV_CACHE_DIR": str(self.home / "uv"),
            "UV_NO_CONFIG": "1",
            "PIP_CONFIG_FILE": os.devnull,
            "PIP_NO_INDEX": "1",
            "PIP_FIND_LINKS": str(self.folder),
            "PIP_CACHE_DIR": str(self.home / "pip"),
        }


@pytest.fixture
def mirror(tmp_path: Path) -> Mirror:
    folder = tmp_path / "wheels"
    folder.mkdir()
    here = sysconfig.get_path("purelib")
    for line in venvs.requirements(EXTRAS):
        wheel(folder, Requirement(line).name, "9999", {f"from_here_{Requirement(line).name.replace('-', '_')}.pth": here})
    for version in TORCHES:
        wheel(folder, "torch", version, {"torch/__init__.py": f"__version__ = {version!r}\n", "torch/later.py": ""})
    wheel(folder, "nvidia-nothing", "1", {"nvidia_nothing.py": ""})
    wheel(folder, "torch", "2.15.0", {"torch/__init__.py": "__version__ = '2.15.0'\n"}, ("nvidia-nothing",))
    wheel(folder, "torch", "2.8.0", {"torch/__init__.py": "raise ImportError('libcudart.so.13 is missing')"})
    return Mirror(folder, tmp_path / "home")
