"""The first bad commit of a scenario, by `git bisect run` in a working tree of its own.

The one who judges must be the same at every commit, also at those that lack the verb or do not even import; so the bisection happens in a
second working tree (`git worktree`), whose scenarios, and whose dtprobe where it has one, are run by a process of their own. A commit at
which that gives no verdict is skipped. The user's own tree, and a bisection of theirs in it, are left as they are.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from dtprobe.errors import DtprobeError, UsageError

GIT_S = 120.0
"""For a command of git's but the bisection itself, which is as long as its runs."""
_FIRST = re.compile(r"^([0-9a-f]{7,64}) is the first bad commit", re.MULTILINE)
_COULD_BE = re.compile(r"^([0-9a-f]{40,64})$", re.MULTILINE)


@dataclass(frozen=True, kw_only=True)
class Culprit:
    """The first bad commit, or "" where all that remain (`could_be`) cannot be judged. `subject` is its first line."""

    commit: str
    subject: str = ""
    could_be: tuple[str, ...] = ()

    @property
    def words(self) -> str:
        if self.commit:
            return f"{self.commit} is the first bad commit: {self.subject}"
        return f"one of {len(self.could_be)} commits that cannot be judged here: {' '.join(self.could_be)}"


def repository(folder: Path) -> Path:
    """The top of the git repository around a folder; raises UsageError outside one."""
    return Path(_git(folder, "rev-parse", "--show-toplevel").strip())


def below(repo: Path, path: Path) -> Path:
    """A path in the repository as one relative to its top, which every working tree has; any other as it is."""
    whole = path.resolve()
    return whole.relative_to(repo.resolve()) if whole.is_relative_to(repo.resolve()) else whole


def find(
    repo: Path,
    *,
    good: str,
    bad: str,
    step: Callable[[Path], Sequence[str]],
    say: Callable[[str], None],
) -> Culprit:
    """Bisect between two commits; `step` gives the command that judges a working tree, with the exit codes of `dtprobe.trends.step`.

    `say` is told each line of git's and of the steps'. Raises UsageError for commits that git does not know or that are not in this order, and
    where the step does not say bad of the one and good of the other here: then something else than the commits made the difference.
    """
    good, bad = (_commit(repo, name) for name in (good, bad))  # HEAD is another one in the other working tree
    with _worktree(repo, bad) as tree:
        for commit, wanted in ((good, 0), (bad, 1)):
            _git(tree, "checkout", "--detach", commit)
            _check(commit, wanted, tree, step(tree), say)
        _git(tree, "bisect", "start", bad, good)
        lines = []
        argv = ("git", "-C", str(tree), "bisect", "run", *step(tree))
        with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace") as running:
            assert running.stdout is not None
            for line in running.stdout:
                say(line.rstrip())
                lines.append(line)
        told = "".join(lines)
        if (first := _FIRST.search(told)) is not None:
            return Culprit(commit=first[1], subject=_git(tree, "log", "-1", "--format=%s", first[1]).strip())
        _, _, rest = told.partition("first bad commit could be any of")
        if could_be := tuple(dict.fromkeys(_COULD_BE.findall(rest))):
            return Culprit(commit="", could_be=could_be)
        raise DtprobeError(
            f"git bisect run found nothing: {lines[-1].strip() if lines else 'it said nothing'}", "see its lines above"
        )


def _check(commit: str, wanted: int, tree: Path, argv: Sequence[str], say: Callable[[str], None]) -> None:
    done = subprocess.run(argv, cwd=tree, capture_output=True, text=True, errors="replace", check=False)
    said = " ".join(f"{done.stdout} {done.stderr}".split())
    say(f"{commit}: {said}")
    if done.returncode != wanted:
        here = {0: "is good here", 1: "is bad here"}.get(done.returncode, "cannot be judged here")
        raise UsageError(
            f"{commit} {here}, and was said to be {'bad' if wanted else 'good'}: {said}",
            "name other commits, or look for what else changed: versions, kernel, host",
        )


def in_tree(tree: Path, words: Sequence[str], environ: Mapping[str, str]) -> tuple[str, str]:
    """Standard output, and the last line of standard error, of `dtprobe <words>` as the tree has it: its own package where there is one."""
    own = {**environ}
    if (tree / "dtprobe" / "__init__.py").is_file():
        own["PYTHONPATH"] = os.pathsep.join(filter(None, (str(tree), environ.get("PYTHONPATH", ""))))
    done = subprocess.run(
        (sys.executable, "-m", "dtprobe", *words),
        cwd=tree,
        env=own,
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
    )
    return done.stdout, next(reversed(done.stderr.strip().splitlines()), f"exit code {done.returncode}")


def _commit(repo: Path, name: str) -> str:
    return _git(repo, "rev-parse", "--verify", "--quiet", f"{name}^{{commit}}", why=f"{repo} has no commit {name}").strip()


@contextmanager
def _worktree(repo: Path, commit: str) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="dtprobe-bisect-", ignore_cleanup_errors=True) as folder:
        tree = Path(folder) / "tree"
        _git(repo, "worktree", "add", "--detach", str(tree), commit)
        try:
            yield tree
        finally:
            _git(repo, "worktree", "remove", "--force", "--force", str(tree))


def _git(folder: Path, *words: str, why: str = "") -> str:
    try:
        done = subprocess.run(("git", "-C", str(folder), *words), capture_output=True, text=True, timeout=GIT_S, check=False)
    except FileNotFoundError as error:
        raise UsageError("git is not installed", "apt-get install git") from error
    except subprocess.TimeoutExpired as error:
        raise DtprobeError(f"git {words[0]} in {folder} took more than {GIT_S:g} s", "see what holds the repository") from error
    if done.returncode:
        said = why or " ".join(done.stderr.split()) or f"exit code {done.returncode}"
        raise UsageError(f"git {words[0]}: {said}", f"run `git -C {folder} {' '.join(words)}` to see more")
    return done.stdout
