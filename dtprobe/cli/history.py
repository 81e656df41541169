"""The history of runs: what it holds, how metrics moved, what has become worse, and what comes from elsewhere."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from dtprobe import catalog
from dtprobe.cli.base import Json, Out, Paths, app, table
from dtprobe.errors import UsageError

Where = Annotated[
    str | None,
    typer.Option("--history", metavar="URL", help="The history at this URL (s3://bucket/nights), not that of --out."),
]

history = typer.Typer(
    name="history",
    help="What all runs in a folder say together: overview, trends, regressions; runs of other machines can be merged in.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
)
app.add_typer(history)


@history.command()
def overview(out: Out = Path("runs"), url: Where = None, as_json: Json = False) -> None:
    """How often each scenario ran with each torch, and how often it was as expected.

    Example: `dtprobe history overview --out runs`
    """
    from dtprobe.trends import terminal

    with terminal.reading(out, url) as (read, broken):
        rows = read.overview()
    terminal.complain(broken, sys.stderr)
    if as_json:
        print(rows.to_json(orient="records", indent=2))
        return
    table(
        ("scenario", "torch", "runs", "as expected", "last verdict"),
        [
            (
                row.scenario + (f":{row.variant}" if row.variant else ""),
                str(row.torch),
                str(row.runs),
                str(row.as_expected),
                row.last_verdict,
            )
            for row in rows.itertuples()
        ],
    )


@history.command()
def trend(
    scenario: Annotated[str, typer.Argument(help="A scenario or variant.")],
    metric: Annotated[str | None, typer.Option("--metric", help="Only this metric (default: all).")] = None,
    out: Out = Path("runs"),
    url: Where = None,
    as_json: Json = False,
    path: Paths = None,
) -> None:
    """How the metrics of a scenario moved over the nights, with the nights at which their level changed.

    Example: `dtprobe history trend gloo-thread-leak --metric threads_per_group_handle`
    """
    from rich.console import Console

    from dtprobe.trends import terminal

    with terminal.reading(out, url) as (read, broken):
        trends = terminal.trends(read, catalog.load(path or ()).find(scenario).id, metric)
    terminal.complain(broken, sys.stderr)
    if as_json:
        print(json.dumps([one.as_json() for one in trends], indent=2))
    else:
        terminal.render_trends(trends, Console())


@history.command()
def regressions(
    night: Annotated[str | None, typer.Option("--night", help="A night's id (default: the latest).")] = None,
    out: Out = Path("runs"),
    url: Where = None,
    as_json: Json = False,
) -> None:
    """What was worse in the latest night than before: since when, what else changed, and the command that finds the commit.

    Exit code 1: something was.

    Example: `dtprobe history regressions --json`
    """
    from dtprobe import trends
    from dtprobe.trends import terminal

    with terminal.reading(out, url) as (read, broken):
        found = trends.regressions(read, night)
    terminal.complain(broken, sys.stderr)
    if as_json:
        print(json.dumps([one.as_json() for one in found], indent=2))
    else:
        for one in found:
            print(f"{one.because}\n  {one.bisect}")
        if not found:
            print("nothing is worse")
    raise typer.Exit(1 if found else 0)


@history.command()
def merge(
    sources: Annotated[
        list[str],
        typer.Argument(help="Folders of runs, run folders, histories, archives (tar, zip) of these, or URLs of histories."),
    ],
    out: Out = Path("runs"),
    url: Where = None,
) -> None:
    """Enter the runs of other machines, each once and under its own host, and copy their folders into --out (not with --history).

    Exit code 1: something could not be read.

    Example: `dtprobe history merge other-host.tar.gz /mnt/other-host/runs`
    """
    from dtprobe.store import History
    from dtprobe.store import merge as merging

    came = merging.merge(sources, out=out) if url is None else merging.merge(sources, into=History(url))
    for line in came.problems:
        sys.stderr.write(f"dtprobe: {line}\n")
    print(f"{came.new} runs came in, {came.known} were known")
    raise typer.Exit(1 if came.problems else 0)


@history.command()
def move(
    url: Annotated[str, typer.Argument(help="`s3://bucket/nights`, or any other URL that fsspec opens.")],
    out: Out = Path("runs"),
) -> None:
    """Keep the history of --out at a URL from now on, for every verb; what it has held so far is taken along. Run folders stay local.

    Example: `dtprobe history move s3://bucket/nights --out runs`
    """
    from dtprobe.store import Store

    store = Store.open(out, history=url)
    print(f"the history of {out} is at {store.history.where}")


@history.command()
def step(
    scenario: Annotated[str, typer.Argument(help="A scenario or variant.")],
    metric: Annotated[str | None, typer.Option("--metric", help="Judge by this metric instead of the verdict.")] = None,
    arm: Annotated[str, typer.Option("--arm", help="Of this arm.")] = "fault",
    above: Annotated[float | None, typer.Option("--above", help="It is bad above this value.")] = None,
    below: Annotated[float | None, typer.Option("--below", help="It is bad below this value.")] = None,
    out: Out = Path("runs"),
    path: Paths = None,
) -> None:
    """One step of `git bisect run`: run the scenario and end with 0 where it is good, 1 where it is bad, 125 where nothing can be said.

    Example: `git bisect start BAD GOOD && git bisect run dtprobe history step gloo-thread-leak --metric threads --arm control --above 15`
    """
    from dtprobe import runner
    from dtprobe.trends import step as stepping

    if (metric is None) != (above is None and below is None) or (above is not None and below is not None):
        raise UsageError("--metric goes with one of --above and --below", "give both, or neither to judge by the verdict")
    result = runner.run(catalog.load(path or ()).find(scenario), out=out)
    code, why = stepping.judged(result.json, metric, arm, above=above, below=below)
    print(why)
    raise typer.Exit(code)
