"""A user's own job: inject faults into it, watch it, explain how it died."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from dtprobe.cli.base import Json, Out, Paths, app, argv
from dtprobe.errors import DtprobeError, UsageError


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
        planned, command, out=out, seed=seed, timeout_s=timeout_s, progress=terminal.Steps(Console(stderr=True)), said=argv()
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
        said=argv(),
    )
    if as_json:
        print(json.dumps(result.json, indent=2))
    else:
        watch_report.render_watch(result.json, result.folder, Console())
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
    on: Annotated[
        str | None,
        typer.Option(
            "--on",
            help="Read the artifacts as tasks of an engine: `slurm`, `ray`, or `local` for processes of this machine, with options: "
            "`slurm:partition=main`, `local:jobs=4`. The answer is the same. The nodes must see PATHS under the same path.",
            metavar="ENGINE",
        ),
    ] = None,
) -> None:
    """What failed first in a dead or hung job, on which rank, why, and the lines that prove it.

    Dumps and logs of thousands of ranks are read faster with `--on`: cut into ranges of files, each read by a task, and joined here. What
    lies in archives is read here: unpack them first. Partial results go through the folder of `--out`, or else the current one, for the
    time of the postmortem; for Slurm the nodes must share it, too. Files of a task that cannot be run are named under "missing".

    Exit code 0: no failure was found; 1: one was, or the artifacts do not decide; 2: wrong usage; 3: dtprobe itself failed.

    Example: `dtprobe postmortem logs/ --json`

    Example: `dtprobe postmortem /shared/dumps --on slurm:partition=main,cpus-per-task=1 --out /shared/runs`
    """
    from rich.console import Console

    from dtprobe.clock import SystemClock
    from dtprobe.diagnose import diagnose
    from dtprobe.diagnose.diagnosis import HEALTHY
    from dtprobe.diagnose.pieces import Reader, here
    from dtprobe.report import postmortem as pages
    from dtprobe.report.postmortem.progress import Progress

    clock = SystemClock()
    if out is not None:
        pages.require(out)
    with Progress(Console(stderr=True), clock.monotonic) as tell:
        reader: Reader = here
        if on is not None:
            from dtprobe import engines
            from dtprobe.diagnose.cut import OnEngine

            reader = OnEngine(engine=engines.named(on, os.environ), roots=paths, base=out or Path(), tell=tell)
        found = diagnose(paths, tell, reader)
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


@app.command("postmortem-share", hidden=True)
def postmortem_share(
    share: Annotated[str, typer.Argument(help="What to read, as `postmortem --on` tells it.")],
    folder: Annotated[Path, typer.Argument(help="New folder for what was read.")],
) -> None:
    """Read one share of a postmortem's artifacts: what `postmortem --on` runs on a node."""
    from dtprobe.diagnose.cut.task import work

    work(share, folder)
