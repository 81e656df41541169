"""The pipeline."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from dtprobe import catalog
from dtprobe.cli.base import Json, Out, Paths, app


@app.command()
def nightly(
    only: Annotated[
        str | None, typer.Option("--only", help="Scenarios or variants, separated by commas (default: all).")
    ] = None,
    out: Out = Path("runs"),
    as_json: Json = False,
    jobs: Annotated[
        int | None, typer.Option("--jobs", help="Scenarios at a time (default: half the cores, at least 2).")
    ] = None,
    repeats: Annotated[int | None, typer.Option("--repeats", help="Repeats of each arm (default: the scenario's own).")] = None,
    seed: Annotated[int, typer.Option("--seed", help="Seed of every workload and injection.")] = 0,
    claims: Annotated[Path | None, typer.Option("--claims", help="Write the table of claims into this Markdown file.")] = None,
    path: Paths = None,
) -> None:
    """Run all scenarios that this machine can, in parallel where safe, against their pinned expectations.

    Example: `dtprobe nightly --only filestore-race,collective-skipped --jobs 2`
    """
    import os

    from rich.console import Console

    from dtprobe import suite
    from dtprobe.report import suite as pages

    if claims is not None:
        pages.check_claims(claims)
    result = suite.run(
        catalog.load(path or ()).chosen(only.split(",") if only else ()),
        out=out,
        jobs=jobs if jobs is not None else max(2, (os.cpu_count() or 1) // 2),
        repeats=repeats,
        seed=seed,
        follower=pages.Lines(Console(stderr=True)),
    )
    data = result.as_json()
    pages.write(result.folder, data)
    if claims is not None:
        pages.write_claims(claims, data)
    if as_json:
        print(json.dumps(data, indent=2))
    else:
        pages.render(result, Console())
    if result.interrupted:
        raise KeyboardInterrupt
    raise typer.Exit(0 if result.well else 1)
