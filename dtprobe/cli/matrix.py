"""Versions, world sizes and launchers side by side: the matrix of a night, what changed between them, and where exactly."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from dtprobe.cli.base import Json, Out, Paths, app

if TYPE_CHECKING:
    from dtprobe.matrix.cells import Axes

matrix = typer.Typer(
    no_args_is_help=True,
    help="What changes between versions of torch and Python, world sizes and launchers. `dtprobe nightly --torch 2.9.1,2.13.0` runs one.",
)
app.add_typer(matrix, name="matrix")


@matrix.command()
def show(
    which: Annotated[
        str, typer.Argument(metavar="[MATRIX|history]", help="An id below suites/, or all that was ever run.")
    ] = "history",
    out: Out = Path("runs"),
    as_json: Json = False,
) -> None:
    """The table of a matrix and its changes; without one, the changes that the whole history shows.

    Example: `dtprobe matrix show --json | jq '.changes[].words'`
    """
    from rich.console import Console

    from dtprobe.matrix import pages
    from dtprobe.matrix.compare import changes, observed
    from dtprobe.matrix.run import read, resumable

    if which == "history":
        data: Mapping[str, Any] = {"changes": [one.as_json() for one in changes(observed(out))]}
    else:
        data = read(resumable(out, which) or Path(which))
    if as_json:
        print(json.dumps(data, indent=2))
    else:
        pages.render(data, Console())


@matrix.command()
def bisect(
    scenario: Annotated[str, typer.Argument(help="A scenario, or `scenario:variant`.")],
    good: Annotated[str, typer.Option("--good", help="A torch version with the one verdict.")],
    bad: Annotated[str, typer.Option("--bad", help="A torch version with the other.")],
    python: Annotated[str | None, typer.Option("--python", help="Version of Python (default: this one).")] = None,
    runs: Annotated[int, typer.Option("--runs", min=1, help="Runs in each version, for a scenario of two minds.")] = 1,
    repeats: Annotated[int | None, typer.Option("--repeats", help="Repeats of each arm (default: the scenario's own).")] = None,
    resume: Annotated[
        str | None, typer.Option("--resume", metavar="[MATRIX|latest]", help="Go on with one that was ended.")
    ] = None,
    file: Annotated[
        Path | None, typer.Option("--matrix", metavar="FILE", help="Whose [install] says where torch comes from.")
    ] = None,
    out: Out = Path("runs"),
    as_json: Json = False,
    path: Paths = None,
) -> None:
    """The first torch version with another verdict, found by halving: each version that is tried gets a venv and a run.

    Example: `dtprobe matrix bisect timeout-not-inherited --good 2.9.1 --bad 2.13.0`
    """
    from rich.console import Console

    from dtprobe import catalog
    from dtprobe.matrix import bisect as halving
    from dtprobe.matrix import pages

    name = catalog.load(path or ()).find(scenario).id
    given = axes(file, python=python, torch=f"{good},{bad}", world_size=None, launcher=None)
    words = _words({"--only": name, "--path": path, "--runs": runs, "--retries": 0, "--repeats": repeats})
    with _opened(given, words, out=out, jobs=1, resume=resume, say=_say) as opened:
        found = halving.run(opened, name, good=good, bad=bad, say=_say)
        data = opened.as_json()
    pages.write(opened.folder, data)
    print(json.dumps(data, indent=2)) if as_json else Console().print(found.words, highlight=False, markup=False)
    raise typer.Exit(0 if found.first else 1)


@matrix.command()
def example() -> None:
    """A matrix file with everything that may stand in it.

    Example: `dtprobe matrix example > nights.toml`
    """
    from dtprobe.matrix import cells

    text = cells.__doc__ or ""
    print(text.partition("```toml\n")[2].partition("```")[0].rstrip())


@matrix.command()
def venvs(
    remove: Annotated[str | None, typer.Option("--remove", metavar="NAME|all", help="Remove this one, or all.")] = None,
) -> None:
    """The venvs in the cache, with their size; they stay until they are removed here.

    Example: `dtprobe matrix venvs --remove all`
    """
    from dtprobe.matrix import venvs as cache

    for place, told in cache.listed(os.environ, remove=remove, say=_say):
        print(f"{place}  {told}")


def axes(file: Path | None, *, python: str | None, torch: str | None, world_size: str | None, launcher: str | None) -> Axes:
    """Of the file and the options, which go before it."""
    from dtprobe.matrix import cells

    options = cells.from_options(python, torch, world_size, launcher)
    return cells.merged(cells.from_file(file), options) if file is not None else options


def meant(given: Axes, *, out: Path, resume: str | None, file: Path | None) -> bool:
    """Whether this is a matrix: versions, or several of the rest; one world size and one launcher are a night's own."""
    from dtprobe.matrix.run import resumable

    if resume is not None:
        return resumable(out, resume) is not None
    return bool(file or given.python or given.torch or len(given.world_size) > 1 or len(given.launcher) > 1)


def night(
    given: Axes,
    shared: Mapping[str, Any],
    single: Mapping[str, Any],
    *,
    out: Path,
    jobs: int | None,
    resume: str | None,
    as_json: bool,
) -> NoReturn:
    """Run the matrix and exit as a night does. `shared` are options that each cell's night has, `single` those that only one night can have."""
    from rich.console import Console

    from dtprobe.errors import UsageError
    from dtprobe.matrix import pages

    for option, value in single.items():
        if value is not None:
            why = "runs the Python of its nodes, not a cell's" if option == "--on" else "is of one night, a matrix has many"
            raise UsageError(f"{option} {why}", "leave it out, or run one cell as a night")
    jobs = jobs if jobs is not None else (os.cpu_count() or 1) + 1
    with _opened(given, _words(shared), out=out, jobs=jobs, resume=resume, say=_say) as opened:
        opened.run()
        data = opened.as_json()
    pages.write(opened.folder, data)
    if as_json:
        print(json.dumps(data, indent=2))
    else:
        pages.render(data, Console())
        print(f"matrix: {opened.folder / pages.PAGE}")
    if opened.interrupted:
        _say(f"dtprobe nightly --resume {opened.folder.name} --out {out} goes on with it")
        raise KeyboardInterrupt
    raise typer.Exit(0 if opened.well else 1)


def _opened(given: Axes, words: Sequence[str], *, out: Path, jobs: int, resume: str | None, say: Any) -> Any:
    from dtprobe.errors import UsageError
    from dtprobe.matrix import run

    if resume is None:
        spec = given.spec(**run.default_spec())
        return run.begun(spec, words, out=out, jobs=jobs, environ=os.environ, say=say)
    folder = run.resumable(out, resume)
    if folder is None:
        raise UsageError(f"--resume {resume}: no such matrix", f"`ls {out}/suites` shows what there is")
    return run.resumed(folder, jobs=jobs, environ=os.environ, say=say)


def _words(options: Mapping[str, Any]) -> list[str]:
    found = []
    for option, value in options.items():
        for one in value if isinstance(value, list | tuple) else [value]:
            if one is not None:
                found += [option, str(one.resolve() if isinstance(one, Path) else one)]
    return found


def _say(line: str) -> None:
    typer.echo(line, err=True)
