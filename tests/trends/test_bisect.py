"""A bisection over a real repository with real runs: commits that are good, bad, and some that cannot be run."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from dtprobe.errors import DtprobeError, UsageError
from dtprobe.trends import bisect
from dtprobe.trends.found import bisecting, gone_since

QUICK = Path(__file__).parents[1] / "content" / "scenarios" / "quick"
USER = (
    "-c",
    "user.name=n",
    "-c",
    "user.email=n@example.invalid",
    "-c",
    "commit.gpgsign=false",
    "-c",
    "init.defaultBranch=main",
)


def git(repo: Path, *words: str) -> str:
    return subprocess.run(("git", *USER, "-C", str(repo), *words), capture_output=True, text=True, check=True).stdout.strip()


def commit(repo: Path, subject: str, *replace: tuple[str, str]) -> str:
    file = repo / "ci" / "scenarios" / "quick" / "scenario.py"
    text = file.read_text()
    for old, new in replace:
        assert old in text
        text = text.replace(old, new)
    file.write_text(text)
    (repo / "subject").write_text(subject)
    git(repo, "add", "-A")
    git(repo, "commit", "-q", "-m", subject)
    return git(repo, "rev-parse", "HEAD")


@pytest.fixture
def repo(tmp_path: Path) -> Path:
    made = tmp_path / "repo"
    shutil.copytree(QUICK, made / "ci" / "scenarios" / "quick", ignore=shutil.ignore_patterns("__pycache__"))
    git(made.parent, "init", "-q", str(made))
    return made


def history(repo: Path, command: str) -> subprocess.CompletedProcess[str]:
    argv = (sys.executable, "-m", *command.split())
    return subprocess.run(argv, cwd=repo, capture_output=True, text=True, timeout=300, check=False)


JUDGE = "import sys; sys.exit({'good': 0, 'bad': 1}.get(open('subject').read().split()[0], 125))"


@pytest.mark.parametrize(
    ("subjects", "found"),
    [
        (["good 0", "good 1", "good 2", "bad 3", "bad 4"], "bad 3"),
        (["good 0", "cut 1", "good 2", "bad 3", "cut 4", "bad 5"], "bad 3"),
        (["good 0", "bad 1"], "bad 1"),
        (["good 0", "cut 1", "cut 2", "bad 3"], None),
    ],
)
def test_commits_that_cannot_be_judged_are_passed_over_and_told_where_they_hide_it(
    repo: Path, subjects: list[str], found: str | None
) -> None:
    made = {subject: commit(repo, subject) for subject in subjects}
    told: list[str] = []
    answer = bisect.find(
        repo, good=made[subjects[0]], bad=made[subjects[-1]], step=lambda tree: (sys.executable, "-c", JUDGE), say=told.append
    )
    assert answer.subject == (found or "") and answer.commit == (made[found] if found else "")
    assert sorted(answer.could_be) == sorted([] if found else [made[one] for one in subjects[1:]])
    assert told and git(repo, "worktree", "list").count("\n") == 0


@pytest.mark.parametrize(
    ("subjects", "says"),
    [
        (["good 0", "good 1"], "is good here, and was said to be bad"),
        (["cut 0", "bad 1"], "cannot be judged"),
        (["bad 0", "bad 1"], "is bad here"),
    ],
)
def test_where_the_ends_do_not_differ_here_no_commit_is_blamed(repo: Path, subjects: list[str], says: str) -> None:
    first, last = (commit(repo, subject) for subject in subjects)
    with pytest.raises(UsageError, match=says):
        bisect.find(repo, good=first, bad=last, step=lambda tree: (sys.executable, "-c", JUDGE), say=lambda line: None)
    assert git(repo, "worktree", "list").count("\n") == 0


@pytest.mark.nightly
def test_the_command_of_a_regression_names_the_first_bad_commit_and_leaves_the_tree_alone(repo: Path) -> None:
    good = commit(repo, "start")
    commit(repo, "unreadable", ("from dtprobe", "from from dtprobe"))
    bad = commit(repo, "mended and slower", ("from from", "from"), ('"--step-s", "0.03"', '"--step-s", "0.08"'))
    last = commit(repo, "later")
    command = bisecting("quick:plain", f"{good}..{last}", {}, " --metric step --arm mitigated --above 0.055")
    done = history(repo, f"{command} --path ci")
    assert done.returncode == 1 and done.stdout.startswith("one of 2 commits that cannot be judged here:"), done.stderr
    assert bad in done.stdout
    mended = commit(repo, "another start", ('"--step-s", "0.08"', '"--step-s", "0.03"'))
    worse = commit(repo, "slow again", ('"--step-s", "0.03"', '"--step-s", "0.08"'))
    commit(repo, "latest")
    (repo / "mine").write_text("not committed")
    done = history(
        repo, f"{bisecting('quick:plain', f'{mended}..HEAD', {}, ' --metric step --arm mitigated --above 0.055')} --path ci"
    )
    assert (done.returncode, done.stdout.strip()) == (0, f"{worse} is the first bad commit: slow again"), done.stderr
    assert git(repo, "status", "--porcelain") == "?? mine" and git(repo, "worktree", "list").count("\n") == 0
    assert not (repo / "runs").exists()


@pytest.mark.nightly
def test_a_verdict_that_changed_is_found_among_many_commits(repo: Path) -> None:
    made = [commit(repo, "start"), *(commit(repo, f"good {number}") for number in range(6))]
    bad = commit(repo, "no fault any more", ('"--step-s", "0.3"))', '"--step-s", "0.02"))'))
    for number in range(4):
        last = commit(repo, f"bad {number}")
    done = history(repo, f"{bisecting('quick:plain', f'{made[0]}..{last}', {})} --path ci")
    assert (done.returncode, done.stdout.strip()) == (0, f"{bad} is the first bad commit: no fault any more"), done.stderr


def test_commits_that_are_unknown_or_in_the_wrong_order_are_refused_in_one_line(repo: Path) -> None:
    first, second = commit(repo, "start"), commit(repo, "later")
    told: list[str] = []
    judge = "import sys; sys.exit(open('subject').read() == 'start')"  # the earlier one is the bad one
    for good, bad, says in (("nowhere", second, "no commit nowhere"), (second, first, "bisect|ancestor")):
        with pytest.raises((UsageError, DtprobeError), match=says) as refused:
            bisect.find(repo, good=good, bad=bad, step=lambda tree: (sys.executable, "-c", judge), say=told.append)
        assert "\n" not in str(refused.value)
    with pytest.raises(UsageError):
        bisect.repository(Path("/proc"))
    assert git(repo, "worktree", "list").count("\n") == 0


def test_what_changed_decides_the_command() -> None:
    torch = {"torch": ("2.12.0", "2.13.0")}
    assert bisecting("a:b", "x..y", {}) == "dtprobe history bisect a:b --good x --bad y"
    assert bisecting("a", "", torch) == "dtprobe matrix bisect a --good 2.12.0 --bad 2.13.0"
    assert bisecting("a", "", torch, " --metric m") == "dtprobe nightly --only a --torch 2.12.0,2.13.0"
    assert bisecting("a", "x..y", torch).endswith("# torch changed too: dtprobe matrix bisect a --good 2.12.0 --bad 2.13.0")
    assert bisecting("a", "", {"kernel": ("1", "2")}, " --metric m") == "dtprobe history step a --metric m"
    assert gone_since("a:b", "x..y") == "git log --oneline x..y -- '*a/*'" and gone_since("a", "") == "dtprobe list"
