"""What NCCL's RAS subsystem answered: ranks that are behind, ranks that do not answer, errors of communicators.

It counts what the host launched, by kind: one answer cannot tell a slow rank from one that hangs, and send, receive and roots are
outside it. Several answers are compared: a rank that moved on between them was late, not lost.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from dtprobe.diagnose import seen
from dtprobe.diagnose.case import Case, Finding
from dtprobe.diagnose.seen.ras import Answer
from dtprobe.readers.ras import Communicator, Peer

ANALYST = "ras"
BEHIND, CROSSED, LOST, OTHER_KIND = 0.55, 0.85, 0.5, 0.7
RESULTS = {
    1: "nccl-cuda-error",
    2: "nccl-init-failure",
    3: "nccl-internal-error",
    4: "nccl-init-failure",
    5: "nccl-init-failure",
    6: "nccl-remote-error",
}
"""By ncclResult_t."""
ERROR, LATE = 0.55, 0.45


def analyse(case: Case) -> Iterator[Finding]:
    """One finding a question: who lags, who is missing, who reports an error."""
    answers = seen.of(case).ras
    if not answers:
        return
    latest = _latest(answers)
    lags = list(_behind(answers, latest))
    if seen.of(case).ended_well:
        # every rank came to its end after this answer: it was late, not lost
        lags = [replace(one, mode="straggler", likelihood=LATE) for one in lags if one.mode == "collective-skipped"]
    yield from lags
    yield from _lost(answers)
    yield from _errors(latest)


def _latest(answers: Sequence[Answer]) -> list[Answer]:
    """The last answer of each form, JSON first: it holds more."""
    last = {one.report.form: one for one in answers}
    return [last[form] for form in ("json", "text") if form in last]


def _lag(answer: Answer, comm: Communicator) -> tuple[str, list[int], list[int]] | None:
    """Kind of operation, the ranks that launched fewest of it and those that launched most, as the communicator's ranks."""
    kinds = {kind for peer in comm.peers.values() for kind in peer.counts} | set(comm.many)
    best: tuple[tuple[int, int], str, list[int], list[int]] | None = None
    for kind in sorted(kinds):
        counts = {rank: peer.counts[kind] for rank, peer in comm.peers.items() if kind in peer.counts}
        unlisted = comm.many.get(kind, {})
        everything = [*counts.values(), *unlisted]
        if len(set(everything)) < 2:
            continue
        low, high = min(everything), max(everything)
        behind = [rank for rank, count in counts.items() if count == low]
        ahead = [rank for rank, count in counts.items() if count == high]
        if best is None or (high - low, high) > best[0]:
            best = (high - low, high), kind, behind, ahead
    return best[1:] if best else None


def _behind(answers: Sequence[Answer], latest: Sequence[Answer]) -> Iterator[Finding]:
    for answer in latest:
        lags = [(comm, lag) for comm in answer.report.communicators if (lag := _lag(answer, comm)) is not None and lag[1]]
        if not lags:
            continue
        for i, (one, (_, behind, ahead)) in enumerate(lags):
            for other, (_, behind_there, ahead_there) in lags[i + 1 :]:
                a, b = _jobs(answer, one, behind), _jobs(answer, one, ahead)
                c, d = _jobs(answer, other, behind_there), _jobs(answer, other, ahead_there)
                if set(a) & set(d) and set(c) & set(b):
                    peers = [one.peers[behind[0]], other.peers[behind_there[0]]]
                    yield Finding(
                        mode="cross-communicator-deadlock",
                        analyst=ANALYST,
                        likelihood=CROSSED,
                        because=f"Rank {a[0]} is behind on communicator {one.id} and ahead on {other.id}, rank {c[0]} the reverse.",
                        suspects=tuple(sorted({*a, *c})),
                        evidence=tuple(answer.quote(peer, _counts(peer), "cause") for peer in peers),
                    )
                    return
        comm, (kind, behind, ahead) = lags[0]
        if len(behind) > len(comm.peers) / 2 and not comm.many and len(comm.peers) > 2:
            continue
        ranks = sorted(_jobs(answer, comm, behind))
        if not ranks or _moved(answers, comm, behind, kind):
            return
        peer = comm.peers[behind[0]]
        more = [
            other for other in peer.counts if any(peer.counts[other] > one.counts.get(other, 0) for one in comm.peers.values())
        ]
        mode = "collective-type-mismatch" if more else "collective-skipped"
        yield Finding(
            mode=mode,
            analyst=ANALYST,
            likelihood=OTHER_KIND if more else BEHIND,
            because=f"On communicator {comm.id} rank {ranks[0]} has launched fewer {kind} than the others"
            + (f", and more {more[0]}." if more else "."),
            first=ranks[0] if len(ranks) == 1 else None,
            suspects=tuple(ranks),
            evidence=tuple(
                answer.quote(comm.peers[rank], _counts(comm.peers[rank]), "cause" if rank in behind else "confirm")
                for rank in [*behind[:2], *ahead[:1]]
            ),
            not_proven="whether the rank hangs or is only late: one answer cannot tell",
        )
        return


