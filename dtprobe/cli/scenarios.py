"""Scenarios and their runs: list, run, show; and the injectors."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from dtprobe import catalog
from dtprobe.cli.base import Json, Out, Paths, app, argv, table


@app.command("list")
def list_(as_json: Json = False, path: Paths = None) -> None:
    """Scenarios and variants, and whether this machine can run each.

    Example: `dtprobe list --json | jq '.[] | select(.runnable)'`
    """
    from dtprobe.doctor import Doctor

    found = catalog.load(path or ())
    doctor = Doctor()
    rows = []
    for scenario in found.scenarios:
        unmet = doctor.unmet(scenario.needs)
        rows.append(
            {
                "name": scenario.name,
                "variant": scenario.variant or None,
                "failure_mode": scenario.failure_mode,
                "layer": scenario.layer,
                "needs": list(scenario.needs),
                "runnable": not unmet,
                "reason": "; ".join(f"{need}: {reason}" for need, reason in unmet.items()) or None,
                "title": scenario.title,
            }
        )
    for entry in found.broken:
        sys.stderr.write(f"dtprobe: {entry.folder} is broken: {entry.error}\n")
    if as_json:
        print(json.dumps(rows, indent=2))
        return
    table(("scenario", "layer", "what it shows", "runs here"), [_list_row(row) for row in rows])


@app.command()
def run(
    name: Annotated[str, typer.Argument(help="A scenario, or `scenario:variant`.")],
    out: Out = Path("runs"),
    as_json: Json = False,
    arm: Annotated[
        list[str] | None, typer.Option("--arm", help="Run only this arm; may be repeated. The verdict is then inconclusive.")
    ] = None,
    repeats: Annotated[int | None, typer.Option("--repeats", help="Repeats of each arm (default: the scenario's own).")] = None,
    seed: Annotated[int, typer.Option("--seed", help="Seed of the workload and of every injection.")] = 0,
    world_size: Annotated[int | None, typer.Option("--world-size", help="Ranks (default: the scenario's own).")] = None,
    launcher: Annotated[
        str | None,
        typer.Option("--launcher", help="What starts the ranks: `local`, `torchrun`, `hosts:2` (default: the scenario's own)."),
    ] = None,
    path: Paths = None,
) -> None:
    """Run a documented failure in three arms (control, fault, mitigated) and judge it by what was measured.

    Example: `dtprobe run filestore-race:stale --repeats 5 --seed 7`
    """
    from rich.console import Console

    from dtprobe import runner
    from dtprobe.report import terminal

    scenario = catalog.load(path or ()).find(name)
    others = [one.id for one in catalog.load(path or ()).scenarios if one.name == scenario.name and one.id != scenario.id]
    err = Console(stderr=True)
    if scenario.variant and ":" not in name:
        err.print(f"{scenario.name} has variants; this is {scenario.id}, the others: {', '.join(others)}", highlight=False)
    result = runner.run(
        scenario,
        out=out,
        repeats=repeats,
        seed=seed,
        arms=arm,
        world_size=world_size,
        launcher=launcher,
        progress=terminal.Steps(err),
        argv=argv(),
    )
    if as_json:
        print(json.dumps(result.json, indent=2))
    else:
        terminal.render_verdict(result.folder, Console())
    raise typer.Exit(0 if result.as_expected else 1)


@app.command()
def injectors(
    name: Annotated[str | None, typer.Argument(help="Only this injector, with every parameter of its actions.")] = None,
    as_json: Json = False,
    path: Paths = None,
) -> None:
    """The injectors: what each does, what it aims by, its parameters, and what it does not certify.

    Example: `dtprobe injectors collective`
    """
    from rich.console import Console

    from dtprobe.inject import describe
    from dtprobe.report import faults as faults_report

    found, broken = catalog.injectors(path or ())
    for entry in broken:
        sys.stderr.write(f"dtprobe: {entry.folder} is broken: {entry.error}\n")
    if name is not None:
        found = {name: describe.chosen(name, found)}
    rows = [describe.as_json(injector) for injector in found.values()]
    if as_json:
        print(json.dumps(rows, indent=2))
    else:
        faults_report.render_injectors(rows, Console(), whole=name is not None)


@app.command()
def show(
    run_id: Annotated[
        str,
        typer.Argument(
            metavar="[RUN|latest]", help="The folder of a run or a postmortem, an id or its beginning, or `latest`."
        ),
    ] = "latest",
    out: Out = Path("runs"),
    as_json: Json = False,
    report: Annotated[bool, typer.Option("--report", help="Write report.html and report.md of the run again.")] = False,
    runs: Annotated[int | None, typer.Option("--runs", metavar="N", min=1, help="List the newest N runs instead.")] = None,
) -> None:
    """A finished run once more: the three arms, the verdict, why, and where its report lies; or a postmortem's answer.

    Example: `dtprobe show latest --json`
    """
    from rich.console import Console

    from dtprobe.report.postmortem import folder as postmortems

    if (looked_at := postmortems.find(run_id, out)) is not None:
        diagnosis = postmortems.read(looked_at)
        if as_json:
            print(json.dumps(diagnosis.json, indent=2))
        else:
            from dtprobe.report import postmortem as pages

            pages.render(diagnosis, Console(), looked_at)
        return
    from dtprobe.report import terminal, write
    from dtprobe.store import Store

    if runs is not None:
        terminal.render_runs(Store(out).runs(runs), Console())
        return
    found = Store(out).find(run_id)
    if report:
        write(found.path)
    if as_json:
        print(json.dumps(found.verdict() or {"state": found.state, "run": found.id}, indent=2))
        return
    terminal.render_verdict(found.path, Console())


def _list_row(row: dict[str, Any]) -> tuple[str, str, str, str]:
    name = f"{row['name']}:{row['variant']}" if row["variant"] else row["name"]
    return name, row["layer"], row["title"], "yes" if row["runnable"] else f"no: {row['reason']}"
