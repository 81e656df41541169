"""A diagnosis as a terminal shows it."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from dtprobe.diagnose.diagnosis import Diagnosis


def render(diagnosis: Diagnosis, console: Console) -> None:
    """The answer, its evidence, what is missing, the cure."""
    console.print(
        Text(f"{diagnosis.failure_mode} ({diagnosis.confidence:.0%}): {diagnosis.because}", style="bold"), soft_wrap=True
    )
    for one in diagnosis.evidence:
        console.print(Text(f"  {one.file}:{one.line}: {one.text}"), soft_wrap=True)
    for text in diagnosis.missing:
        console.print(Text(f"missing: {text}", style="yellow"), soft_wrap=True)
    if diagnosis.fix:
        console.print(Text(f"fix: {diagnosis.fix}"), soft_wrap=True)
