"""Which exceptions were raised on which rank: tracebacks out of interleaved output, chains followed to their first link."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from dtprobe.diagnose.case import Case, Line

GOES_ON = 2
_WORKS = re.compile(r"(?i)\b(?:step|iter(?:ation)?|epoch|batch|update)s?\b[\s:=#'\"\[(]*\d")
HEAD = "Traceback (most recent call last)"
_FILE = re.compile(r'^[\s|+]*File "(?P<file>[^"]+)", line (?P<line>\d+)(?:, in (?P<name>.*))?')
_ENDS = re.compile(
    r"^[\s|+]*(?:\[rank ?\d+\]:? ?)?(?P<type>[A-Za-z_][\w]*(?:\.[A-Za-z_]\w*)*)(?:\((?P<inner>[\w.]+)\))?(?:: ?(?P<text>.*))?$"
)
_BARE = re.compile(r"^(?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception): \S")
"""An exception's own line behind a rank's tag: of some logs only these lines are kept."""
_LOOKS_LIKE_ONE = re.compile(r"(?:Error|Exception|Exit|Interrupt|Warning|Fault|Failure|Timeout|Aborted|Iteration|Group)$")
_CHAINED = ("During handling of the above exception", "The above exception was the direct cause")
_LAUNCHERS = re.compile(
    r"ChildFailedError|CalledProcessError|ProcessRaisedException|ProcessExitedException|SignalException|RayTaskError|RayActorError|"
    r"ActorDiedError|EngineDeadError|WorkerCrashedError|SystemExit|RendezvousClosedError|RendezvousGracefulExitError|"
    r"ExceptionGroup|BrokenProcessPool|TrainingFailedError|ActorUnavailableError"
)
_EFFECTS = re.compile(
    r"Connection reset by peer|Connection closed by|Connection refused by peer|Broken pipe|communicator was aborted|"
    r"Watchdog caught collective|remote process exited|ncclRemoteError|Socket Timeout|socketProgress|"
    r"connection was likely closed|remote server shutdown|failed to recv, got 0 bytes|got 0 bytes|"
    r"Timed out waiting \d+ms for|Wait timeout|wait timeout|timed out in blocking wait|Timed out waiting for operation|"
    r"Some NCCL operations have failed|Aborting due to the failure of rank|peer closed|Read error|Write error|"
    r"pair closure|NCCL communicator encountered error|store->get\(|EOFError|worker group failed|"
    r"end of file|broadcast\(\) is failing|monitoredBarrier, but received errors|cannot schedule new futures|"
    r"Exception raised from|got signal: ?15|terminated by signal 15|another rank (?:has )?failed|"
    r"Monitored Barrier encountered error|failed to pass monitoredBarrier|successfully reached monitoredBarrier|"
    r"Please check rank \d+ logs for faulty rank|has not (?:joined|called|reached) the barrier|barrier (?:has )?timed out|"
    r"client socket has timed out|in store based barrier|clients joined|Timed out after \d+ seconds waiting|"
    r"has already been (?:aborted|destroyed)|Process group has been (?:aborted|shut)",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Raised:
    """An exception that ended a traceback. `frames` are `file:line in name`, outermost first. `lines` are first and last line number.

    `bare`: only its last line was kept. `effect`: its words tell that something else failed before (a peer is gone, a time-out, the launcher's own report).
    """

    rank: int | None
    type: str
    text: str
    line: Line
    first_line: int
    frames: tuple[str, ...] = ()
    frame_lines: tuple[Line, ...] = ()
    effect: bool = False
    launcher: bool = False
    chained: bool = False
    ignored: bool = False
    bare: bool = False

    @property
    def short(self) -> str:
        """Type and message on one line."""
        name = self.type.rpartition(".")[2]
        return f"{name}: {self.text}"[:160] if self.text else name

    @property
    def where(self) -> str | None:
        """The innermost frame outside installed packages, else the innermost one."""
        own = [
            one
            for one in self.frames
            if "site-packages/" not in one and "dist-packages/" not in one and "/lib/python" not in one
        ]
        found = own or list(self.frames)
        return found[-1] if found else None


class _Block:
    __slots__ = ("chained", "first", "frame_lines", "frames", "ignored")

    def __init__(self, line: Line, *, chained: bool, ignored: bool) -> None:
        self.first, self.chained, self.ignored = line, chained, ignored
        self.frames: list[str] = []
        self.frame_lines: list[Line] = []


@lru_cache(maxsize=2)
def raised(case: Case) -> tuple[Raised, ...]:
    """Every exception that ended a traceback, in the order read; without one those that their rank did not go on after."""
    found = tuple(_read(case))
    bare = [one for one in found if one.bare]
    over = _went_on(case, bare) if bare else frozenset()
    return tuple(one for one in found if one not in over)


def _went_on(case: Case, bare: Sequence[Raised]) -> frozenset[Raised]:
    """Those after which their rank told of more work in the same file, and not of a restart: a program printed what it caught."""
    open_ones = {(one.line.artifact.name, one.line.number): one for one in bare}
    running: dict[tuple[str, int | None], list[Raised]] = {}
    told: Counter[Raised] = Counter()
    for line in case.lines:
        name = line.artifact.name
        if (one := open_ones.get((name, line.number))) is not None:
            running.setdefault((name, line.rank), []).append(one)
        elif running and "restart" in line.text:
            running = {key: ones for key, ones in running.items() if key[0] != name}
        elif running and (name, line.rank) in running and _WORKS.search(line.text):
            told.update(running[name, line.rank])
    return frozenset(one for one, times in told.items() if times >= GOES_ON)


def _stream(line: Line) -> tuple[object, ...]:
    return (line.artifact.name, line.rank, line.local_rank, line.host, line.pid)


def _read(case: Case) -> Iterator[Raised]:
    open_blocks: dict[tuple[object, ...], _Block] = {}
    chained: dict[tuple[object, ...], bool] = {}
    ignored: dict[tuple[object, ...], bool] = {}
    for line in case.lines:
        text = line.text
        key = _stream(line)
        if HEAD in text:
            open_blocks[key] = _Block(line, chained=chained.pop(key, False), ignored=ignored.pop(key, False))
            continue
        if text.startswith(_CHAINED):
            chained[key] = True
            continue
        if "Exception ignored in" in text:
            ignored[key] = True
            continue
        if found := _FILE.match(text):
            block = open_blocks.get(key)
            if block is None:
                block = open_blocks[key] = _Block(line, chained=False, ignored=False)
            block.frames.append(f"{found['file']}:{found['line']} in {found['name'] or '?'}")
            block.frame_lines.append(line)
            continue
        block = open_blocks.get(key)
        if block is None:
            if (one := _alone(line)) is not None:
                yield one
            continue
        if (one := _end(line, block)) is not None:
            del open_blocks[key]
            yield one


def _alone(line: Line) -> Raised | None:
    """An exception of a rank of which this line is all that is left."""
    if line.rank is None or line.artifact.kind != "text" or ("Error" not in line.text and "Exception" not in line.text):
        return None
    one = _end(line, _Block(line, chained=False, ignored=False)) if _BARE.match(line.text) else None
    return replace(one, bare=True) if one is not None else None


def _end(line: Line, block: _Block) -> Raised | None:
    """The exception, where this line is the end of the traceback and not source code or carets of a frame."""
    text = line.text
    bare = text.lstrip(" |+")
    if not bare or (text[:1].isspace() and not text.lstrip().startswith(("|", "+")) and len(text) - len(text.lstrip()) >= 2):
        return None
    found = _ENDS.match(text)
    if found is None:
        return None
    name = found["type"]
    if not (_LOOKS_LIKE_ONE.search(name) or "." in name or (block.frames and found["text"] is not None and name[:1].isupper())):
        return None
    tag = re.match(r"^\[rank ?(\d+)\]", text)
    said = f"{name} {found['inner'] or ''} {found['text'] or ''}"
    return Raised(
        rank=int(tag[1]) if tag else line.rank,
        type=name,
        text=(found["text"] or "").strip(),
        line=line,
        first_line=block.first.number,
        frames=tuple(block.frames),
        frame_lines=tuple(block.frame_lines),
        effect=_EFFECTS.search(said) is not None,
        launcher=_LAUNCHERS.search(name) is not None,
        chained=block.chained,
        ignored=block.ignored,
    )
