"""The verbs: parse, call, print. No logic."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from dtprobe import __version__, catalog
from dtprobe.errors import DtprobeError, UsageError

app = typer.Typer(
    name="dtprobe",
    help="Reproduce, explain and cure failures of distributed PyTorch jobs.\n\n"
    "Start with `dtprobe list`, then `dtprobe run gloo-thread-leak`. Every run leaves a folder with the raw evidence, "
    "typed tables, a verdict with its numbers, and a report.",
    epilog="Exit codes: 0 as expected, 1 not as expected or a fault found, 2 wrong usage, 3 the harness itself failed, 130 interrupted.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Out = Annotated[Path, typer.Option("--out", help="Folder for run folders and the history.", show_default=True)]
Json = Annotated[bool, typer.Option("--json", help="Print JSON alone on standard output; progress goes to standard error.")]
Paths = Annotated[
    list[Path] | None, typer.Option("--path", help="A folder with scenarios/ or injectors/ of your own; may be repeated.")
]


@app.callback(invoke_without_command=True)
def top(version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False) -> None:
    if version:
        print(__version__)
        raise typer.Exit()


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
    _table(("scenario", "layer", "what it shows", "runs here"), [_list_row(row) for row in rows])


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
        progress=terminal.Steps(err),
        argv=_argv(),
    )
    if as_json:
        print(json.dumps(result.json, indent=2))
    else:
        terminal.render_verdict(result.folder, Console())
    raise typer.Exit(0 if result.as_expected else 1)


@app.command()
def inject(
    context: typer.Context,
    faults: Annotated[
        list[str] | None, typer.Argument(metavar="FAULT... -- CMD...", help="Faults in the grammar, then -- and the command.")
    ] = None,
    out: Out = Path("runs"),
    as_json: Json = False,
    seed: Annotated[int, typer.Option("--seed", help="Seed of every random choice.")] = 0,
    timeout_s: Annotated[float, typer.Option("--timeout-s", help="End the command after so many seconds.", min=0.1)] = 3600,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would happen and what it needs; start nothing.")] = False,
    replay: Annotated[
        str | None, typer.Option("--replay", metavar="RUN", help="Fire again at the very calls of that run.")
    ] = None,
    path: Paths = None,
) -> None:
    """Run a command of yours, unmodified, under faults, and say how often each fired and what became of the command.

    A fault is `name:action,key=value,...`; `dtprobe injectors` lists them.

    Example: `dtprobe inject collective:skip,rank=1,op=all_reduce,nth=5 -- torchrun --nproc-per-node=2 train.py`
    """
    from rich.console import Console

    from dtprobe.inject import job
    from dtprobe.report import faults as faults_report
    from dtprobe.report import terminal
    from dtprobe.store import Store

    command: list[str] = context.obj or []
    if replay and faults:
        raise UsageError(f"--replay {replay} and faults ({', '.join(faults)}) are both given", "leave one out")
    if not replay and not faults:
        raise UsageError("no fault to inject", "write it before --; `dtprobe injectors` lists them")
    planned = job.plan(faults or (), command, extra=path or ())
    if replay:
        planned = job.replayed(Store(out).find(replay).path, extra=path or ())
    if dry_run:
        for fault in planned:
            print(faults_report.fault_line(fault))
        return
    result = job.run(
        planned, command, out=out, seed=seed, timeout_s=timeout_s, progress=terminal.Steps(Console(stderr=True)), said=_argv()
    )
    if as_json:
        print(json.dumps(result.json, indent=2))
    else:
        faults_report.render_injection(result.json, result.folder, Console())
    raise typer.Exit(0 if result.survived else 1)


@app.command()
def watch(
    context: typer.Context,
    out: Out = Path("runs"),
    as_json: Json = False,
    suspect_s: Annotated[
        float,
        typer.Option("--suspect-s", help="Suspect a hang when a collective is open for so many seconds without progress."),
    ] = 15,
    end: Annotated[bool, typer.Option("--end/--leave", help="End the job once the evidence is taken, or leave it.")] = False,
    timeout_s: Annotated[
        float | None, typer.Option("--timeout-s", help="End the command after so many seconds.", min=0.1)
    ] = None,
) -> None:
    """Run a command of yours, unmodified, and find a hang while the job lives: who is the cause, with the evidence taken.

    Exit code 0: no hang, and the command ended well.

    Example: `dtprobe watch --end -- torchrun --nproc-per-node=2 train.py`
    """
    import math

    from rich.console import Console

    from dtprobe import watch as watching
    from dtprobe.probes.echo import Echo
    from dtprobe.report import watch as watch_report

    result = watching.run(
        context.obj or [],
        out=out,
        suspect_s=suspect_s,
        end=end,
        timeout_s=math.inf if timeout_s is None else timeout_s,
        teller=watch_report.Lines(sys.stderr),
        echo=Echo(out=sys.stderr.buffer if as_json else sys.stdout.buffer, err=sys.stderr.buffer),
        said=_argv(),
    )
    if as_json:
        print(json.dumps(result.json, indent=2))
    else:
        watch_report.render_watch(result.json, result.folder, Console())
    raise typer.Exit(0 if result.well else 1)


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


@app.command()
def postmortem(
    paths: Annotated[list[Path], typer.Argument(help="Folders, files or archives that the job left.")],
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            help="Write DIR/postmortem/TIME-ID/ with diagnosis.json, report.html, report.md and timeline.json (for "
            "ui.perfetto.dev). Default: runs; with --json nothing is written unless --out is given.",
            metavar="DIR",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """What failed first in a dead or hung job, on which rank, why, and the lines that prove it.

    Exit code 0: no failure was found; 1: one was, or the artifacts do not decide; 2: wrong usage; 3: dtprobe itself failed.

    Example: `dtprobe postmortem logs/ --json`
    """
    from rich.console import Console

    from dtprobe.clock import SystemClock
    from dtprobe.diagnose import diagnose
    from dtprobe.diagnose.diagnosis import HEALTHY
    from dtprobe.report import postmortem as pages
    from dtprobe.report.postmortem.progress import Progress

    clock = SystemClock()
    if out is not None:
        pages.require(out)
    with Progress(Console(stderr=True), clock.monotonic) as tell:
        found = diagnose(paths, tell)
    folder, problem = None, None
    if out is not None or not as_json:
        try:
            folder = pages.write(found, out or Path("runs"), subject=[str(path) for path in paths], now_ns=clock.now_ns())
        except DtprobeError as error:  # the answer comes first: it may have taken long
            problem = error
    if as_json:
        print(json.dumps(found.json, indent=2))
    else:
        pages.render(found, Console(), folder)
    if problem is not None and out is not None:
        raise problem
    if problem is not None:
        sys.stderr.write(f"dtprobe: no report was written: {problem}\n")
    raise typer.Exit(0 if found.failure_mode == HEALTHY else 1)


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


def _argv() -> list[str]:
    return ["dtprobe", *sys.argv[1:]]


def _list_row(row: dict[str, Any]) -> tuple[str, str, str, str]:
    name = f"{row['name']}:{row['variant']}" if row["variant"] else row["name"]
    return name, row["layer"], row["title"], "yes" if row["runnable"] else f"no: {row['reason']}"


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(*header, box=None, pad_edge=False, header_style="bold")
    for row in rows:
        table.add_row(*row)
    Console().print(table, highlight=False)
