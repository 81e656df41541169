"""Scenarios are found by path; a broken one is named and hides no other."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from dtprobe import UsageError, catalog

SCENARIO = """
from dtprobe import Arm, Scenario, Verdict

base = Scenario(
    name={name!r}, failure_mode="straggler", title="t", claim="c", source="s", layer="code", certifies_not="n",
    control=Arm("worker.py"), fault=Arm("worker.py"), mitigated=Arm("worker.py"),
)
first = base.with_variant("first", default=True)
second = base.with_variant("second")
for one in (first, second):
    one.judge(lambda evidence: Verdict(kind="refuted", control_healthy=True, because="b"))
"""


@pytest.fixture
def content(tmp_path):
    def add(name, text=None, worker=True):
        folder = tmp_path / "scenarios" / name
        folder.mkdir(parents=True)
        (folder / "scenario.py").write_text(SCENARIO.format(name=name) if text is None else text)
        if worker:
            (folder / "worker.py").write_text("")
        return folder

    add("two-forms")
    return tmp_path, add


def test_variants_are_scenarios_of_their_own_and_the_template_is_none(content):
    found = catalog.load([content[0]])
    mine = [scenario.id for scenario in found.scenarios if scenario.name == "two-forms"]
    assert mine == ["two-forms:first", "two-forms:second"]


@pytest.mark.parametrize("name", ["two-forms", "two_forms", "Two-Forms:first", "two_forms:FIRST"])
def test_hyphens_underscores_and_case_are_alike_and_a_bare_name_is_the_default_variant(content, name):
    assert catalog.load([content[0]]).find(name).id == "two-forms:first"


def test_an_unknown_name_offers_the_closest(content):
    with pytest.raises(UsageError, match=r"did you mean .*two-forms"):
        catalog.load([content[0]]).find("two-form")


def test_an_unknown_variant_offers_the_closest(content):
    with pytest.raises(UsageError, match="no variant 'secnd'; did you mean second"):
        catalog.load([content[0]]).find("two-forms:secnd")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("import nothing_of_this_name", "ModuleNotFoundError"),
        ("def (", "SyntaxError"),
        ("raise SystemExit(4)", "SystemExit"),
        ("x = 1", "defines no Scenario"),
        (SCENARIO.format(name="other"), "in a folder called 'bad'"),
        (SCENARIO.format(name="bad").replace("straggler", "stragler"), "did you mean straggler"),
        (SCENARIO.format(name="bad").replace("worker.py", "gone.py"), "gone.py does not exist"),
    ],
)
def test_a_broken_folder_is_named_with_its_error_and_hides_no_other(content, text, says):
    root, add = content
    folder = add("bad", text)
    found = catalog.load([root])
    assert [entry for entry in found.broken if entry.folder == folder and says in entry.error]
    assert found.find("two-forms").id == "two-forms:first"
    with pytest.raises(UsageError, match="is broken"):
        found.find("bad")


def test_a_second_scenario_of_one_name_is_refused_not_silently_preferred(content, tmp_path):
    root, add = content
    add("two-forms-again", SCENARIO.format(name="two-forms-again"))
    twin = tmp_path / "twin" / "scenarios" / "two-forms"
    twin.mkdir(parents=True)
    (twin / "scenario.py").write_text(SCENARIO.format(name="two-forms"))
    (twin / "worker.py").write_text("")
    found = catalog.load([root, tmp_path / "twin"])
    assert [entry.folder for entry in found.broken if "exists already" in entry.error] == [twin]


def test_a_scenario_imports_what_lies_beside_it_and_not_what_lies_beside_another_of_its_name(content, tmp_path):
    text = SCENARIO.replace("base = Scenario(", "from .words import TITLE\n\nbase = Scenario(").replace(
        'title="t"', "title=TITLE"
    )
    for place in ("one", "other"):
        folder = tmp_path / place / "scenarios" / "split"
        folder.mkdir(parents=True)
        (folder / "scenario.py").write_text(text.format(name="split"))
        (folder / "words.py").write_text(f"TITLE = {place!r}\n")
        (folder / "worker.py").write_text("")
        assert catalog.load([tmp_path / place]).find("split").title == place


def test_a_path_that_does_not_exist_is_a_usage_error(tmp_path):
    with pytest.raises(UsageError, match="no such folder"):
        catalog.load([tmp_path / "nowhere"])


def test_every_scenario_of_the_project_loads_and_listing_imports_nothing_heavy():
    code = (
        "import sys, json; from dtprobe import catalog; found = catalog.load();"
        "print(json.dumps([[s.id for s in found.scenarios], [str(b) for b in found.broken],"
        "[m for m in ('torch', 'pandas', 'scipy', 'matplotlib') if m in sys.modules]]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    scenarios, broken, heavy = json.loads(done.stdout)
    assert broken == []
    assert heavy == []
    assert {"gloo-thread-leak", "collective-skipped", "filestore-race:torn"} <= set(scenarios)
