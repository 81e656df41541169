"""What the ranks' stacks show against each other: the one that is elsewhere while the others wait, and processes that no tool can stop."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from dtprobe.diagnose import seen
from dtprobe.diagnose.case import Case, Finding, Quote
from dtprobe.diagnose.facts.hang import Hang, hang
from dtprobe.diagnose.seen import Seen
from dtprobe.diagnose.seen.doing import WAITING, Activity, Doing, activity, alike, own
from dtprobe.diagnose.seen.stacks import Stack
from dtprobe.readers.threads import Thread, function_of

ANALYST = "stacks"
STOPPED, FORKED, CLEANUP, HELD = 0.9, 0.9, 0.85, 0.85
CRASHED, BLOCKED = 0.8, 0.75
BUSY, WHOLE_CORE = 0.74, 90.0
ELSEWHERE, LEFT, FOREIGN, LATE, MINORITY = 0.65, 0.65, 0.6, 0.45, 0.45

_STOPPED = re.compile(r"Failed to suspend process.*SIGSTOP|unexpected waitpid result.*SIGSTOP")
_HELD = re.compile(
    r"^__lll_lock_wait|^futex_wait|^__futex|^pthread_mutex_lock|^___?pthread_mutex_lock|^acquire |^__GI___?lll_lock"
)
_FORKED = re.compile(
    r"^(?:_worker_loop|_bootstrap|_launch|worker_loop|_do_pull_task) \(|caffe2::pthreadpool|^__run_fork_handlers|atexit|^_main \(|^malloc|^set_num_threads|^gomp_|^GOMP_|^omp_"
)
_FORK = re.compile(r"multiprocessing/popen_fork\.py")
_WORKER = re.compile(r"pt_data_worker|_worker_loop|spawn_main|multiprocessing")


def analyse(case: Case) -> Iterator[Finding]:
    """Findings from stacks alone; what they mean beside other evidence is decided later."""
    found = seen.of(case)
    if not found.stacks:
        return
    yield from _stopped(found.stacks)
    forked = list(_forked(found)) or list(_blocked(found))
    yield from forked
    yield from _in_children(case, found)
    if not forked:
        yield from _elsewhere(found, hang(case)) if not found.ended_well else _late(found)
    yield from _crashed(found.stacks)


def _stopped(stacks: Sequence[Stack]) -> Iterator[Finding]:
    for one in stacks:
        if one.snapshot.reason and _STOPPED.search(one.snapshot.reason):
            yield Finding(
                mode="rank-stopped",
                analyst=ANALYST,
                likelihood=STOPPED,
                because=f"py-spy could not suspend process {one.snapshot.pid}, because it was stopped already.",
                first=one.rank,
                suspects=(one.rank,) if one.rank is not None else (),
                evidence=(Quote(file=one.artifact.name, line=one.snapshot.line, text=one.snapshot.reason[:400], role="cause"),),
                not_proven="who stopped it",
            )
            return


def _forked(found: Seen) -> Iterator[Finding]:
    """A loader's worker that waits for a lock, while its rank waits for the worker."""
    for stack in found.stacks:
        for thread in stack.snapshot.threads:
            lock = next((frame for frame in thread.frames[:6] if _HELD.search(frame)), None)
            forked = next((frame for frame in thread.frames if _FORKED.search(frame)), None)
            worker: bool | re.Match[str] | None = (
                stack.child or "_worker_loop" in " ".join(thread.frames) or _WORKER.search(stack.snapshot.command or "")
            )
            if stack.snapshot.tool == "gdb" and lock and forked:
                worker = worker or _waits_for_loader(found, stack.rank)
            if lock is None or forked is None or not worker or not _waits_for_loader(found, stack.rank, also_unknown=True):
                continue
            parent = found.doing.get(stack.rank) if stack.rank is not None else None
            evidence = [stack.quote(thread, frame, "cause") for frame in dict.fromkeys((lock, forked, *_within(thread, lock)))]
            if parent is not None:
                evidence.append(parent.quote("confirm"))
            yield Finding(
                mode="dataloader-fork-deadlock",
                analyst=ANALYST,
                likelihood=FORKED,
                because=f"A forked worker of rank {stack.rank} waits for a lock in {function_of(lock)} that another thread of its parent held when it was forked.",
                first=stack.rank,
                suspects=(stack.rank,) if stack.rank is not None else (),
                evidence=tuple(evidence),
                not_proven="which thread of the parent held the lock",
            )
            return


