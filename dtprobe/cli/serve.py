"""The history as pages, on disk or live."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dtprobe.cli.base import Out, Paths, app


@app.command()
def site(
    to: Annotated[Path, typer.Option("--to", help="Folder of the site; replaced where it holds one.")],
    out: Out = Path("runs"),
    reports: Annotated[
        int, typer.Option("--reports", min=0, help="Reports to copy: of the newest N runs of each scenario.")
    ] = 3,
    confusion: Annotated[
        bool,
        typer.Option("--confusion", help="Diagnose every scenario's latest fault arm anew for the confusion matrix: minutes."),
    ] = False,
    path: Paths = None,
) -> None:
    """Write the history as a static site that opens from disk and can be moved as one folder.

    Example: `dtprobe site --out runs --to site`, then open `site/index.html`
    """
    from contextlib import closing

    from dtprobe import site as pages
    from dtprobe.clock import SystemClock
    from dtprobe.site import confusion as matrix
    from dtprobe.site.write import check

    check(to)
    clock = SystemClock()
    if confusion:
        matrix.diagnose(out, clock.now_ns())
    with closing(pages.read(out, now_ns=clock.now_ns(), paths=path or ())) as known:
        built = pages.write(known, to, newest=reports)
    for notice in built.notices:
        typer.echo(f"dtprobe: {notice}", err=True)
    print(f"{built.to / 'index.html'}: {built.pages} pages, {built.reports} reports")
