"""A watch as a terminal shows it: the one line of a suspicion while the job lives, and the summary at its end."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from rich.console import Console
from rich.text import Text

from dtprobe.probes.waits import named

if TYPE_CHECKING:
    from dtprobe.probes.hang import Found

SHOWN_WAITS = 3


class Lines:
    """Says each suspicion in one line, at once."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def hang(self, found: Found) -> None:
        self._say(hang_line(found))

    def resumed(self, found: Found) -> None:
        self._say(resumed_line(found))

    def _say(self, text: str) -> None:
        self._stream.write(f"dtprobe watch: {' '.join(text.split())}\n")
        self._stream.flush()


def hang_line(found: Found) -> str:
    """`hang suspected: all_reduce seq 6 of default_pg open 15.2 s; suspect rank 1: stopped (state T), ...`"""
    hang = found.hang
    who = f"suspect all ranks: {hang.because}" if hang.suspects is None else _suspects(hang.suspects, hang.ranks, hang.because)
    return f"hang suspected: {named(hang.operation)} open {found.open_s:.1f} s; {who}"


def resumed_line(found: Found) -> str:
    """What is said when the operation completes after all."""
    return f"no hang any more: {named(found.hang.operation)} has completed"


def _suspects(suspects: tuple[int, ...], said: Mapping[int, str], because: str) -> str:
    if because.startswith("they wait"):
        return f"suspect rank{'s' * (len(suspects) > 1)} {', '.join(map(str, suspects))}: {because}"
    return "; ".join(f"suspect rank {rank}: {said[rank]}" for rank in suspects)


def render_watch(result: Mapping[str, Any], folder: Path, console: Console) -> None:
    """What became of the command, the hangs that were found, the long waits that were none, and where the evidence lies."""
    for one in result["hangs"]:
        suspects = one["suspects"] if one["suspects"] == "all" else ", ".join(map(str, one["suspects"]))
        console.print(
            Text(f"hang: {one['collective']['text']}, suspect {suspects} ({one['kind']})", style="bold red"), soft_wrap=True
        )
        for rank, text in one["ranks"].items():
            console.print(Text(f"  rank {rank}: {text}"), soft_wrap=True)
    for operation, because in list(result["waits"].items())[:SHOWN_WAITS]:
        console.print(Text(f"long wait, no hang: {operation}: {because}", style="yellow"), soft_wrap=True)
    for note in result["blind"]:
        console.print(Text(f"not seen: {note}", style="yellow"), soft_wrap=True)
    console.print(Text(result["because"], style="bold"), soft_wrap=True)
    console.print(Text(f"report: {folder / 'report.html'}"), soft_wrap=True)
