"""States of the ranks' processes: stopped ones, and one that grew until it was killed."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator, Mapping, Sequence
from statistics import median

from dtprobe.diagnose import seen
from dtprobe.diagnose.case import Case, Finding, quote
from dtprobe.diagnose.facts.ends import ends
from dtprobe.diagnose.seen.states import Sample

ANALYST = "states"
STOPPED, GREW, ASLEEP = 0.9, 0.72, 0.83
NEAR = 16
GROWN, GROWN_BYTES = 1.6, 128 << 20
_STORING = re.compile(
    r"^(?:\[<[0-9a-f]*>\]|#\d+) *(?:rpc_wait_bit|nfs\d?_|__rpc_|cl_sync_io|ll_|ptlrpc_|lustre|ceph_|fuse_|request_wait_answer|gpfs|cxi|"
    r"xfs_|ext4_|jbd2_|io_schedule|wait_on_page|folio_wait|blk_)"
)
LEAST_NS = 500_000_000
"""A stop shorter than this is a debugger's or a sampler's."""


def analyse(case: Case) -> Iterator[Finding]:
    """A rank that was stopped for a while; one whose memory grew far beyond its peers' before it was killed."""
    by_rank: dict[int, list[Sample]] = {}
    for one in seen.of(case).states:
        if one.rank is not None:
            by_rank.setdefault(one.rank, []).append(one)
    spans = {rank: span for rank, samples in by_rank.items() if (span := _longest(samples, "Tt"))}
    if spans and len(spans) < max(2, len(by_rank)):
        rank, span = max(spans.items(), key=lambda item: _length(item[1]))
        length = _length(span) / 1e9
        equal = sorted(other for other, one in spans.items() if _length(one) == _length(span))
        yield Finding(
            mode="rank-stopped",
            analyst=ANALYST,
            likelihood=STOPPED,
            because=f"Process {span[0].pid}, rank {rank}, was stopped" + (f" for {length:.1f} s." if length else "."),
            first=rank if len(equal) == 1 else None,
            suspects=tuple(equal),
            at_ns=span[0].t_ns,
            evidence=(quote(span[0].line, "cause"), *((quote(span[-1].line, "confirm"),) if len(span) > 1 else ())),
            not_proven="who stopped it",
        )
    yield from _stuck(case, by_rank)
    yield from _grew(case, by_rank)


def _stuck(case: Case, by_rank: Mapping[int, Sequence[Sample]]) -> Iterator[Finding]:
    """One rank in an uninterruptible sleep, in the kernel's code of a file system, at the one look that there was."""
    looked = {rank: samples[-1] for rank, samples in by_rank.items() if all(one.t_ns is None for one in samples)}
    asleep = {rank: one for rank, one in looked.items() if one.state == "D"}
    if len(asleep) != 1:
        return
    ((rank, one),) = asleep.items()
    near = [
        line
        for line in case.lines
        if line.artifact is one.line.artifact and abs(line.number - one.line.number) <= NEAR and _STORING.search(line.text)
    ]
    if not near and not (one.wchan and _STORING.search(f"[<0>] {one.wchan}")):
        return
    silent = case.of("storage-not-responding")
    evidence = (quote(one.line, "cause"), *(quote(line, "cause") for line in near[:2]))
    for mode in ("uninterruptible-wait", "checkpoint-storage-stall") if silent else ("uninterruptible-wait",):
        yield Finding(
            mode=mode,
            analyst=ANALYST,
            likelihood=ASLEEP,
            because=f"Rank {rank} sleeps in the kernel's code of a file system, where no signal reaches it.",
            first=rank,
            suspects=(rank,),
            evidence=(*(quote(event.line, "cause") for event in silent[:1]), *evidence),
            not_proven="for how long: one look cannot tell a slow file system from one that is gone",
        )


def _grew(case: Case, by_rank: Mapping[int, Sequence[Sample]]) -> Iterator[Finding]:
    """Ended by SIGKILL, and its last samples far above what it and its peers used before: what the kernel does for memory."""
    killed = {end.rank if end.rank is not None else end.local_rank: end for end in ends(case) if end.signal == signal.SIGKILL}
    grown = {rank: growth for rank, samples in by_rank.items() if (growth := _growth(samples)) is not None}
    for rank, end in killed.items():
        if rank is None or rank not in grown:
            continue
        before, last = grown[rank]
        others = [after for other, (_, after) in grown.items() if other != rank]
        most = last.rss_bytes or 0
        if (
            most < GROWN * before
            or most - before < GROWN_BYTES
            or any(most < GROWN * (other.rss_bytes or 0) for other in others)
        ):
            continue
        yield Finding(
            mode="host-oom-kill",
            analyst=ANALYST,
            likelihood=GREW,
            because=f"Rank {rank} was ended by SIGKILL when its memory had grown from {before >> 20} to {most >> 20} MiB; its peers' had not.",
            first=rank,
            suspects=(rank,),
            at_ns=last.t_ns,
            evidence=(quote(last.line, "cause"), quote(end.line, "confirm")),
            not_proven="that the kernel did it: its log, or the memory.events of the group, would tell",
        )


def _growth(samples: Sequence[Sample]) -> tuple[int, Sample] | None:
    """What a process used in the middle of its life, and the last sample that shows any memory."""
    shown = [one for one in samples if one.rss_bytes]
    if len(shown) < 4:
        return None
    return int(median(one.rss_bytes or 0 for one in shown)), max(shown[-3:], key=lambda one: one.rss_bytes or 0)


def _longest(samples: Sequence[Sample], letters: str) -> list[Sample]:
    """The longest run of samples in these states; one undated look counts, a short dated one does not."""
    best: list[Sample] = []
    run: list[Sample] = []
    for one in [*samples, None]:
        if one is not None and one.state in letters:
            run.append(one)
            continue
        if run and (run[0].t_ns is None or _length(run) >= LEAST_NS) and (not best or _length(run) > _length(best)):
            best = run
        run = []
    return best


def _length(samples: Sequence[Sample]) -> int:
    first, last = samples[0].t_ns, samples[-1].t_ns
    return last - first if first is not None and last is not None else 0
