"""The pipeline."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from dtprobe import catalog
from dtprobe.cli.base import Json, Out, Paths, app, table

CHOICE = "Choose scenarios"
RUNNING = "Run them"
TELLING = "Tell of it"
MATRIX = "Run them in every combination of"


@app.command()
def nightly(
    only: Annotated[
        str | None,
        typer.Option("--only", help="Scenarios or variants, separated by commas (default: all).", rich_help_panel=CHOICE),
    ] = None,
    tag: Annotated[
        list[str] | None, typer.Option("--tag", help="Those with this tag or layer; may be repeated.", rich_help_panel=CHOICE)
    ] = None,
    capability: Annotated[
        list[str] | None,
        typer.Option("--capability", help="Those that need this (`slurm`, `cuda`); may be repeated.", rich_help_panel=CHOICE),
    ] = None,
    changed: Annotated[
        str | None,
        typer.Option(
            "--changed", metavar="COMMIT", help="Those of which a file differs from this commit.", rich_help_panel=CHOICE
        ),
    ] = None,
    path: Paths = None,
    out: Out = Path("runs"),
    jobs: Annotated[
        int | None,
        typer.Option("--jobs", help="Scenarios at a time (default: cores + 1; ranks mostly wait).", rich_help_panel=RUNNING),
    ] = None,
    runs: Annotated[
        int, typer.Option("--runs", help="Runs of each scenario, each with a seed of its own.", rich_help_panel=RUNNING)
    ] = 1,
    retries: Annotated[
        int,
        typer.Option(
            "--retries",
            help="Further runs of a scenario that is not as expected, to tell flaky from broken.",
            min=0,
            rich_help_panel=RUNNING,
        ),
    ] = 3,
    repeats: Annotated[
        int | None,
        typer.Option("--repeats", help="Repeats of each arm in a run (default: the scenario's own).", rich_help_panel=RUNNING),
    ] = None,
    seed: Annotated[int, typer.Option("--seed", help="Seed of every workload and injection.", rich_help_panel=RUNNING)] = 0,
    budget: Annotated[
        float | None,
        typer.Option(
            "--budget",
            metavar="MINUTES",
            help="Run what fits: first what never ran, then what failed, then what ran longest ago.",
            rich_help_panel=RUNNING,
        ),
    ] = None,
    resume: Annotated[
        str | None,
        typer.Option(
            "--resume",
            metavar="[NIGHT|latest]",
            help="Go on with a night that was interrupted or killed, as it was asked for.",
            rich_help_panel=RUNNING,
        ),
    ] = None,
    python: Annotated[
        str | None,
        typer.Option(
            "--python", metavar="3.11,3.12", help="Versions of Python, each in a venv of its own.", rich_help_panel=MATRIX
        ),
    ] = None,
    torch: Annotated[
        str | None,
        typer.Option(
            "--torch", metavar="2.9.1,2.13.0", help="Versions of torch, `none` for no torch at all.", rich_help_panel=MATRIX
        ),
    ] = None,
    world_size: Annotated[
        str | None,
        typer.Option("--world-size", metavar="2,4", help="Ranks (default: each scenario's own).", rich_help_panel=MATRIX),
    ] = None,
    launcher: Annotated[
        str | None,
        typer.Option(
            "--launcher",
            metavar="local,torchrun",
            help="What starts the ranks (default: each scenario's own).",
            rich_help_panel=MATRIX,
        ),
    ] = None,
    matrix_file: Annotated[
        Path | None,
        typer.Option(
            "--matrix", metavar="FILE", help="All of these from a TOML file (`dtprobe matrix example`).", rich_help_panel=MATRIX
        ),
    ] = None,
    on: Annotated[
        str,
        typer.Option(
            "--on", help="Where: `local`, `slurm`, `ray`, with options: `slurm:partition=main`.", rich_help_panel=RUNNING
        ),
    ] = "local",
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would run, and why; run nothing.", rich_help_panel=CHOICE)
    ] = False,
    as_json: Json = False,
    claims: Annotated[
        Path | None,
        typer.Option("--claims", help="Write the table of claims into this Markdown file.", rich_help_panel=TELLING),
    ] = None,
    pin: Annotated[
        Path | None,
        typer.Option(
            "--pin",
            help="Write what was measured into this file, as a baseline; one that exists is widened.",
            rich_help_panel=TELLING,
        ),
    ] = None,
    against: Annotated[
        Path | None,
        typer.Option("--against", help="Say what differs from this baseline, beyond its noise.", rich_help_panel=TELLING),
    ] = None,
    metrics: Annotated[
        Path | None,
        typer.Option("--metrics", help="Write Prometheus metrics of the night into this .prom file.", rich_help_panel=TELLING),
    ] = None,
    metrics_port: Annotated[
        int | None,
        typer.Option(
            "--metrics-port", help="Serve metrics on this port of loopback while it runs (0: any).", rich_help_panel=TELLING
        ),
    ] = None,
    webhook: Annotated[
        str | None,
        typer.Option(
            "--webhook",
            metavar="URL",
            help="Tell this address of new regressions, each once; signed with $DTPROBE_WEBHOOK_SECRET.",
            rich_help_panel=TELLING,
        ),
    ] = None,
) -> None:
    """Run scenarios, in parallel where safe, against their pinned expectations; all that this machine can, where none are chosen.

    What is asked by several kinds of choice must hold together. Exit code 0: all as expected; 1: one was not, or a metric has become worse.

    Example: `dtprobe nightly --tag network --changed origin/main --budget 20`
    """
    import os

    from rich.console import Console

    from dtprobe import engines, suite
    from dtprobe.cli import matrix
    from dtprobe.report import suite as pages
    from dtprobe.signals.night import Signals
    from dtprobe.signals.webhook import SECRET
    from dtprobe.suite import baseline, selection

    budget_s = None if budget is None else budget * 60
    signals = Signals(file=metrics, port=metrics_port, webhook=webhook, secret=os.environ.get(SECRET, ""), budget_s=budget_s)
    signals.check()
    if claims is not None:
        pages.check_file("--claims", claims)
    if pin is not None:
        pages.check_file("--pin", pin)
        if pin.exists():
            baseline.load(pin, "--pin")
    pinned = None if against is None else baseline.load(against)
    found = catalog.load(path or ())
    wanted = selection.Wanted(
        only=only.split(",") if only else (), tags=tag or (), capabilities=capability or (), changed=changed
    )
    chosen = selection.choose(found, wanted)
    if dry_run:
        table(("scenario", "why"), [(one.id, chosen.because.get(one.id, "all are run")) for one in chosen.scenarios])
        raise typer.Exit(0)
    axes = matrix.axes(matrix_file, python=python, torch=torch, world_size=world_size, launcher=launcher)
    if matrix.meant(axes, out=out, resume=resume, file=matrix_file):
        single = {
            "--claims": claims,
            "--pin": pin,
            "--against": against,
            "--metrics": metrics,
            "--metrics-port": metrics_port,
            "--webhook": webhook,
            "--on": None if on == "local" else on,
        }
        shared: dict[str, Any] = {
            "--only": only,
            "--tag": tag,
            "--capability": capability,
            "--changed": changed,
            "--path": path,
        }
        shared |= {"--runs": runs, "--retries": retries, "--repeats": repeats, "--seed": seed, "--budget": budget}
        matrix.night(axes, shared, single, out=out, jobs=jobs, resume=resume, as_json=as_json)
    progress = Console(stderr=True)
    with signals.following(pages.Lines(progress)) as (follower, url):
        if url:
            progress.print(f"metrics: {url}", highlight=False)
        result = suite.run(
            chosen.scenarios if resume is None else found.scenarios,
            out=out,
            night=suite.Night(
                jobs=jobs if jobs is not None else (os.cpu_count() or 1) + 1,
                repeats=repeats,
                seed=seed,
                runs=runs,
                retries=retries,
                budget_s=budget_s,
                resume=resume,
                world_size=axes.world_size[0] if axes.world_size else None,
                launcher=axes.launcher[0] if axes.launcher else None,
                because=chosen.because,
                broken=chosen.broken if resume is None else (),
                against=pinned,
            ),
            follower=follower,
            engine=None if on == "local" else engines.named(on, os.environ),
        )
    data = result.as_json()
    pages.write(result.folder, data)
    for line in signals.after(data, result.folder, out=out):
        progress.print(line, highlight=False, markup=False)
    if claims is not None:
        pages.write_claims(claims, data)
    if pin is not None:
        baseline.write(pin, data)
    if as_json:
        print(json.dumps(data, indent=2))
    else:
        pages.render(result, Console())
    if result.interrupted:
        raise KeyboardInterrupt
    raise typer.Exit(0 if result.well else 1)
