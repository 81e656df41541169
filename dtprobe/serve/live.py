"""What is known, kept until the folder changes: reading ten thousand runs for every request would be felt."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

from dtprobe import catalog
from dtprobe.site import Known, Pages, nights
from dtprobe.store import history


class Live:
    """The pages of a folder as it is now. The history is read anew where a file came or went, nights where they were written."""

    def __init__(self, out: Path, now_ns: Callable[[], int], paths: Sequence[Path] = ()) -> None:
        self._out = out
        self._now_ns = now_ns
        self._catalogue = catalog.load(paths)
        self._seen: tuple[object, ...] = ()
        self._pages: Pages | None = None

    def pages(self) -> Pages:
        seen = self._stamp()
        if self._pages is None or seen != self._seen:
            old, self._pages = self._pages, Pages(Known(self._out, history(self._out), self._catalogue, self._now_ns()))
            self._seen = seen
            if old is not None:
                old.known.close()
        else:
            known = self._pages.known
            known.nights = nights.listed(self._out, known.nights)
        return self._pages

    def close(self) -> None:
        if self._pages is not None:
            self._pages.known.close()

    def _stamp(self) -> tuple[object, ...]:
        """Changes when a run folder or a file of the history appears or vanishes."""
        try:
            folders = sorted((entry.name, entry.stat().st_mtime_ns) for entry in os.scandir(self._out) if entry.is_dir())
        except OSError:
            return ()
        return tuple(one for one in folders if one[0] != "suites")
