"""What the rank that others wait for was doing: its own last words against those of its peers."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

from dtprobe.diagnose.case import Case, Finding, Line, quote
from dtprobe.diagnose.facts.hang import Hang, hang, world
from dtprobe.diagnose.facts.words import LAST, NEAR, Difference, Words, says, shape, unranked, words

_TOTALS = re.compile(
    r"(?i)^(?:\w*loader|dataset|batches|steps|iterations|iters|len|length|shards?|files|samples|examples|records|rows|items|sequences|documents)$"
)
_LENGTH = re.compile(
    r"(?i)len\(|\bnum(?:ber)?[_ ](?:of )?(?:batches|steps|samples|iters|iterations)|(?:batches|steps|iterations|samples|files|shards|rows) (?:per|in|for|this|left|total)|total|dataset|loader|shard"
)
_CLEANUP = re.compile(
    r"(?i)destroy(?:ing|ed)?[ _]process[ _]group|\b(?:clean(?:ing)?[ -]?up|tear(?:ing)?[ -]?down|finaliz\w+|in finally)\b"
)
_TROUBLE = re.compile(r"(?i)\b(?:exception|error|failed|failure|traceback|crash\w*|abort\w*|raised)\b")
_PARTLY = re.compile(r"\b(\d+) ?(?:/|of) ?(\d+)\b|\b\d{1,3} ?%")
_SPARSE = re.compile(
    r"(?i)\b(?:empty|skip(?:ped|ping)?|dropped|discarded|filtered|no (?:valid|images?|tokens?|samples?|boxes|targets?|labels?|objects?|masks?|data|batch|positives?|experts?|loss|grad\w*)|without (?:images?|tokens?|labels?|targets?)|0 (?:images?|tokens?|samples?|boxes|targets?|labels?|objects?|masks?|positives?|valid|experts?|routed))\b"
)
_LEFT_OUT = re.compile(r"(?i)\b(?:dropped|discarded|filtered|skipped|masked out)\b|\b\d+ of \d+ \S+ (?:left|remain\w*|kept)\b")
_DESYNC = ("other-operation", "other-size", "other-place")


def analyse(case: Case) -> Iterator[Finding]:
    """Findings for a hang from what the rank at fault said, and from numbers in which it differs."""
    told = words(case)
    found = hang(case)
    mismatch = case.of("fingerprint-mismatch")
    if found is None and not mismatch:
        return
    if found is not None and found.kind == "p2p":
        yield from _unpaired(found, told, world(case))
        return
    if found is not None and found.kind == "nobody" and (parted := _parted(found, told)) is not None:
        yield parted
    differing = told.differences()
    if found is None:
        yield from _different(differing, None)
        return
    guilty = _guilty(found, told)
    for rank, lines in guilty:
        yield from _doing(found, told, rank, lines)
    suspects = {rank for rank, _lines in guilty}
    about = [one for one in differing if not found.odd or one.rank in suspects]
    yield from _different(about, found)


def _unpaired(found: Hang, told: Words, everybody: frozenset[int]) -> Iterator[Finding]:
    """A rank that waits for nobody and says itself that it left something out: the half that others wait for."""
    for rank in sorted(everybody - set(found.waiting)):
        line = next((line for line in reversed(told.only(rank)) if _SPARSE.search(line.text)), None)
        if line is not None:
            yield _finding(
                "p2p-unpaired",
                0.76,
                rank,
                f"Rank {rank} left out its half of an exchange, as it says itself, and its partner waits for it.",
                line,
                found,
            )
            return


def _parted(found: Hang, told: Words) -> Finding | None:
    """Time-outs of old versions tell no sizes, so that two calls look like one: here the last words show that one rank went another way.

    All others end with one text, which that rank never said, and it ends with one that they never said.
    """
    ranks = [rank for rank in found.waiting if told.by_rank.get(rank)]
    if len(ranks) < 3 or len(ranks) < len(found.waiting) or any(one.numel_in is not None for one in found.timeouts):
        return None
    said = {rank: [unranked(line.text) for line in told.by_rank[rank][-LAST:]] for rank in ranks}
    counts = Counter(texts[-1] for texts in said.values())
    usual, often = counts.most_common(1)[0]
    odd = [rank for rank in ranks if said[rank][-1] != usual]
    if often != len(ranks) - 1 or usual in said[odd[0]]:
        return None
    mine = told.by_rank[odd[0]][-1]
    alike = shape(said[odd[0]][-1])
    if any(alike == shape(text) for rank in ranks if rank != odd[0] for text in said[rank][-NEAR:]):
        return None
    other = next(told.by_rank[rank][-1] for rank in ranks if rank not in odd)
    parted = _finding(
        "data-dependent-branch-desync",
        0.78,
        odd[0],
        f"The last words of rank {odd[0]} and of all its peers are of different branches of the program.",
        mine,
        found,
        "that their calls differ: these time-outs tell no sizes",
    )
    return replace(parted, evidence=(*parted.evidence, quote(other, "cause")))


def _guilty(found: Hang, told: Words) -> list[tuple[int, Sequence[Line]]]:
    """The ranks at fault with their last words; lines without a rank are the main rank's, where that one does not wait."""
    named = [(rank, told.by_rank[rank][-NEAR:]) for rank in found.odd[:2] if told.by_rank.get(rank)]
    if not named and told.unsaid:
        main = found.odd[0] if 0 not in found.odd and found.odd else 0
        if main in found.odd or (0 not in found.waiting and found.kind in ("absent", "some")):
            named = [(main, told.unsaid[-NEAR:])]
    return named


