"""How one sequence of calls departs from another: calls left out, added, exchanged or replaced."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

Same = Callable[[int, int], bool]
How = Literal["left-out", "added", "exchanged", "replaced"]

CONTEXT = 64
"""So many earlier calls, at most, tell which call was to come."""
FAR = 64
"""Who left out or added more calls than this is not recognised as such."""
SWAPPED = 16


def to_come(past: Sequence[int], most: int = 1, least: int = 1) -> list[int]:
    """What followed when the calls before were the same ones: at most `most` calls.

    The place counts before which most calls, up to CONTEXT and at least `least`, are the same as before now. None where there is
    no such place, or where several went on differently. Where what followed runs to the end of `past`, it is taken to come round again.
    """
    longest, places = least - 1, list[int]()
    for place in range(len(past) - 1, 0, -1):
        length = 0
        while length < CONTEXT and length < place and past[place - 1 - length] == past[-1 - length]:
            length += 1
        if length > longest:
            longest, places = length, [place]
        elif length == longest and length >= least:
            places.append(place)
    if not places or any(past[place] != past[places[0]] for place in places):
        return []
    followed = list(past[places[0] :])
    return (followed * (most // len(followed) + 1))[:most]


def compared(ahead: Sequence[int], theirs: Sequence[int], same: Same, ours: int | None = None) -> tuple[How, int]:
    """How `theirs` departs from `ahead` at its first call, and how many calls that concerns.

    The first `ours` calls of `ahead` (all, if not given) were made, the rest is only what was to come.
    """
    made = ahead[: len(ahead) if ours is None else ours]
    replaced = _agree(made[1:], theirs[1:], same)
    left_out = _shifted(ahead, theirs, same)
    if left_out is not None and left_out[1] == len(theirs) > 1 and not replaced:
        return "left-out", left_out[0]
    for count in range(2, min(SWAPPED, len(ahead), len(theirs)) + 1):
        if _permuted(ahead[:count], theirs[:count], same):
            return "exchanged", count
    if left_out is not None and not (replaced and left_out[0] > 1):
        return "left-out", left_out[0]
    added = _shifted(theirs, made, same)
    if added is not None and not replaced:
        return "added", added[0]
    return "replaced", 1


def _permuted(one: Sequence[int], other: Sequence[int], same: Same) -> bool:
    rest = list(other)
    for kind in one:
        place = next((at for at, candidate in enumerate(rest) if same(kind, candidate)), None)
        if place is None:
            return False
        del rest[place]
    return True


def _agree(one: Sequence[int], other: Sequence[int], same: Same) -> bool:
    pairs = list(zip(one, other, strict=False))
    return bool(pairs) and all(same(*pair) for pair in pairs)


def _shifted(whole: Sequence[int], short: Sequence[int], same: Same) -> tuple[int, int] | None:
    """How many calls of `whole` must be taken out for `short` to follow it, and how many then agree.

    A single call that agrees tells only of one that is left out.
    """
    for count in range(1, min(FAR, len(whole) - 1) + 1):
        agreed = min(len(whole) - count, len(short))
        if (count == 1 or agreed > 1) and _agree(whole[count:], short, same):
            return count, agreed
    return None
