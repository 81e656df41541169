"""Finds scenarios and injectors by path, as pytest finds tests, and knows the failure modes."""

from __future__ import annotations

import difflib
import importlib.util
import sys
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from dtprobe.errors import UsageError
from dtprobe.scenario import Scenario

if TYPE_CHECKING:
    from dtprobe.inject import Injector

PACKAGE = Path(__file__).resolve().parent


@dataclass(frozen=True)
class FailureMode:
    """A named way a distributed job goes wrong; `locus` is where the cause lies, `group` the taxonomy's class."""

    id: str
    group: str
    locus: str
    title: str


@dataclass(frozen=True)
class Broken:
    """A content folder that could not be loaded, and why, in one line."""

    folder: Path
    error: str


@dataclass(frozen=True)
class Catalog:
    """What was found: every scenario and variant, and every folder that is broken."""

    scenarios: tuple[Scenario, ...]
    broken: tuple[Broken, ...]

    def names(self) -> list[str]:
        """Ids of all scenarios, and the bare names that stand for a default variant."""
        return sorted({scenario.id for scenario in self.scenarios} | {scenario.name for scenario in self.scenarios})

    def find(self, name: str) -> Scenario:
        """The scenario called `name`, `name:variant`, with hyphens and underscores alike.

        A bare name with several variants means the one marked default. Raises UsageError with the closest names.
        """
        wanted, _, variant = _plain(name).partition(":")
        family = [scenario for scenario in self.scenarios if _plain(scenario.name) == wanted]
        if not family:
            for entry in self.broken:
                if _plain(entry.folder.name) == wanted:
                    raise UsageError(f"scenario {name!r} is broken: {entry.error}", f"mend {entry.folder}")
            raise UsageError(f"no scenario is called {name!r}", _closest(name, self.names()))
        if variant:
            for scenario in family:
                if _plain(scenario.variant) == variant:
                    return scenario
            variants = [scenario.variant for scenario in family if scenario.variant]
            known = f"its variants are {', '.join(variants)}" if variants else "it has no variants"
            raise UsageError(f"scenario {wanted!r} has no variant {variant!r}", _closest(variant, variants, known))
        return next((scenario for scenario in family if scenario.default or not scenario.variant), family[0])

    def chosen(self, names: Sequence[str]) -> list[Scenario]:
        """The scenarios with these names, a bare name meaning all its variants; all scenarios for no name. Raises as `find`."""
        found: dict[str, Scenario] = {}
        for name in names:
            one = self.find(name)
            whole = ":" not in name
            family = [scenario for scenario in self.scenarios if scenario.name == one.name] if whole else [one]
            found.update({scenario.id: scenario for scenario in family})
        return list(found.values()) if names else list(self.scenarios)


def _plain(name: str) -> str:
    return name.strip().lower().replace("_", "-")


def _closest(name: str, names: Iterable[str], otherwise: str = "`dtprobe list` shows what there is") -> str:
    close = difflib.get_close_matches(_plain(name), list(names), n=3, cutoff=0.5)
    return f"did you mean {', '.join(close)}?" if close else otherwise


@cache
def failure_modes() -> Mapping[str, FailureMode]:
    """The taxonomy: id -> failure mode."""
    with (PACKAGE / "taxonomy.toml").open("rb") as file:
        modes = tomllib.load(file)["modes"]
    return {name: FailureMode(name, entry["class"], entry["locus"], entry["title"]) for name, entry in modes.items()}


def roots(extra: Sequence[Path] = ()) -> list[Path]:
    """Folders that hold `scenarios/` and `injectors/`: the checkout or the installed content, plug-ins, then `extra`.

    Raises UsageError for an extra folder that does not exist.
    """
    checkout = PACKAGE.parent
    found = [checkout if (checkout / "scenarios").is_dir() else PACKAGE / "content"]
    for entry in entry_points(group="dtprobe.content"):
        target = entry.load()
        found.append(Path(target() if callable(target) else target))
    for folder in extra:
        if not folder.is_dir():
            raise UsageError(f"--path {folder}: no such folder", "name a folder that holds scenarios/ or injectors/")
        found.append(folder.resolve())
    return found


