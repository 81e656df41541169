"""What the job's own records say plainly: a value that is the rank's own input, gradients apart, several winners of one claim, jobs of one rank.

A worker that checks its own results says more than wrong or right. Where it does not, `checks` gives a lead and no answer.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from dtprobe.diagnose import seen
from dtprobe.diagnose.case import Case, Finding, quote
from dtprobe.diagnose.facts.units import calls_in, rounds
from dtprobe.diagnose.seen.observed import Observation, Try
from dtprobe.readers.artifact import as_float, as_int, as_text

ANALYST = "own checks"
OWN_INPUT, APART, WINNERS, UNSEEN, JOBS, LOCKED, UNPAIRED, STALE = 0.7, 0.7, 0.75, 0.65, 0.75, 0.6, 0.6, 0.9
LEAST_S = 1.0
LOOKS = 4
"""So many looks in a row show a lock that one process keeps and another waits for."""
_PARAMETER = re.compile(r"\b[\w.]+\.(?:weight|bias|gamma|beta)\b")
_MESH = re.compile(r"connectFullMesh failed|Connect timeout \[|pair\.cc:\d+\] Read error")
_RECEIVING = re.compile(r"ms for recv operation to complete")


def analyse(case: Case) -> Iterator[Finding]:
    """One finding a kind at most."""
    found = seen.of(case)
    yield from _own_input(found.observations)
    yield from _apart(found.observations)
    yield from _winners(found.observations)
    yield from _unseen(found.observations)
    yield from _jobs(found.observations)
    yield from _locked(found.observations)
    yield from _stale(found.observations)
    for _what, repeated in rounds(found.tries):
        yield from _unpaired(case, repeated[0])
        break


def _finding(
    mode: str, likelihood: float, because: str, shown: Sequence[Observation], *, everyone: bool = False, not_proven: str = ""
) -> Finding:
    ranks = tuple(sorted({one.rank for one in shown if one.rank is not None}))
    return Finding(
        mode=mode,
        analyst=ANALYST,
        likelihood=likelihood,
        because=because,
        first="all" if everyone else ranks[0] if len(ranks) == 1 else None,
        suspects=() if everyone else ranks,
        at_ns=shown[0].t_ns,
        evidence=tuple(quote(one.line, "cause") for one in shown[:3]),
        not_proven=not_proven,
    )


def _own_input(observed: Sequence[Observation]) -> Iterator[Finding]:
    """Wrong, and just what the rank itself had put in: read before the collective had written."""
    found = [one for one in observed if one.fields.get("own") is True and _positive(one.fields, "wrong")]
    if found:
        yield _finding(
            "read-before-wait",
            OWN_INPUT,
            f"rank {found[0].rank} read its own input where the collective's result belongs, and no error told of it",
            found,
            not_proven="that nothing waited: a wait on the wrong stream or handle looks the same",
        )


def _apart(observed: Sequence[Observation]) -> Iterator[Finding]:
    """The ranks' gradients of named parameters differ after backward."""
    found = [
        one
        for one in observed
        if _positive(one.fields, "apart")
        and _positive(one.fields, "wrong")
        and _PARAMETER.search(as_text(one.fields.get("lost")) or "")
    ]
    if found:
        yield _finding(
            "gradient-not-reduced",
            APART,
            f"the job's own check found the ranks' gradients of {as_text(found[0].fields.get('lost'))} apart after backward",
            found,
            everyone=len({one.rank for one in found}) > 1,
            not_proven="why no hook of DDP reduced them",
        )


def _winners(observed: Sequence[Observation]) -> Iterator[Finding]:
    found = [one for one in observed if (as_int(one.fields.get("winners")) or 0) > 1]
    if found:
        yield _finding(
            "file-claim-race",
            WINNERS,
            f"{as_int(found[0].fields.get('winners'))} processes won one claim, in {len(found)} rounds: looking and creating are two steps",
            found,
            everyone=True,
            not_proven="with which calls they claimed",
        )


def _unseen(observed: Sequence[Observation]) -> Iterator[Finding]:
    """A rank did not see for long what another had written."""
    found = [one for one in observed if (as_float(one.fields.get("blind_s")) or 0.0) >= LEAST_S]
    if found:
        longest = max(as_float(one.fields.get("blind_s")) or 0.0 for one in found)
        yield _finding(
            "filestore-stale-read",
            UNSEEN,
            f"rank {found[0].rank} did not see for {longest:.1f} s what another rank had written to the store, and then did, without an error",
            found,
            not_proven="that its client of the file system remembered an old view: its mount options tell",
        )


