"""The first version with another verdict, by halving the versions between two that differ."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace

from dtprobe.errors import DtprobeError, UsageError
from dtprobe.interrupts import interruptible
from dtprobe.matrix import releases
from dtprobe.matrix.compare import observed
from dtprobe.matrix.run import Matrix

Answer = tuple[str, str]
"""What a version says: the verdict, and the end of the cure."""


@dataclass(frozen=True, kw_only=True)
class Found:
    """`first` is the first version that differs, `last` the last before it; `skipped` could not be run, so that the change may be in
    any of those between the two. `answers` has what each version said that was run."""

    first: str
    last: str
    skipped: tuple[str, ...]
    answers: Mapping[str, str]
    words: str


def halve(versions: Sequence[str], ask: Callable[[str], Answer | None]) -> tuple[int, int, dict[str, Answer | None]]:
    """Indices of the last version that answers as the first of `versions` does, and of the first that does not; between them lie only
    versions for which `ask` gave None (they cannot be run). At most all versions are asked, without such ones about log2 of them.

    Any answer other than the first version's counts as changed. Raises UsageError where the two ends cannot be told apart.
    """
    answers: dict[str, Answer | None] = {}

    def known(index: int) -> Answer | None:
        version = versions[index]
        if version not in answers:
            answers[version] = ask(version)
        return answers[version]

    low, high = 0, len(versions) - 1
    start, end = known(low), known(high)
    for index, answer in ((low, start), (high, end)):
        if answer is None:
            raise UsageError(f"{versions[index]} cannot be run here", "its reason is above; choose another --good or --bad")
    if start == end:
        assert start is not None
        raise UsageError(
            f"{versions[low]} and {versions[high]} say the same: {_said(start)}", "there is nothing between them to be found"
        )
    while True:
        middle = (low + high) // 2
        inner = sorted(range(low + 1, high), key=lambda index: abs(index - middle))
        usable = next((index for index in inner if known(index) is not None), None)
        if usable is None:
            return low, high, answers
        if known(usable) == start:
            low = usable
        else:
            high = usable


def run(matrix: Matrix, scenario: str, *, good: str, bad: str, say: Callable[[str], None]) -> Found:
    """Run the scenario in versions between `good` and `bad` (either may be the later one) until the first changed one is named.

    The matrix gets a cell for each version tried, and the answer as `bisect`. Raises UsageError as `halve`, DtprobeError where a night failed.
    """
    low, high = sorted((good, bad), key=releases.order)
    if releases.order(low) == releases.order(high):
        raise UsageError(f"--good {good} and --bad {bad} are the same version", "name two")
    versions = [low, *releases.between("torch", low, high), high]
    template = matrix.spec.cells[0]

    def ask(version: str) -> Answer | None:
        state = matrix.run_cell(replace(template, torch=version))
        if state.state == "unsupported":
            return None
        if state.state != "done":
            raise DtprobeError(
                f"torch {version}: the night failed: {state.reason}", f"go on with --resume {matrix.folder.name}"
            )
        seen = [one for one in observed(matrix.out, [state.night]) if one.scenario == scenario]
        if not seen:
            say(f"torch {version}: came to no verdict, so that nothing follows from it")
            return None
        answer = _one(seen[0].verdict), _one(seen[0].cure)
        say(f"torch {version}: {_said(answer)}")
        return answer

    try:
        with interruptible():
            before, after, answers = halve(versions, ask)
    except KeyboardInterrupt:
        matrix.interrupted = True
        raise
    finally:
        matrix.end()
    skipped = tuple(versions[before + 1 : after])
    last, first = versions[before], versions[after]
    found = Found(
        first=first,
        last=last,
        skipped=skipped,
        answers={version: _said(answer) if answer else "not run" for version, answer in answers.items()},
        words=_words(scenario, last, first, skipped, answers),
    )
    matrix.extra["bisect"] = {"scenario": scenario, "good": good, "bad": bad, **asdict(found)}
    matrix.end()
    return found


def _words(scenario: str, last: str, first: str, skipped: Sequence[str], answers: Mapping[str, Answer | None]) -> str:
    day = releases.released("torch", first)
    when = f" (released {day.isoformat()})" if day else ""
    before, after = answers[last], answers[first]
    assert before is not None and after is not None
    change = f"{_said(before)} with torch {last}, {_said(after)} with torch {first}{when}"
    if skipped:
        return f"{scenario} changed between torch {last} and {first}: {change}; {', '.join(skipped)} could not be run"
    return f"{scenario} changed in torch {first}: {change}"


def _one(counts: Mapping[str, int]) -> str:
    """All of them, for a scenario of two minds: `reproduced 2 of 3`."""
    if len(counts) == 1:
        return next(iter(counts))
    total = sum(counts.values())
    return " and ".join(f"{name} in {n} of {total}" for name, n in sorted(counts.items()))


def _said(answer: Answer) -> str:
    verdict, cure = answer
    return verdict if cure == "none" else f"{verdict}, cure {cure}"
