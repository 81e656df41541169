"""What this machine and this cluster can run, and what dead runs left."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from dtprobe import catalog
from dtprobe.cli.base import Json, Paths, app
from dtprobe.errors import UsageError


@app.command()
def doctor(
    as_json: Json = False,
    leftovers: Annotated[bool, typer.Option("--leftovers", help="Look for what a crashed run left on this machine.")] = False,
    clean: Annotated[bool, typer.Option("--clean", help="With --leftovers: end and remove what was found.")] = False,
    cluster: Annotated[
        bool, typer.Option("--cluster", help="Check the whole cluster, as one rank of the launcher that starts this.")
    ] = False,
    deadline_s: Annotated[
        float | None, typer.Option("--deadline-s", help="With --cluster: all is said within so many seconds (60).", min=3)
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="With --cluster: write cluster.json and cluster.html into this folder.")
    ] = None,
    path: Paths = None,
) -> None:
    """What this machine can run, scenario by scenario, with reasons and remedies.

    `dtprobe doctor --leftovers --clean` removes processes, mounts, namespaces, cgroups and temporary folders of dead runs.

    `torchrun --nproc-per-node=2 -m dtprobe doctor --cluster` checks a cluster (also under srun and mpirun): ranks, collectives,
    every link, versions, clocks, limits. Exit code 1: a problem was found.
    """
    from rich.console import Console

    from dtprobe import doctor as machine_doctor
    from dtprobe.report import terminal

    if cluster:
        if leftovers or clean:
            raise UsageError("--cluster and --leftovers are both given", "leave one out")
        raise typer.Exit(_cluster(as_json, 60.0 if deadline_s is None else deadline_s, out))
    if deadline_s is not None or out is not None:
        raise UsageError(f"{'--out' if out else '--deadline-s'} belongs to --cluster", "add --cluster, or leave it out")
    if leftovers or clean:
        raise typer.Exit(_leftovers(clean, as_json))
    found = machine_doctor.report(catalog.load(path or ()).scenarios)
    if as_json:
        print(json.dumps(found.as_json(), indent=2))
    else:
        terminal.render_doctor(found, Console())


def _cluster(as_json: bool, deadline_s: float, out: Path | None) -> int:
    import os

    from dtprobe.doctor import cluster as whole

    def show(report: whole.ClusterReport) -> None:
        from rich.console import Console

        from dtprobe.doctor.cluster import page, terminal

        if as_json:
            print(json.dumps(report.as_json(), indent=2), flush=True)
        else:
            terminal.render(report, Console())
        if out is not None:
            written = page.write(report, out)
            Console(stderr=True).print(f"report: {written}", markup=False, highlight=False, soft_wrap=True)

    return whole.run(environ=os.environ, deadline_s=deadline_s, show=show)


def _leftovers(clean: bool, as_json: bool) -> int:
    from dtprobe import leftovers as left

    found = left.clean() if clean else left.find()
    if as_json:
        print(json.dumps([one.as_json() for one in found], indent=2))
    elif not found:
        print("nothing was left behind")
    else:
        for one in found:
            print(one)
    return 1 if found and not (clean and all(one.cleaned for one in found)) else 0
