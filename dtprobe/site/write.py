"""The static site: all pages and the reports that they link to, in one folder that appears whole."""

from __future__ import annotations

import json
import secrets
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from dtprobe.errors import DtprobeError, UsageError
from dtprobe.site.known import Known, Run
from dtprobe.site.pages import REPORT, Pages

SCHEMA = "dtprobe.site/1"
MARKER = "site.json"
NEWEST = 3


@dataclass(frozen=True, kw_only=True)
class Built:
    """What was written, and what could not be."""

    to: Path
    pages: int
    reports: int
    notices: tuple[str, ...]


def write(known: Known, to: Path, *, newest: int = NEWEST) -> Built:
    """Write the site into `to`, replacing an earlier one; raises UsageError where `to` holds anything else.

    Reports are copied, since links would break when the folder is moved, without raw artifacts, which are large: of each scenario those of
    the newest `newest` runs and of the last run under each version, and of each regression the first bad and the last good run.
    """
    check(to)
    wanted = [run for run in _chosen(known, newest) if run.there and (known.folder(run) / REPORT).is_file()]
    pages = Pages(known, copied=frozenset(run.id for run in wanted))
    half_made = to.with_name(f".{to.name}-{secrets.token_hex(4)}")
    written = 0
    try:
        for path in pages.paths():
            page = pages.render(path)
            if page is not None:
                _put(half_made / path, page)
                written += 1
        for run in wanted:
            report = pages.report(run, known.folder(run) / REPORT)
            _put(half_made / "runs" / run.slug / run.id / REPORT, report)
        _put(half_made / MARKER, json.dumps({"schema": SCHEMA, "made_ns": known.now_ns}))
        if to.is_dir():
            shutil.rmtree(to)
        half_made.rename(to)
    except OSError as error:
        raise DtprobeError(
            f"cannot write the site to {to}: {error.strerror or error}", "free space, or name another --to"
        ) from error
    finally:
        shutil.rmtree(half_made, ignore_errors=True)
    return Built(to=to, pages=written, reports=len(wanted), notices=known.notices)


def check(to: Path) -> None:
    """Raise UsageError where a site may not be written: better known before than after the work."""
    if to.is_symlink() or (to.exists() and not to.is_dir()):
        raise UsageError(f"--to {to} is no folder", "name a folder that does not exist yet, or that holds a site")
    if to.is_dir() and any(to.iterdir()) and not (to / MARKER).is_file():
        raise UsageError(
            f"--to {to} holds something else than a site, which would be replaced", "name another folder, or empty it"
        )


def _chosen(known: Known, newest: int) -> Iterator[Run]:
    found: dict[str, Run] = {}
    for scenario in known.scenarios:
        for run in (*scenario.runs[-newest:], *(cell.last for cell in scenario.cells.values())):
            found[run.id] = run
    for one in known.regressions:
        for key in ("first_bad_run", "last_good_run"):
            named = known.runs.get(str(one.get(key)))
            if named is not None:
                found[named.id] = named
    yield from found.values()


def _put(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
