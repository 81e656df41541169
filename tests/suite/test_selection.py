"""Which scenarios are run, and why."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from dtprobe import catalog
from dtprobe.errors import UsageError
from dtprobe.suite.selection import Wanted, choose

CONTENT = Path(__file__).resolve().parents[1] / "content"


@pytest.fixture(scope="module")
def found():
    return catalog.load()


def ids(selection):
    return [one.id for one in selection.scenarios]


def test_all_are_chosen_where_nothing_is_asked(found):
    assert ids(choose(found, Wanted())) == [one.id for one in found.scenarios]


def test_kinds_of_choice_hold_together_and_each_is_given_as_the_reason(found):
    gpu = choose(found, Wanted(capabilities=["cuda"], tags=["code", "process"]))
    assert ids(gpu) and all("cuda:2" in one.needs and one.layer in ("code", "process") for one in gpu.scenarios)
    assert all("capability cuda" in why and "tag " in why for why in gpu.because.values())
    assert ids(choose(found, Wanted(only=["rank-stopped"], capabilities=["cuda"]))) == ["rank-stopped:gpu"]


@pytest.mark.parametrize(
    ("wanted", "says"),
    [
        (Wanted(tags=["netwrok"]), "did you mean network"),
        (Wanted(capabilities=["slrum"]), "did you mean slurm"),
        (Wanted(only=["rank-stoped"]), "did you mean rank-stopped"),
        (Wanted(changed="no-such-commit"), "--changed no-such-commit"),
        (Wanted(changed="--output=/tmp/x"), "--changed --output"),
    ],
)
def test_what_does_not_exist_is_one_line_with_what_is_close(found, wanted, says):
    with pytest.raises(UsageError) as raised:
        choose(found, wanted)
    assert says in str(raised.value) and "\n" not in str(raised.value)


def test_a_changed_file_chooses_the_scenarios_that_consist_of_it(tmp_path):
    own = tmp_path / "own"
    for name in ("first", "second"):
        shutil.copytree(CONTENT / "scenarios" / "quick", own / "scenarios" / name)
        text = (own / "scenarios" / name / "scenario.py").read_text().replace('name="quick"', f'name="{name}"')
        (own / "scenarios" / name / "scenario.py").write_text(text)

    def git(*words):
        who = ("-c", "user.name=n", "-c", "user.email=e@example.org")
        subprocess.run(["git", "-C", str(own), *who, *words], check=True, capture_output=True)

    git("init", "-q")
    git("add", ".")
    git("commit", "-qm", "all")
    loaded = catalog.load([own])
    names = ["first", "second"]

    def chosen():
        return choose(loaded, Wanted(only=names, changed="HEAD"), environ=os.environ)

    assert ids(chosen()) == []
    (own / "scenarios" / "second" / "README.md").write_text("words change no verdict\n")
    assert ids(chosen()) == []
    with (own / "scenarios" / "second" / "worker.py").open("a") as file:
        file.write("# changed\n")
    found = chosen()
    assert ids(found) and {one.name for one in found.scenarios} == {"second"}
    assert all("scenarios/second/worker.py" in why for why in found.because.values())
    (own / "scenarios" / "first" / "helper.py").write_text("# new\n")
    assert {one.name for one in chosen().scenarios} == {"first", "second"}
