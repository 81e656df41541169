"""Errors that NCCL returned to torch: which code, on which rank, while making a communicator or in a call on one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from dtprobe.diagnose.case import Case, Event, Finding, First, Line, quote

ANALYST = "nccl errors"
MAKING, CALLING, REMOTE = 0.75, 0.75, 0.6
NEAR, BEFORE = 6, 60
"""So many lines after the error its code and NCCL's own words stand, so many before it the traceback."""
WORDS = {
    "unhandled cuda error": "ncclUnhandledCudaError",
    "unhandled system error": "ncclSystemError",
    "internal error": "ncclInternalError",
    "invalid argument": "ncclInvalidArgument",
    "invalid usage": "ncclInvalidUsage",
    "remote process exited": "ncclRemoteError",
}
CALLED = {
    "ncclUnhandledCudaError": ("nccl-cuda-error", CALLING),
    "ncclSystemError": ("nccl-remote-error", REMOTE),
    "ncclInternalError": ("nccl-internal-error", CALLING),
    "ncclRemoteError": ("nccl-remote-error", REMOTE),
}
_MAKING = ("NCCLUtils", "NCCLComm::create", "ncclCommInitRank", "initNCCLComm", "getNCCLComm")
_MAKERS = (
    ", in init_process_group",
    ", in _new_process_group_helper",
    ", in new_group",
    "eager_connect_single_device",
    "perform_nocolor_split",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Error:
    """One error. `last` is what NCCL itself said of it ("Last error:"), where it said anything."""

    rank: int | None
    code: str
    making: bool
    line: Line
    code_line: Line | None
    last: Line | None
    t_ns: int | None


def analyse(case: Case) -> Iterator[Finding]:
    """One finding for the errors while communicators are made, one for those in calls of each kind."""
    errors = list(_errors(case))
    making = [one for one in errors if one.making]
    if making:
        yield _finding(case, "nccl-init-failure", MAKING, making, "making a communicator")
    for code, (mode, likelihood) in CALLED.items():
        found = [one for one in errors if one.code == code and not one.making]
        if found:
            yield _finding(case, mode, likelihood, found, "in a call on a communicator")


def _errors(case: Case) -> Iterator[Error]:
    events = case.of("nccl-error")
    if not events:
        return
    names = {event.line.artifact.name for event in events}
    lines: dict[str, list[Line]] = {}
    for line in case.lines:
        if line.artifact.name in names:
            lines.setdefault(line.artifact.name, []).append(line)
    for event in events:
        own = lines[event.line.artifact.name]
        at = own.index(event.line)
        yield _error(event, own[max(0, at - BEFORE) : at], own[at + 1 : at + 1 + NEAR])


def _error(event: Event, before: Sequence[Line], after: Sequence[Line]) -> Error:
    code_line = next(
        (
            line
            for line in after
            if (line.text.lstrip().startswith("nccl") and "Error" in line.text) or "ncclInvalid" in line.text
        ),
        None,
    )
    what = event.fields.get("what", "")
    code = next((code for word, code in WORDS.items() if word in what), "")
    told = next((at for at, line in enumerate(after) if line.text.strip().startswith("Last error:")), None)
    last = None
    if told is not None and told + 1 < len(after) and after[told + 1].rank == event.line.rank:
        text = after[told + 1].text.strip()
        last = (
            after[told + 1]
            if text and not text.startswith(("Exception raised", "frame #", "Traceback", "[W", "[E", "W1", "E1"))
            else None
        )
    same = [line.text for line in before if line.rank == event.line.rank]
    # Newer releases check calls and asynchronous errors in NCCLUtils too: a peer that is gone is no failed making by that word alone.
    checked = code != "ncclRemoteError" and any(word in event.line.text for word in _MAKING)
    making = checked or any(maker in text for text in same[-BEFORE:] for maker in _MAKERS)
    return Error(rank=event.rank, code=code, making=making, line=event.line, code_line=code_line, last=last, t_ns=event.t_ns)


def _finding(case: Case, mode: str, likelihood: float, errors: Sequence[Error], where: str) -> Finding:
    ranks = sorted({one.rank for one in errors if one.rank is not None})
    chief = min(errors, key=lambda one: (one.t_ns is None, one.t_ns or 0))
    evidence = []
    for line in (chief.line, chief.code_line, chief.last):
        if line is not None:
            evidence.append(quote(line, "cause"))
    for one in errors:
        if one.rank != chief.rank and len(evidence) < 5:
            evidence.append(quote(one.line, "confirm"))
    return Finding(
        mode=mode,
        analyst=ANALYST,
        likelihood=likelihood,
        because=f"NCCL returned {chief.code or 'an error'} {where}"
        + (f" on rank {chief.rank}." if chief.rank is not None else "."),
        first=_first(case, ranks, chief),
        suspects=tuple(ranks if len(ranks) <= 1 else [rank for rank in ranks if rank == chief.rank] or ranks),
        host=chief.line.host,
        at_ns=chief.t_ns,
        evidence=tuple(evidence),
        not_proven="" if chief.last is not None else "why: NCCL left no words about it; run again with NCCL_DEBUG=INFO",
    )


def _first(case: Case, ranks: Sequence[int], chief: Error) -> First:
    if len(ranks) > 1 and set(ranks) >= set(case.who.seen):
        return "all" if chief.t_ns is None else chief.rank
    return chief.rank