def _finding(mode: str, likelihood: float, rank: int, because: str, cause: Line, found: Hang, not_proven: str = "") -> Finding:
    return Finding(
        mode=mode,
        analyst="progress",
        likelihood=likelihood,
        because=because,
        first=rank,
        suspects=(rank,),
        host=cause.host,
        at_ns=cause.t_ns or found.began_ns,
        evidence=(quote(cause, "cause"),),
        not_proven=not_proven,
    )


def _latest(kind: str, lines: Sequence[Line], within: int = NEAR) -> Line | None:
    return next((line for line in reversed(lines[-within:]) if says(kind, line)), None)


def _others_say(kind: str, told: Words, found: Hang) -> bool:
    return any(_latest(kind, told.by_rank.get(rank, ()), 4) for rank in found.waiting)


def _doing(found: Hang, told: Words, rank: int, lines: Sequence[Line]) -> Iterator[Finding]:
    clean = next((line for line in reversed(lines[-4:]) if _CLEANUP.search(line.text)), None)
    trouble = next((line for line in lines if _TROUBLE.search(line.text)), None)
    if clean is not None and trouble is not None:
        yield _finding(
            "cleanup-deadlock-after-exception",
            0.78,
            rank,
            f"Rank {rank} met an exception and went to tear the group down, which waits for peers that are in a collective.",
            trouble,
            found,
            "which exception it was",
        )
    ended = _latest("says-data-end", lines)
    if ended is not None and not _others_say("says-data-end", told, found):
        yield _finding(
            "uneven-dataloader-desync",
            0.85 if found.kind in _DESYNC else 0.78,
            rank,
            f"Rank {rank} came to the end of its data while the others were still training.",
            ended,
            found,
        )
    elif found.kind == "absent" and (line := _latest("says-clean-end", lines, 2)) is not None:
        yield _finding(
            "peer-exited-early",
            0.74,
            rank,
            f"Rank {rank} says that it ended while the others still waited for it.",
            line,
            found,
        )
    yield from _busy(found, rank, lines)
    sparse = next((line for line in reversed(told.only(rank)) if _SPARSE.search(line.text)), None)
    if sparse is not None and ended is None:
        yield _finding(
            "data-dependent-branch-desync",
            0.76,
            rank,
            f"Only rank {rank} says so before the hang: its data took it another way than its peers.",
            sparse,
            found,
        )


def _busy(found: Hang, rank: int, lines: Sequence[Line]) -> Iterator[Finding]:
    """A long operation that was begun and not ended: storing, or any other work."""
    save, saved = _latest("says-save", lines, 4), _latest("says-saved", lines, 4)
    open_save = save is not None and (saved is None or saved.number <= save.number)
    if found.kind in _DESYNC:
        line = save or _latest("says-long-work", lines, 2)
        if len(found.odd) == 1 and line is not None and found.kind == "other-operation":
            yield _finding(
                "rank-conditional-collective",
                0.7,
                rank,
                f"Only rank {rank} went into this work, and its collective has no partner there.",
                line,
                found,
                "that the call stands under a condition on the rank",
            )
        return
    if found.kind not in ("absent", "some"):
        return
    if open_save and save is not None:
        slow = next((line for line in lines if says("says-storage-slow", line)), None)
        partly = _PARTLY.search(save.text) is not None
        yield _finding(
            "checkpoint-storage-stall",
            0.85 if slow is not None else (0.5 if partly else 0.7),
            rank,
            f"Rank {rank} began to write a checkpoint and did not come back before the others' time-out.",
            save,
            found,
            "that the storage was slow" if slow is None else "",
        )
        if slow is None:
            yield _finding(
                "rank0-long-work-timeout",
                0.6,
                rank,
                f"Rank {rank} was busy with work that the others do not share, longer than their time-out.",
                save,
                found,
            )
        return
    starved = _latest("says-starved", lines, 3)
    # who has less to do than its peers comes to wait for the next batch before them
    if starved is not None and not any(_LEFT_OUT.search(line.text) for line in lines):
        yield _finding(
            "data-starvation", 0.76, rank, f"Rank {rank} waited for its input when the others waited for it.", starved, found
        )
    work = _latest("says-long-work", lines, 3)
    if work is not None and starved is None:
        yield _finding(
            "rank0-long-work-timeout",
            0.8 if _PARTLY.search(work.text) else 0.74,
            rank,
            f"Rank {rank} was busy with work that the others do not share, longer than their time-out.",
            work,
            found,
            "that it would have come back",
        )


def _different(differing: Sequence[Difference], found: Hang | None) -> Iterator[Finding]:
    if not differing:
        return
    best = min(differing, key=lambda one: (one.mine != 0, not one.noun, -one.line.number))
    if not best.noun and best.mine != 0:
        return
    total = _TOTALS.match(best.noun) is not None and best.mine > 0 and _LENGTH.search(best.line.text) is not None
    yield Finding(
        mode="uneven-dataloader-desync" if total else "data-dependent-branch-desync",
        analyst="differences",
        likelihood=0.76 if found is None or found.kind in _DESYNC or best.mine == 0 else 0.66,
        because=f"Rank {best.rank} had {best.mine:g} {best.noun or 'there'} where its peers had {best.theirs:g}.",
        first=best.rank,
        suspects=(best.rank,),
        host=best.line.host,
        at_ns=best.line.t_ns,
        evidence=(quote(best.line, "cause"), quote(best.other, "confirm")),
        not_proven="that this difference changed what the rank called",
    )