def load_module(path: Path, name: str) -> ModuleType:
    """Import a content file by its path under a private name; raises whatever its import raises.

    What lies beside it is imported relatively: `from .judges import ...`.
    """
    spec = importlib.util.spec_from_file_location(name, path, submodule_search_locations=[str(path.parent)])
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    for beside in [known for known in sys.modules if known.startswith(f"{name}.")]:
        del sys.modules[beside]  # another folder of this name was loaded before
    sys.modules[name] = module  # dataclasses look their module up by name
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def content_folders(kind: str, extra: Sequence[Path] = ()) -> list[Path]:
    """Every folder `<root>/<kind>/<name>/` that holds the file `<kind without s>.py`.

    An extra folder may also hold the named folders directly, or be one of them.
    """
    file = f"{kind.removesuffix('s')}.py"
    own = len(roots())
    found: dict[Path, None] = {}
    for number, root in enumerate(roots(extra)):
        for pattern in (f"{kind}/*/{file}", *((f"*/{file}", file) if number >= own else ())):
            for path in sorted(root.glob(pattern)):
                found.setdefault(path.parent)
    return list(found)


def load(extra: Sequence[Path] = ()) -> Catalog:
    """All scenarios of the checkout or the installed content, of plug-ins and of the extra folders.

    A folder that cannot be loaded is kept as `Broken` and hides nothing else.
    """
    scenarios: dict[str, Scenario] = {}
    broken: list[Broken] = []
    for folder in content_folders("scenarios", extra):
        try:
            found = scenarios_of(folder)
            for scenario in found:
                if scenario.id in scenarios:
                    raise UsageError(f"{scenario.id} exists already in {scenarios[scenario.id].folder}", "rename one")
            scenarios.update({scenario.id: scenario for scenario in found})
        except (Exception, SystemExit) as error:  # noqa: BLE001  foreign code: whatever it raises is that folder's error
            broken.append(Broken(folder, _one_line(error)))
    return Catalog(tuple(scenarios.values()), tuple(broken))


def scenarios_of(folder: Path) -> list[Scenario]:
    """The scenarios that a folder's `scenario.py` defines; raises UsageError for what is none, and whatever its import raises."""
    module = load_module(folder / "scenario.py", f"_dtprobe_scenario_{folder.name.replace('-', '_')}")
    found = list(dict.fromkeys(id(value) for value in vars(module).values() if isinstance(value, Scenario)))
    by_id = {id(value): value for value in vars(module).values() if isinstance(value, Scenario)}
    if not found:
        raise UsageError("scenario.py defines no Scenario", "assign one at module level")
    checked = []
    for key in found:
        scenario = by_id[key]
        if not scenario._judges:
            continue
        if _plain(scenario.name) != _plain(folder.name):
            raise UsageError(
                f"scenario.py names its scenario {scenario.name!r} in a folder called {folder.name!r}", "make them equal"
            )
        if scenario.failure_mode not in failure_modes():
            raise UsageError(
                f"{scenario.id}: failure mode {scenario.failure_mode!r} is not in the taxonomy",
                _closest(scenario.failure_mode, failure_modes(), "add it to taxonomy.toml"),
            )
        if unknown := [mode for mode in scenario.looks_like if mode not in failure_modes()]:
            raise UsageError(
                f"{scenario.id}: looks_like {unknown[0]!r} is not in the taxonomy",
                _closest(unknown[0], failure_modes(), "add it to taxonomy.toml"),
            )
        for arm in scenario.arms.values():
            if not (folder / arm.program).is_file():
                raise UsageError(f"{scenario.id}: {arm.program} does not exist in {folder}", "name a file of that folder")
        checked.append(replace(scenario, folder=folder))
    if not checked:
        raise UsageError("no Scenario of scenario.py has a judge", "decorate one with @scenario.judge")
    return checked


def injectors(extra: Sequence[Path] = ()) -> tuple[dict[str, Injector], tuple[Broken, ...]]:
    """Every injector by its name, and the folders that could not be loaded."""
    from dtprobe.inject import Injector

    found: dict[str, Injector] = {}
    broken: list[Broken] = []
    for folder in content_folders("injectors", extra):
        try:
            module = load_module(folder / "injector.py", f"_dtprobe_injector_{folder.name.replace('-', '_')}")
            made = [value for value in vars(module).values() if isinstance(value, Injector)]
            if len(made) != 1:
                raise UsageError(f"injector.py defines {len(made)} Injectors", "define exactly one at module level")
            if _plain(made[0].name) != _plain(folder.name):
                raise UsageError(
                    f"injector.py names its injector {made[0].name!r} in a folder called {folder.name!r}", "make them equal"
                )
            if made[0].name in found:
                raise UsageError(f"{made[0].name} exists already in {found[made[0].name].folder}", "rename one")
            found[made[0].name] = replace(made[0], folder=folder)
        except (Exception, SystemExit) as error:  # noqa: BLE001  foreign code: whatever it raises is that folder's error
            broken.append(Broken(folder, _one_line(error)))
    return found, tuple(broken)


def _one_line(error: BaseException) -> str:
    text = str(error) if isinstance(error, UsageError) else f"{type(error).__name__}: {error}"
    return " ".join(text.split())[:400]
