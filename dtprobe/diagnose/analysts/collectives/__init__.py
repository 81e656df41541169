"""Flight recorders: the calls of all ranks matched with each other, group by group and pair by pair.

`recording` reads the dumps, `divergence` finds the first call at which ranks of a group disagree, `waits` who waits for whom and
`blame` what that means, `memberships`, `roots` and `lateness` the rest; `findings` writes it down.
"""

from __future__ import annotations

from collections.abc import Iterator

from dtprobe.diagnose.analysts.collectives.findings import findings
from dtprobe.diagnose.case import Case, Finding


def analyse(case: Case) -> Iterator[Finding]:
    """What the flight recorders' dumps say; nothing where there are none."""
    if case.recording is not None:
        yield from findings(case.recording)
