"""The application that the verbs are added to, and what they share."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from dtprobe import __version__

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


def argv() -> list[str]:
    return ["dtprobe", *sys.argv[1:]]


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    from rich.console import Console
    from rich.table import Table

    shown = Table(*header, box=None, pad_edge=False, header_style="bold")
    for row in rows:
        shown.add_row(*row)
    Console().print(shown, highlight=False)
