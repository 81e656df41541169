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


@app.command()
def serve(
    out: Out = Path("runs"),
    host: Annotated[str, typer.Option("--host", help="Address to bind; any but loopback needs a token.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="Port; 0 takes a free one.")] = 8765,
    token: Annotated[
        str | None,
        typer.Option(
            "--token", envvar="DTPROBE_TOKEN", show_envvar=True, help="What a reader must give, 16 characters or more."
        ),
    ] = None,
    path: Paths = None,
) -> None:
    """Show the history live in a browser: nights in progress, filters, two runs side by side. Ctrl-C ends it.

    Example: `dtprobe serve --out runs`, then open the address that it prints
    """
    from dtprobe import serve as server
    from dtprobe.clock import SystemClock
    from dtprobe.errors import UsageError
    from dtprobe.serve.access import Access, is_loopback

    if not out.is_dir():
        raise UsageError(f"--out {out}: no such folder", "name the folder that holds the runs")
    access = Access(host, token)
    address = server.listen(host, port)
    print(address.url, flush=True)
    if not is_loopback(host):
        typer.echo("dtprobe: the token and the pages travel unencrypted; put a proxy with TLS in front", err=True)
    try:
        server.run(address, out, access, SystemClock(), paths=path or ())
    except KeyboardInterrupt:  # the way to end it: nothing is lost
        raise typer.Exit(0) from None
