"""The report on a terminal: the answer, the problems one a line, the matrix of links, clocks, collectives, versions."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from dtprobe.doctor.cluster.heat import Grid, grids
from dtprobe.doctor.cluster.verdict import ClusterReport, Problem
from dtprobe.report import words

_STYLES = {"error": "bold red", "warning": "yellow", "note": "dim"}
_WIDEST = 12


def render(report: ClusterReport, console: Console) -> None:
    """Print the report. Each problem is one line, however long, so that it can be searched for."""
    badge, style = (" healthy ", "reverse green") if report.healthy else (f" {len(report.faults)} problems ", "reverse red")
    if len(report.faults) == 1:
        badge = " 1 problem "
    hosts = f"{len(report.hosts)} host{'s' if len(report.hosts) != 1 else ''}"
    told = f"{report.world_size} rank{'s' if report.world_size != 1 else ''} on {hosts}, started by {report.launcher}"
    console.print(Text.assemble(("cluster  ", "bold"), (badge, style), f"  {told}, {report.took_s:.1f} s"), soft_wrap=True)
    for each in report.faults + report.notes:
        console.print(_line(each), soft_wrap=True)
    for grid in grids(report):
        _links(grid, console)
    if report.not_measured:
        console.print(Text(f"not measured: {report.not_measured}", style="dim"), soft_wrap=True)
    if report.collectives:
        right = sum(not each.wrong for each in report.collectives)
        console.print(Text(f"collectives  {right} of {len(report.collectives)} right on every rank"), soft_wrap=True)
    if report.offsets:
        worst = max(report.offsets, key=lambda each: abs(each.offset_s))
        told = f"rank {worst.rank} {words.number(worst.offset_s, 's')} +- {words.number(worst.uncertainty_s, 's')}"
        console.print(Text(f"clocks       farthest from rank {worst.of}'s: {told}"), soft_wrap=True)
    if report.ranks:
        told = ", ".join(f"{name} {value}" for name, value in _versions(report).items())
        console.print(Text(f"versions     {words.clip(told, 1000)}"), soft_wrap=True)


def _line(problem: Problem) -> Text:
    text = Text(words.clip(str(problem), 4000).replace("\n", " "))
    text.stylize(_STYLES[problem.severity], 0, len(problem.severity))
    return text


def _versions(report: ClusterReport) -> dict[str, str]:
    """Versions that all ranks share; the others are among the problems."""
    first = report.ranks[0].versions
    return {
        name: value for name, value in first.items() if value and all(each.versions.get(name) == value for each in report.ranks)
    }


def _links(grid: Grid, console: Console) -> None:
    if len(grid.ranks) > _WIDEST:
        console.print(Text(f"{grid.title}: {grid.summary}; the whole matrix is in cluster.html (--out DIR)"), soft_wrap=True)
        return
    console.print(Text(f"{grid.title}, from row to column; {grid.summary}", style="bold"), soft_wrap=True)
    table = Table(box=None, pad_edge=False)
    table.add_column("")
    for rank in grid.ranks:
        table.add_column(str(rank), justify="right", no_wrap=True)
    for row in grid.rows:
        table.add_row(
            str(row.rank),
            *(Text(cell.text, style="bold red" if cell.slow else "dim" if cell.value is None else "") for cell in row.cells),
        )
    console.print(table)
