"""The history of runs: what it holds, how metrics moved, what has become worse, and what comes from elsewhere."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from dtprobe import catalog
from dtprobe.cli.base import Json, Out, Paths, app, table

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


Metric = Annotated[str | None, typer.Option("--metric", help="Judge by this metric instead of the verdict.")]
Arm = Annotated[str, typer.Option("--arm", help="Of this arm.")]
Above = Annotated[float | None, typer.Option("--above", help="It is bad above this value.")]
Below = Annotated[float | None, typer.Option("--below", help="It is bad below this value.")]


@history.command()
def bisect(
    scenario: Annotated[str, typer.Argument(help="A scenario or variant.")],
    good: Annotated[str, typer.Option("--good", metavar="COMMIT", help="A commit at which it was good.")],
    bad: Annotated[str, typer.Option("--bad", metavar="COMMIT", help="A later one at which it is bad.")] = "HEAD",
    metric: Metric = None,
    arm: Arm = "fault",
    above: Above = None,
    below: Below = None,
    path: Paths = None,
) -> None:
    """The first bad commit, by `git bisect run` in a working tree of its own: yours is left as it is. Both ends are run first; commits that cannot be run are skipped.

    Exit code 1: only commits that cannot be run remain.

    Example: `dtprobe history bisect gloo-thread-leak --good v0.3 --metric threads --arm control --above 15`
    """
    from dtprobe.trends import bisect as bisecting
    from dtprobe.trends import step as stepping

    stepping.check(metric, above, below)
    repo = bisecting.repository(path[0] if path else catalog.load(()).find(scenario).folder)
    said = {"--metric": metric, "--arm": arm if metric else None, "--above": above, "--below": below}
    words = [scenario, *(str(word) for name, value in said.items() if value is not None for word in (name, value))]
    for one in path or ():
        words += ["--path", str(bisecting.below(repo, one))]
    found = bisecting.find(
        repo,
        good=good,
        bad=bad,
        step=lambda tree: (sys.executable, "-P", "-m", "dtprobe", "history", "step", *words, "--tree", str(tree)),
        say=lambda line: print(line, file=sys.stderr),
    )
    print(found.words)
    raise typer.Exit(0 if found.commit else 1)


@history.command()
def step(
    scenario: Annotated[str, typer.Argument(help="A scenario or variant.")],
    metric: Metric = None,
    arm: Arm = "fault",
    above: Above = None,
    below: Below = None,
    tree: Annotated[
        Path, typer.Option("--tree", help="The working tree whose scenarios, and dtprobe if it has one, are run.")
    ] = Path(),
    path: Paths = None,
) -> None:
    """One step of `git bisect run`: run the scenario, outside of any history, and end with 0 for good, 1 for bad, 125 where nothing can be said.

    Example: `git bisect run dtprobe history step my-scenario --path ci --metric step --arm control --above 15`
    """
    import os

    from dtprobe.trends import step as stepping

    stepping.check(metric, above, below)
    code, why = stepping.judged(stepping.ran(tree, scenario, path or (), os.environ), metric, arm, above=above, below=below)
    print(why)
    raise typer.Exit(code)
