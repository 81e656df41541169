"""What is known of failure modes is whole and agrees with the taxonomy and the catalogue."""

from __future__ import annotations

import tomllib
from importlib.resources import files

import pytest

from dtprobe import catalog
from dtprobe.diagnose.facts.words import vocabulary
from dtprobe.diagnose.modes import modes
from dtprobe.diagnose.weigh import levels

KNOWLEDGE = files("dtprobe.diagnose") / "knowledge"


def _toml(name: str) -> dict:
    return tomllib.loads((KNOWLEDGE / name).read_text(encoding="utf-8"))


def test_every_mode_has_a_cure_of_a_sentence():
    assert [name for name, one in modes().items() if len(one.fix.split()) < 3 or not one.fix.endswith(".")] == []


def test_nothing_is_known_of_a_mode_that_does_not_exist():
    named = set(_toml("modes.toml")) | set(levels()[0]) | {mode for one in modes().values() for mode in one.explains}
    assert named <= set(modes())


def test_no_mode_explains_one_that_explains_it():
    known = modes()
    assert [(cause, effect) for cause, one in known.items() for effect in one.explains if cause in known[effect].explains] == []


def test_the_scenario_of_a_mode_is_one_of_the_catalogue_that_reproduces_it():
    of_mode: dict[str, set[str]] = {}
    for scenario in catalog.load().scenarios:
        of_mode.setdefault(scenario.failure_mode, set()).add(scenario.id)
    told = {name: one.scenario for name, one in modes().items()}
    assert {mode for mode, name in told.items() if name and name not in of_mode.get(mode, set())} == set()
    assert {mode for mode in of_mode if not told.get(mode)} == set()


@pytest.mark.parametrize("entry", _toml("words.toml")["word"], ids=lambda entry: entry["id"])
def test_words_match_their_examples_only(entry):
    pattern = vocabulary()[entry["id"]]
    assert [text for text in entry["examples"] if not pattern.search(text)] == []
    assert [text for text in entry.get("counterexamples", []) if pattern.search(text)] == []