def _blocked(found: Seen) -> Iterator[Finding]:
    """A worker that was forked, and stands still in the data set's own code, while its rank waits for it."""
    for stack in found.stacks:
        thread = stack.main
        if not stack.child or thread is None or thread.active is not False or not _waits_for_loader(found, stack.rank):
            continue
        if not any(_FORK.search(one) for one in thread.frames) or not any("_worker_loop" in one for one in thread.frames):
            continue
        if own(thread.frames[0]) and stack.rank is not None:
            yield Finding(
                mode="dataloader-fork-deadlock",
                analyst=ANALYST,
                likelihood=BLOCKED,
                because=f"A forked worker of rank {stack.rank} stands still in {function_of(thread.frames[0])}, and the rank waits for it.",
                first=stack.rank,
                suspects=(stack.rank,),
                evidence=(stack.quote(thread, thread.frames[0], "cause"), found.doing[stack.rank].quote("confirm")),
                not_proven="that it waits for a lock and not for a file or a peer: native frames, or its wchan, would tell",
            )
            return


def _within(thread: Thread, lock: str) -> list[str]:
    """The frame that asked for the lock."""
    at = thread.frames.index(lock)
    return thread.frames[at + 1 : at + 2]


def _waits_for_loader(found: Seen, rank: int | None, *, also_unknown: bool = False) -> bool:
    parent = found.doing.get(rank) if rank is not None else None
    return parent.doing in (Doing.LOADER, Doing.LOCK) if parent is not None else also_unknown


_AGENT = re.compile(r"torch/distributed/(?:elastic|launcher|run|launch)|multiprocessing/popen_spawn|spawn_main")


def _in_children(case: Case, found: Seen) -> Iterator[Finding]:
    """Processes forked from ranks, with the group of their parent, that are in a collective of it."""
    commands = {one.snapshot.pid: one.snapshot.command for one in found.stacks if one.snapshot.pid is not None}
    inside: list[tuple[Stack, Thread, str]] = []
    for stack in found.stacks:
        thread, parent = stack.main, stack.snapshot.parent
        if parent is None or thread is None or any(_AGENT.search(frame) for frame in thread.frames):
            continue
        # without exec a child keeps its parent's command line
        same = stack.snapshot.command is not None and commands.get(parent) == stack.snapshot.command
        one = activity(replace(stack, child=False, rank=0 if stack.rank is None else stack.rank))
        forked = same or any(_FORK.search(frame) for frame in thread.frames)
        if forked and one is not None and one.doing in WAITING and one.operation is not None:
            rank = stack.rank if stack.rank is not None else _named_by(case, stack.snapshot.pid)
            inside.append((replace(stack, rank=rank), thread, one.place or one.frame))
    if not inside:
        return
    stack, thread, frame = inside[0]
    ranks = tuple(sorted({one.rank for one, _, _ in inside if one.rank is not None}))
    evidence = [each.quote(own_thread, place, "cause") for each, own_thread, place in inside[:3]]
    if stack.snapshot.line is not None:
        head = f"Process {stack.snapshot.pid} (child of {stack.snapshot.parent}): {stack.snapshot.command or ''}"
        evidence.append(Quote(file=stack.artifact.name, line=stack.snapshot.line, text=head[:400], role="confirm"))
    yield Finding(
        mode="fork-after-init",
        analyst=ANALYST,
        likelihood=FORKED,
        because=f"Process {stack.snapshot.pid} was forked from {stack.snapshot.parent}, a rank, and waits in a collective of its group in "
        f"{function_of(frame)}: the connections and threads of the group are its parent's.",
        first="all" if len(inside) > 1 and not 0 < len(ranks) < len(inside) else ranks[0] if ranks else None,
        suspects=ranks,
        evidence=tuple(evidence),
        not_proven="that the parent made its group before it forked",
    )


