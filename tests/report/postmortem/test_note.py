"""The words of an incident note, on the terminal, in Markdown and on the page."""

from __future__ import annotations

import io
import re
from dataclasses import replace
from html.parser import HTMLParser
from types import ModuleType

import pytest
from rich.console import Console

from dtprobe.diagnose.decide import modes
from dtprobe.diagnose.diagnosis import Diagnosis
from dtprobe.report import postmortem
from dtprobe.report.postmortem import note, page

NAMES = ["lost_gpu", "deadlock", "big", "undetermined", "healthy", "bare", "hostile"]
CONTROLS = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def terminal(diagnosis: Diagnosis, width: int = 80, tty: bool = False) -> str:
    out = io.StringIO()
    postmortem.render(diagnosis, Console(file=out, width=width, force_terminal=tty, legacy_windows=False))
    return out.getvalue()


def html(diagnosis: Diagnosis) -> str:
    return page.html(note.of(diagnosis), subject=["logs/"], made_ns=0)


def markdown(diagnosis: Diagnosis) -> str:
    return page.text(note.of(diagnosis), subject=["logs/"], made_ns=0)


class _Elements(HTMLParser):
    """The names of all elements and attributes, and the text of the page outside its style."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.values: list[str] = []
        self.open: list[str] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}
        self.values += [value or "" for name, value in attrs if name in ("href", "src")]
        self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        while self.open and self.open.pop() != tag:
            pass

    def handle_data(self, data: str) -> None:
        if "style" not in self.open:
            self.text += data


@pytest.mark.parametrize("show", [terminal, markdown, lambda diagnosis: _Elements(html(diagnosis)).text])
def test_each_form_tells_the_whole_story(diagnoses: ModuleType, show: object) -> None:
    told = " ".join(str(show(diagnoses.lost_gpu())).replace("\\", "").split())  # type: ignore[operator]
    for fact in (
        "Rank 3 on host node-b failed first: gpu-fell-off-bus",
        "The kernel of node-b lost GPU 0000:c1:00.0",
        "very likely (93%)",
        "node-b/kernel.log:8812",
        "GPU has fallen off the bus.",
        "ranks 0-2 wait in all_reduce #812 of default_pg for rank 3",
        "a loose riser",
        "nccl-cuda-error",
        "it follows from gpu-fell-off-bus",
        "flight recorder dump of rank 3",
        "Drain the node",
        "flight-recorder",
    ):
        assert fact in told, fact


def test_on_a_terminal_the_answer_comes_first_and_a_piped_place_is_in_one_piece(diagnoses: ModuleType) -> None:
    lines = terminal(diagnoses.lost_gpu()).splitlines()
    assert lines[0] == "Rank 3 on host node-b failed first: gpu-fell-off-bus, Xid 79."
    assert max(map(len, lines)) <= 80
    long = replace(diagnoses.lost_gpu().evidence[0], file="a/" * 60 + "rank.log")
    told = terminal(replace(diagnoses.lost_gpu(), evidence=(long,)))
    assert f"{'a/' * 60}rank.log:8812" in told
    assert "\x1b" not in told and "\x1b[" in terminal(diagnoses.lost_gpu(), tty=True)


@pytest.mark.parametrize("width", [20, 40, 80, 200])
@pytest.mark.parametrize("name", NAMES)
def test_every_diagnosis_can_be_shown_at_any_width_without_a_control_character(
    diagnoses: ModuleType, name: str, width: int
) -> None:
    assert not CONTROLS.search(terminal(diagnoses.ALL[name](), width))


def test_a_scenario_is_named_with_the_command_that_shows_it(diagnoses: ModuleType) -> None:
    for told in (terminal(diagnoses.deadlock()), markdown(diagnoses.deadlock()), html(diagnoses.deadlock())):
        assert "dtprobe run cross-communicator-deadlock" in told
    assert "No scenario reproduces" in html(diagnoses.lost_gpu())


def test_a_deadlock_is_said_in_a_sentence(diagnoses: ModuleType) -> None:
    assert note.of(diagnoses.deadlock()).cycles == ("2 ranks wait in a circle, none of them can ever go on: 0, 1",)
    assert "none of them can ever go on" in " ".join(terminal(diagnoses.deadlock()).split())


def test_undetermined_claims_nothing_and_says_what_was_absent(diagnoses: ModuleType) -> None:
    made = diagnoses.undetermined()
    told = terminal(made)
    assert told.startswith("The artifacts do not decide what failed first.")
    assert "confidence" not in told and "fix" not in told
    assert "py-spy dump" in told and "TORCH_FR_BUFFER_SIZE" in told and "journalctl -k" in told
    assert "every rank's output" not in told
    rich = replace(made, read={"flight-recorder": 2, "stacks": 1, "kernel-log": 1, "nccl-log": 1})
    assert [one.what for one in note.of(rich).collect] == ["every rank's output", "the scheduler's word on how each rank ended"]
    assert note.of(diagnoses.lost_gpu()).collect == ()


def test_the_first_sentence_fits_what_is_known_of_the_rank(diagnoses: ModuleType) -> None:
    made = diagnoses.lost_gpu()
    told = {
        note.of(one).answer
        for one in (
            replace(made, host=None),
            replace(made, first_failing_rank="all", host=None),
            replace(made, first_failing_rank=None, suspects=(1, 2), host=None),
            replace(made, first_failing_rank=None, suspects=()),
            diagnoses.healthy(),
        )
    }
    assert told == {
        "Rank 3 failed first: gpu-fell-off-bus, Xid 79.",
        "No rank failed before the others: gpu-fell-off-bus, Xid 79.",
        "The job failed by gpu-fell-off-bus, Xid 79; the first rank is not certain, look at ranks 1, 2.",
        "The job failed by gpu-fell-off-bus, Xid 79, on host node-b; no single rank can be named.",
        "No failure was found in these artifacts.",
    }


@pytest.mark.parametrize(("confidence", "text"), [(1.0, "almost certain"), (0.85, "very likely"), (0.7, "likely"), (0.5, "more likely than not"), (0.1, "a mere possibility")])  # fmt: skip
def test_confidence_in_words(confidence: float, text: str) -> None:
    assert note.sure(confidence) == text


def test_findings_that_agree_with_the_answer_are_not_ruled_out_and_each_other_is_named_once(diagnoses: ModuleType) -> None:
    made = diagnoses.lost_gpu()
    agreeing = replace(made.ruled_out[0], mode=made.failure_mode)
    found = note.of(replace(made, ruled_out=(agreeing, *made.ruled_out, *made.ruled_out)))
    assert [one.mode for one in found.rivals] == ["nccl-cuda-error", "collective-skipped", "packet-loss"]


def test_every_mode_of_the_taxonomy_has_a_sentence(diagnoses: ModuleType) -> None:
    for name in modes():
        assert note.of(replace(diagnoses.lost_gpu(), failure_mode=name)).answer.endswith(".")


@pytest.mark.parametrize("name", NAMES)
def test_the_page_is_well_formed_without_script_or_outside_asset(diagnoses: ModuleType, name: str) -> None:
    found = _Elements(html(diagnoses.ALL[name]()))
    assert not found.tags & {"script", "img", "iframe", "object", "a<b>", "b", "link"} - {"link"}
    assert not {attribute for attribute in found.attributes if attribute.startswith("on")}
    assert all(value.startswith("#") or value == "data:," for value in found.values)


def test_what_an_enemy_wrote_is_text_on_the_page_and_in_markdown(diagnoses: ModuleType) -> None:
    whole = html(diagnoses.hostile())
    assert "<script>" not in whole and "&lt;script&gt;alert(1)" in whole
    assert "49" not in re.findall(r"\{\{ 7\*7 \}\}|\b49\b", whole)
    assert not CONTROLS.search(whole.replace("\n", ""))
    assert len(whole) < 200_000
    document = markdown(diagnoses.hostile())
    assert not CONTROLS.search(document)
    outside = re.sub(r"(`+).*?\1", "", document)
    assert not re.search(r"(?<!\\)[<\[*]script|(?<!\\)\[a(?<!\\)\]\(", outside)


def test_the_page_of_a_huge_job_stays_small(diagnoses: ModuleType) -> None:
    assert len(html(diagnoses.big())) < 100_000
    assert len(markdown(diagnoses.big())) < 20_000
