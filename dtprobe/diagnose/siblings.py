"""Names that differ in one number only: files and pods of one process each, where nothing else says whose they are."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Set

FEWEST = 2
_NUMBER = re.compile(r"\d+")
_OTHERWISE = re.compile(
    r"(?i)(?:node|host|machine|server|srv|attempt|try|retry|restart|run|part|chunk|rotat\w*|version|v|day|epoch|step|iter|gen|local|"
    r"dmesg|kern\w*|smi|rack|switch|date|group)[-_. ]?$"
)
"""What a number behind such a word counts is no ranks."""
_MASTER = re.compile(r"(?i)(?P<stem>^|.*[-_./])(?:master|chief|head|launcher)[-_]?0(?P<rest>\D.*|)$")
_WORKER = re.compile(r"(?i)(?P<stem>^|.*[-_./])worker[-_]?(?P<number>\d+)(?P<rest>\D.*|)$")


def numbered(names: Iterable[str], size: int | None, shown: Mapping[str, Set[int]]) -> dict[str, int]:
    """The rank of each name, where names differ in one number that counts from 0 almost without a gap and nothing contradicts.

    `size` is the world size where it is known: then a gap is a file that is missing. `shown` are ranks that lines of a name show;
    one that is not its number speaks against the whole family.
    """
    names = sorted(set(names))
    if found := _beside_master(names, size, shown):
        return found
    families: dict[tuple[str, str], dict[str, dict[int, list[str]]]] = defaultdict(
        lambda: defaultdict(lambda: defaultdict(list))
    )
    for name in names:
        for match in _NUMBER.finditer(name):
            before = name[: match.start()]
            if len(match[0]) <= 6 and not _OTHERWISE.search(before):
                folder, slash, own = before.rpartition("/")
                folder, after = _alike(folder), _alike(name[match.end() :])
                families[own, after][folder + slash][int(match[0])].append(name)
    ranks: dict[str, int] = {}
    stem: str | None = None
    for (own, _after), folders in sorted(families.items(), key=lambda one: -sum(map(len, one[1].values()))):
        told = {name: number for family in folders.values() for number, group in family.items() for name in group}
        apart = sum(map(len, folders.values())) == len(set(told.values()))  # a number in two folders is of two hosts
        if not apart or stem not in (None, own) or not ranks_of(told.values(), size):
            continue
        if all(shown.get(name, set()) <= {told[name]} for name in told):
            stem, ranks = own, ranks | told
    return ranks


def ranks_of(numbers: Iterable[int], size: int | None) -> bool:
    """Whether these numbers can be all ranks of the job, or most of them where its size is known."""
    found = set(numbers)
    if len(found) < FEWEST:
        return False
    if size is None:
        gaps = max(found) + 1 - len(found)
        return 0 in found and gaps <= (len(found) // 3)
    return max(found) < size and 2 * len(found) > size


def _alike(text: str) -> str:
    """The two streams of a process taken for one, and pods with whatever Kubernetes adds to their names."""
    return re.sub(r"-[a-z0-9]{5}(?=[./]|$)", "-~", re.sub(r"(?i)(?:std)?(?:out|err)(?:put|or)?", "@", text))


def _beside_master(names: list[str], size: int | None, shown: Mapping[str, Set[int]]) -> dict[str, int]:
    """Of a job with one master, as Kubeflow makes it, worker 0 is rank 1."""
    masters = [name for name in names if _MASTER.match(name)]
    workers = {name: int(match["number"]) + 1 for name in names if (match := _WORKER.match(name))}
    found = {name: 0 for name in masters} | workers
    fits = masters and workers and ranks_of(set(found.values()), size)
    return found if fits and all(shown.get(name, set()) <= {rank} for name, rank in found.items()) else {}