def _moved(answers: Sequence[Answer], comm: Communicator, behind: Sequence[int], kind: str) -> bool:
    """Whether the ranks that are behind went on from one answer to the next."""
    counts = [
        known.peers[rank].counts[kind]
        for answer in answers
        for known in answer.report.communicators
        if known.id == comm.id
        for rank in behind[:1]
        if rank in known.peers and kind in known.peers[rank].counts
    ]
    return len(set(counts)) > 1


def _lost(answers: Sequence[Answer]) -> Iterator[Finding]:
    for answer in reversed(answers):
        for comm in answer.report.communicators:
            lost = [peer for peer in comm.peers.values() if peer.problem in ("unresponsive", "dead")]
            ranks = sorted(_jobs(answer, comm, [peer.rank for peer in lost]))
            if not ranks:
                continue
            yield Finding(
                mode="rank-lost",
                analyst=ANALYST,
                likelihood=LOST,
                because=f"Rank {ranks[0]} does not answer NCCL's RAS subsystem: its process is stopped, frozen or gone.",
                first=ranks[0] if len(ranks) == 1 else None,
                suspects=tuple(ranks),
                host=lost[0].host,
                evidence=tuple(answer.quote(peer, _missing(peer), "cause") for peer in lost[:3]),
                not_proven="whether the process was stopped, has ended, or its host is unreachable",
            )
            return


def _errors(latest: Sequence[Answer]) -> Iterator[Finding]:
    for answer in latest:
        for comm in answer.report.communicators:
            for peer in comm.peers.values():
                code = peer.async_error or peer.init_state
                rank = answer.ranks.get((comm.id, peer.rank))
                if code in RESULTS:
                    yield Finding(
                        mode=RESULTS[code],
                        analyst=ANALYST,
                        likelihood=ERROR,
                        because=f"RAS reports error {code} of communicator {comm.id}.",
                        first=rank,
                        suspects=(rank,) if rank is not None else (),
                        evidence=(
                            answer.quote(
                                peer, f"rank {peer.rank}: init_state {peer.init_state}, async_error {peer.async_error}", "cause"
                            ),
                        ),
                    )
                    return


def _jobs(answer: Answer, comm: Communicator, ranks: Sequence[int]) -> list[int]:
    """The job's ranks of ranks in a communicator."""
    return [known for rank in ranks if (known := answer.ranks.get((comm.id, rank))) is not None]


def _counts(peer: Peer) -> str:
    counts = ", ".join(f"{kind} {count}" for kind, count in peer.counts.items() if count)
    return f"RAS: rank {peer.rank} (process {peer.pid} on {peer.host}) has launched up to operation {counts or 'none'}"


def _missing(peer: Peer) -> str:
    return f"RAS: rank {peer.rank} (process {peer.pid} on {peer.host}) is {peer.problem}"