def _named_by(case: Case, pid: int | None) -> int | None:
    """The rank that tells of this process in its own lines, as who starts one does."""
    named = re.compile(rf"(?i)\bpids?\b\W{{0,4}}{pid}\b")
    told = {line.rank for line in case.lines if line.rank is not None and str(pid) in line.text and named.search(line.text)}
    return told.pop() if len(told) == 1 else None


def _elsewhere(found: Seen, hung: Hang | None) -> Iterator[Finding]:
    """The ranks that are elsewhere while others wait for ranks."""
    # an import is often the dump's own: symbolizing the first stacks imports torch._inductor
    doing = {rank: one for rank, one in found.doing.items() if one.doing is not Doing.IMPORT}
    waiting = {rank: one for rank, one in doing.items() if one.doing in WAITING}
    others = {rank: one for rank, one in doing.items() if one.doing not in WAITING}
    barrier = {rank: one for rank, one in waiting.items() if one.doing is Doing.BARRIER}
    if others and len(others) <= max(1, len(doing) // 2) and (waiting or len(doing) == 1):
        yield from _away(found, others, waiting, hung)
    elif barrier and len(barrier) < len(waiting) and len(barrier) <= len(doing) / 2 and not others:
        one = next(iter(barrier.values()))
        other = next(each for rank, each in waiting.items() if rank not in barrier)
        yield _finding(
            "uneven-dataloader-desync",
            LEFT,
            barrier,
            f"Rank {one.rank} waits in a barrier while the others wait in their step.",
            [other],
            not_proven="that it had fewer batches: it may have left the loop for another reason",
        )
    elif not others and len(doing) > 2:
        yield from _minority(doing)


def _late(found: Seen) -> Iterator[Finding]:
    """The job came to its end all the same: who was elsewhere then was late."""
    waiting = [one for one in found.doing.values() if one.doing in WAITING]
    others = {rank: one for rank, one in found.doing.items() if one.doing in (Doing.SLEEP, Doing.CODE, Doing.LOADER)}
    if waiting and len(others) == 1:
        ((rank, one),) = others.items()
        yield _finding(
            "straggler", LATE, others, f"Rank {rank} {one.doing} while the others wait for it, and came later.", waiting[:1]
        )


def _away(found: Seen, others: Mapping[int, Activity], waiting: Mapping[int, Activity], hung: Hang | None) -> Iterator[Finding]:
    one = next(iter(others.values()))
    # where no other rank's stack is there, the time-outs may tell that others wait
    awaited = bool(waiting) or (hung is not None and set(others) <= set(hung.odd))
    some = list(waiting.values())[:1]
    if one.doing is Doing.DESTROY:
        yield _finding(
            "cleanup-deadlock-after-exception",
            CLEANUP,
            others,
            f"Rank {one.rank} is in destroy_process_group" + (" while the others wait for it." if waiting else "."),
            some,
            not_proven="that an exception brought it there: its text has not appeared",
        )
        return
    if one.holds_gil:
        yield _finding(
            "gil-held",
            HELD,
            others,
            f"Rank {one.rank}'s main thread holds the interpreter's lock without running, while the others wait for it.",
            some,
            not_proven="in which native function: `py-spy dump --native` shows it",
        )
    elif one.foreign is not None:
        yield _finding(
            "gil-held",
            FOREIGN,
            others,
            f"Rank {one.rank} is in a foreign function called from Python, while the others wait for it.",
            some,
            extra=one.foreign,
            not_proven="that the function keeps the interpreter's lock: ctypes.CDLL gives it up, ctypes.PyDLL does not",
        )
    elif awaited and one.thread.owns_gil and one.thread.active and _keeps(found, one):
        yield _finding(
            "gil-held",
            BUSY,
            others,
            f"Rank {one.rank}'s main thread runs {function_of(one.thread.frames[0])} and has the interpreter's lock, while the others wait for it.",
            some,
            extra=_head(one),
            not_proven="that it never gives the lock up: a second dump, and `py-spy dump --native`, would tell",
        )
    if not awaited:
        return
    if one.doing is Doing.LOADER:
        yield _finding(
            "data-starvation", ELSEWHERE, others, f"Rank {one.rank} waits for its data loader, the others for it.", some
        )
    elif one.doing is Doing.CHECKPOINT or (one.rank == 0 and all(each.doing is Doing.BARRIER for each in waiting.values())):
        mode = "rank0-long-work-timeout" if one.rank == 0 and len(others) == 1 else "checkpoint-storage-stall"
        yield _finding(mode, ELSEWHERE, others, f"Rank {one.rank} {one.doing}, the others wait for it.", some)
    yield _finding(
        "collective-skipped",
        ELSEWHERE - (0.05 if one.foreign or one.doing in (Doing.LOADER, Doing.CHECKPOINT) else 0.0),
        others,
        f"Rank {one.rank} {one.doing} while the others wait for it.",
        some,
        not_proven="whether it would have come later",
    )


def _keeps(found: Seen, one: Activity) -> bool:
    """Whether what runs is native: nothing of Python's stands innermost but what a library wraps, or a whole core is used."""
    busy = any(
        sample.cpu is not None and sample.cpu >= WHOLE_CORE and sample.pid == one.stack.snapshot.pid for sample in found.states
    )
    return busy or not own(one.thread.frames[0])


def _head(one: Activity) -> str:
    """How py-spy writes the state of a thread that runs with the lock."""
    tid = one.thread.tid if one.thread.tid is not None else "?"
    return f'Thread {tid} (active+gil): "{one.thread.name or ""}"'


def _minority(doing: Mapping[int, Activity]) -> Iterator[Finding]:
    """All wait, one at another place than the rest."""
    groups: dict[tuple[str, ...], list[int]] = {}
    for rank, one in doing.items():
        groups.setdefault(alike(one), []).append(rank)
    few = min(groups.values(), key=len)
    many = max(groups.values(), key=len)
    if len(groups) == 2 and len(few) == 1 and len(many) > 1:
        one, other = doing[few[0]], doing[many[0]]
        if one.operation and other.operation and one.operation != other.operation:
            yield _finding(
                "collective-type-mismatch",
                MINORITY,
                {one.rank: one},
                f"Rank {one.rank} waits in {one.operation}, the others in {other.operation}.",
                [other],
                not_proven="that the two meet in the same group",
            )


def _finding(
    mode: str,
    likelihood: float,
    ranks: Mapping[int, Activity],
    because: str,
    others: Sequence[Activity],
    *,
    extra: str | None = None,
    not_proven: str = "",
) -> Finding:
    chief = next(iter(ranks.values()))
    evidence = [one.quote("cause") for one in list(ranks.values())[:3]] + [one.quote("confirm") for one in others]
    if extra is not None:
        evidence.insert(0, chief.stack.quote(chief.thread, extra, "cause"))
    return Finding(
        mode=mode,
        analyst=ANALYST,
        likelihood=likelihood,
        because=because,
        first=chief.rank if len(ranks) == 1 else None,
        suspects=tuple(sorted(ranks)),
        evidence=tuple(evidence),
        not_proven=not_proven,
    )


_SIGNALS = (
    ("sigsegv", re.compile(r"SIGSEGV|Segmentation fault|SIGBUS|Bus error")),
    ("sigabrt", re.compile(r"SIGABRT|Aborted")),
)


def _crashed(stacks: Sequence[Stack]) -> Iterator[Finding]:
    """A crash that a core or the interpreter's fault handler shows."""
    for one in stacks:
        mode = next((mode for mode, pattern in _SIGNALS if one.snapshot.reason and pattern.search(one.snapshot.reason)), None)
        thread = one.main
        if mode is None or thread is None:
            continue
        chief = next((each for each in one.snapshot.threads if each.current), thread)
        top = chief.frames[0] if chief.frames else None
        evidence = [Quote(file=one.artifact.name, line=one.snapshot.line, text=str(one.snapshot.reason)[:400], role="cause")]
        if top:
            evidence.append(one.quote(chief, top, "cause"))
        yield Finding(
            mode=mode,
            analyst=ANALYST,
            likelihood=CRASHED if mode == "sigsegv" else ELSEWHERE,
            because=f"The process crashed ({one.snapshot.reason})" + (f" in {function_of(top)}." if top else "."),
            first=one.rank,
            suspects=(one.rank,) if one.rank is not None else (),
            evidence=tuple(evidence),
            not_proven="what made it crash there",
        )
