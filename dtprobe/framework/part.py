"""What every part of the framework has in common: `probe()`, which says whether it can work here.

A part is a submodule of `dtprobe.framework` with a function `probe() -> Unavailable | None`. It costs milliseconds, starts
nothing, and works where the part's optional packages are absent: that is what it reports.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import pkgutil
from pathlib import Path

from packaging.requirements import Requirement

from dtprobe.errors import Unavailable


def torch_distributed() -> Unavailable | None:
    """None where torch with torch.distributed is installed."""
    if importlib.util.find_spec("torch") is None:
        return Unavailable("torch is not installed", "pip install torch, or make setup")
    import torch.distributed as dist

    return None if dist.is_available() else Unavailable("this torch was built without torch.distributed", "install another")


def package(requirement: str, *, extra: str) -> Unavailable | None:
    """None where a distribution that satisfies `requirement` ("mpi4py>=4") is installed; `extra` is dtprobe's extra that brings it."""
    wanted = Requirement(requirement)
    remedy = f"pip install 'dtprobe[{extra}]'"
    try:
        found = importlib.metadata.version(wanted.name)
    except importlib.metadata.PackageNotFoundError:
        return Unavailable(f"{wanted.name} is not installed", remedy)
    if not wanted.specifier.contains(found, prereleases=True):
        return Unavailable(f"{wanted.name} {found} does not satisfy {requirement}", remedy)
    return None


def parts() -> dict[str, Unavailable | None]:
    """Every part by name ("groups", "transport.mpi") and whether it can work here. Imports them all, and so torch."""
    return _parts(Path(__file__).parent, "")


def _parts(folder: Path, within: str) -> dict[str, Unavailable | None]:
    found: dict[str, Unavailable | None] = {}
    for module in pkgutil.iter_modules([str(folder)]):
        name = within + module.name
        try:
            part = importlib.import_module(f"dtprobe.framework.{name}")
        except ModuleNotFoundError as error:
            found[name] = Unavailable(f"{error.name} is not installed", "pip install it, or make setup")
            continue
        if hasattr(part, "probe"):
            found[name] = part.probe()
        elif module.ispkg:
            found |= _parts(folder / module.name, f"{name}.")
    return found