def _jobs(observed: Sequence[Observation]) -> Iterator[Finding]:
    """Several tasks of one start each hold themselves for rank 0 of a world of one."""
    alone: dict[object, Observation] = {}
    for one in observed:
        task = one.fields.get("task", one.fields.get("procid"))
        if task is not None and as_int(one.fields.get("env_world")) == 1 and as_int(one.fields.get("env_rank")) == 0:
            alone.setdefault(task, one)
    if len(alone) > 1:
        yield _finding(
            "nested-launcher",
            JOBS,
            f"{len(alone)} tasks of one start each are rank 0 of a world of 1: as many jobs as tasks",
            list(alone.values()),
            everyone=True,
            not_proven="which launcher was started within which",
        )


def _locked(observed: Sequence[Observation]) -> Iterator[Finding]:
    """In look after look one process holds the lock of a file, and another waits for it."""
    held = [one for one in observed if one.fields.get("waiting") is False and as_int(one.fields.get("holder")) is not None]
    waiting = [one for one in observed if one.fields.get("waiting") is True]
    holders = {as_int(one.fields.get("holder")) for one in held}
    if len(held) < LOOKS or len(waiting) < LOOKS or len(holders) != 1:
        return
    holder = holders.pop()
    rank = next((one.rank for one in observed if one.pid == holder), None)
    span_s = (held[-1].t_ns - held[0].t_ns) / 1e9
    if span_s >= LEAST_S:
        yield Finding(
            mode="filestore-torn-record",
            analyst=ANALYST,
            likelihood=LOCKED,
            because=f"process {holder} kept the lock of the store's file for {span_s:.1f} s and more, while another waited for it",
            first="all",
            suspects=(rank,) if rank is not None else (),
            at_ns=held[0].t_ns,
            evidence=(quote(held[0].line, "cause"), quote(waiting[0].line, "effect")),
            not_proven="that it reads a half-written record again and again: strace shows reads that return 0",
        )


def _stale(observed: Sequence[Observation]) -> Iterator[Finding]:
    """Starts of one kind on the same machine: some came together, others met addresses at which nobody or somebody else answered."""
    starts = [one for one in observed if one.kind == "start" and "error" in one.fields]
    failed = [one for one in starts if _MESH.search(as_text(one.fields.get("error")) or "")]
    joined = [one for one in starts if not one.fields.get("error")]
    if failed and joined:
        yield _finding(
            "filestore-stale-file",
            STALE,
            f"{len(joined)} of {len(starts)} ranks' starts came together and {len(failed)} met addresses at which no peer of theirs answered, on one "
            "machine: neither network nor names are to blame, the store told of other processes",
            failed,
            everyone=True,
            not_proven="that the store is a file: one of an earlier attempt that is not a file does the same",
        )


def _unpaired(case: Case, unit: Mapping[int, Try]) -> Iterator[Finding]:
    """One rank timed out receiving; all others had ended the same unit at once, without an error and without a collective."""
    waiting = [one for one in unit.values() if _RECEIVING.search(one.text) and one.ended_ns is not None]
    others = [one for one in unit.values() if one.rank not in {each.rank for each in waiting}]
    if len(waiting) != 1 or not others or any(one.error or one.ended_ns is None for one in others):
        return
    late = waiting[0]
    half = late.begun_ns + ((late.ended_ns or 0) - late.begun_ns) // 2
    if any((one.ended_ns or 0) > half for one in others):
        return
    if case.recording is not None and any(calls_in(case.recording, one) for one in unit.values()):
        return
    yield Finding(
        mode="p2p-unpaired",
        analyst=ANALYST,
        likelihood=UNPAIRED,
        because=f"rank {late.rank} timed out receiving in {late.what}, which its peers had ended long before, without an error",
        first=others[0].rank if len(others) == 1 else None,
        suspects=tuple(sorted(one.rank for one in others)),
        at_ns=late.begun_ns,
        evidence=(quote(late.line, "cause"), quote(others[0].line, "confirm")),
        not_proven="whether the send was never made, or begun and dropped before it was done",
    )


def _positive(fields: Mapping[str, object], name: str) -> bool:
    value = fields.get(name)
    return value is True or (isinstance(value, int | float) and value > 0)
