"""What a long postmortem is at: a spinner on a terminal, a line now and then elsewhere; short ones say nothing."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from dtprobe.report import words

if TYPE_CHECKING:
    from rich.status import Status

QUIET_S = 1.0
REDRAW_S = 0.2
LINE_S = 10.0


class Progress:
    """Call it with what is done now. Used as a context; nothing of it stays on the screen."""

    def __init__(self, console: Console, monotonic: Callable[[], float]) -> None:
        self._console = console
        self._monotonic = monotonic
        self._text = "reading"
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._show, name="progress", daemon=True)

    def __call__(self, text: str) -> None:
        self._text = text

    def __enter__(self) -> Progress:
        self._began = self._monotonic()
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._ended.set()
        self._thread.join()

    def _show(self) -> None:
        if self._ended.wait(QUIET_S):
            return
        if not self._console.is_terminal:
            while True:
                self._console.print(self._line(), soft_wrap=True)
                if self._ended.wait(LINE_S):
                    return
        status: Status = self._console.status(self._line())
        with status:
            while not self._ended.wait(REDRAW_S):
                status.update(self._line())

    def _line(self) -> Text:
        return Text(f"postmortem: {words.clip(self._text, 60)}, {self._monotonic() - self._began:.0f} s")
