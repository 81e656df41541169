"""strace's words: which calls a fault fires at, and what its output says about them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

from dtprobe.errors import Unavailable
from dtprobe.inject import Firing, Target

_LINE = re.compile(r"(\d+) +(\d+)\.(\d{6}) (.*)")
_CALL = re.compile(r"(\w+)\(|<\.\.\. (\w+) resumed>")
_MARK = re.compile(r"\((INJECTED|DELAYED)\)")


def when(target: Target) -> str | Unavailable:
    """The target's calls as strace's `when`: FIRST, FIRST..LAST, FIRST+STEP or FIRST..LAST+STEP; empty for every call."""
    if target.nth:
        numbers = sorted(set(target.nth))
        steps = {later - earlier for earlier, later in pairwise(numbers)}
        if len(steps) > 1:
            return Unavailable(f"strace cannot fire at calls {'+'.join(map(str, numbers))}", "give calls at equal distances")
        return str(numbers[0]) if not steps else f"{numbers[0]}..{numbers[-1]}+{steps.pop()}"
    step = target.every or 1
    if target.times:
        return f"{step}..{step * target.times}+{step}"
    return f"{step}+{step}" if target.every else ""


def most_in_one_thread(file: Path) -> int:
    """How often one thread made one of the traced calls, at most: what `nth` and `every` are compared with."""
    counts: Counter[tuple[str, str]] = Counter()
    for text in file.read_text(encoding="utf-8", errors="replace").splitlines():
        parts = _LINE.fullmatch(text)
        call = _CALL.match(parts[4]) if parts else None
        if parts and call and call[1]:
            counts[parts[1], call[1]] += 1
    return max(counts.values(), default=0)


def firings(file: Path, rank: int | None, ranks: dict[int, int | None], signal: str | None) -> Iterator[Firing]:
    """Calls that strace says it changed, with their number in their thread; for `signal`, those at which it was sent.

    `ranks` are the ranks of processes by pid, for a trace of a whole command.
    """
    counts: Counter[tuple[int, str]] = Counter()
    last: dict[int, str] = {}
    for text in file.read_text(encoding="utf-8", errors="replace").splitlines():
        parts = _LINE.fullmatch(text)
        if parts is None:
            continue
        tid, t_ns, said = int(parts[1]), int(parts[2]) * 10**9 + int(parts[3]) * 1000, parts[4]
        if call := _CALL.match(said):
            last[tid] = call[1] or call[2]
            counts[tid, last[tid]] += call[1] is not None
            hit = signal is None and _MARK.search(said) is not None
        else:
            # strace sends the signal as the kernel does: nobody else's carries SI_KERNEL here.
            hit = signal is not None and tid in last and said.startswith(f"--- {signal} ") and "SI_KERNEL" in said
        if hit:
            name = last[tid]
            yield Firing(t_ns=t_ns, rank=ranks.get(tid, rank), call=name, nth=counts[tid, name], detail=f"thread {tid}")
