"""Faults as a terminal shows them: what injectors can do, what a plan would do, and what really fired."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from dtprobe.inject.spec import Fault

SHOWN = 5
"""So many firings of a fault are listed; the run folder has them all."""


def fault_line(fault: Fault) -> str:
    """One line of a dry run: the fault in the grammar, what it does, its layer and needs, and what it does not certify."""
    what = " ".join((type(fault.config).__doc__ or "").split("\n\n")[0].split())
    needs = ", ".join(fault.injector.needs) or "nothing"
    return f"{fault}\n  {what}\n  layer {fault.injector.layer}; needs {needs}; does not certify: {fault.injector.certifies_not}"


def render_injection(result: Mapping[str, Any], folder: Path, console: Console) -> None:
    """How often each fault fired, when and where, and what became of the command."""
    table = Table("fired", "fault, and where and when it fired", box=None, pad_edge=False, header_style="bold")
    started = result["started_ns"]
    for fault in result["faults"]:
        shown = [_firing(one, started) for one in fault["fired"][:SHOWN]]
        shown += fault["problems"]
        if fault["count"] > SHOWN:
            shown.append(f"and {fault['count'] - SHOWN} more")
        count = Text(f"{fault['count']}x" if fault["count"] else "never", style="" if fault["count"] else "bold red")
        table.add_row(count, Text("\n  ".join([fault["fault"], *shown]), overflow="fold"))
    console.print(table)
    for one in result["suspected"]:
        console.print(Text(f"hang suspected: {one['reason']}", style="yellow"), soft_wrap=True)
    console.print(Text(result["because"], style="bold"), soft_wrap=True)
    console.print(Text(f"report: {folder / 'report.html'}"), soft_wrap=True)


def render_injectors(rows: Sequence[Mapping[str, Any]], console: Console, *, whole: bool) -> None:
    """A line an injector, or one of them with every parameter of its actions."""
    if whole:
        for row in rows:
            _whole(row, console)
        return
    table = Table("injector", "layer", "actions", "aims by", "usable here", box=None, pad_edge=False, header_style="bold")
    for row in rows:
        actions = ", ".join(action["name"] for action in row["actions"])
        usable = "yes" if row["usable"] else f"no: {row['reason']}"
        table.add_row(Text(row["name"]), row["layer"], Text(actions), Text(" ".join(row["targets"])), Text(usable))
    console.print(table)
    console.print("`dtprobe injectors NAME` shows every parameter", highlight=False)


def _whole(row: Mapping[str, Any], console: Console) -> None:
    console.print(Text(f"{row['name']}: {row['title']}", style="bold"), soft_wrap=True)
    console.print(Text(f"layer {row['layer']}; aims by {', '.join(row['targets'])}"), soft_wrap=True)
    console.print(Text(f"usable here: {'yes' if row['usable'] else 'no: ' + row['reason']}"), soft_wrap=True)
    console.print(Text(f"does not certify: {row['certifies_not']}"), soft_wrap=True)
    for action in row["actions"]:
        console.print(Text(f"\n{row['name']}:{action['name']}  {action['help']}"), soft_wrap=True)
        for item in action["parameters"]:
            default = "required" if item["required"] else f"default {item['default']}"
            console.print(Text(f"    {item['name']}={item['type']}  {item['help']} ({default})"), soft_wrap=True)


def _firing(one: Mapping[str, Any], started_ns: int) -> str:
    words = [f"+{(one['t_ns'] - started_ns) / 1e9:.2f} s"]
    words += [f"rank {one['rank']}"] if one["rank"] is not None else []
    words += [f"{one['call'] or 'call'} {one['nth']}"] if one["nth"] is not None else [one["call"]] if one["call"] else []
    words += [one["detail"]] if one["detail"] else []
    return " ".join(words)
