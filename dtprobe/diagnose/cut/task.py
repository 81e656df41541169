"""What a task does on its node: read its share, leave a partial result. The single-machine postmortem reads each artifact the same way."""

from __future__ import annotations

import socket
from pathlib import Path

from dtprobe.diagnose import lines
from dtprobe.diagnose.analysts.collectives import recording
from dtprobe.diagnose.cut import parts
from dtprobe.diagnose.cut.shares import Share, mark, unpacked
from dtprobe.errors import UsageError
from dtprobe.readers.flight_columns import Tables


def work(text: str, folder: Path) -> None:
    """Read the share that the text tells of; the partial result goes to a new folder. Raises UsageError where its files are not here."""
    share = unpacked(text)
    _reachable(share)
    folder.mkdir(parents=True)
    parts.write_lines(map(lines.read, share.texts), folder, mark(text))
    tables = Tables()
    parts.write_dumps((recording.read(one, tables) for one in share.dumps), tables, folder, mark(text))


def _reachable(share: Share) -> None:
    """One file that is gone is a problem of that file; where all of them are, it is another file system."""
    for root in share.roots:
        if not root.exists():
            raise UsageError(*_elsewhere(root))
    if not any(one.path.exists() for one in share.artifacts):
        raise UsageError(*_elsewhere(share.artifacts[0].path))


def _elsewhere(path: Path) -> tuple[str, str]:
    return f"{path} is not there on {socket.gethostname()}", "put the artifacts where all nodes see them under the same path"
