"""The fault grammar: what is written is what is meant, and nothing wrong is swallowed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtprobe import UsageError
from dtprobe.inject import Injection, Injector, Target
from dtprobe.inject.spec import parse


@dataclass(frozen=True, kw_only=True)
class Delay:
    """Wait."""

    seconds: float
    jitter: bool = False
    side: Literal["before", "after"] = "before"
    paths: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Skip:
    """Leave a call out."""


INJECTORS = {
    "made-up": Injector(
        name="made-up",
        layer="c10d",
        title="t",
        certifies_not="n",
        actions={"delay": Delay, "skip": Skip},
        targets=("rank", "op", "nth", "every", "times", "probability", "after_s"),
        make=lambda fault, site: Injection(),
    )
}


def test_a_fault_is_parsed_into_types():
    fault = parse("made-up:delay,rank=1+3,op=all_reduce,nth=3,seconds=0.5,jitter=yes,paths=a+b", INJECTORS)
    assert fault.config == Delay(seconds=0.5, jitter=True, paths=("a", "b"))
    assert fault.target == Target(rank=(1, 3), op="all_reduce", nth=(3,))


@given(
    st.builds(
        lambda **fields: fields,
        seconds=st.floats(0, 1e6),
        jitter=st.booleans(),
        side=st.sampled_from(["before", "after"]),
        rank=st.none() | st.lists(st.integers(0, 99), min_size=1, max_size=4),
        after_s=st.none() | st.floats(0, 1e4),
    )
)
def test_a_fault_written_out_parses_to_itself(fields):
    words = [f"seconds={fields['seconds']!r}", f"jitter={'yes' if fields['jitter'] else 'no'}", f"side={fields['side']}"]
    words += [f"rank={'+'.join(map(str, fields['rank']))}"] if fields["rank"] else []
    words += [f"after_s={fields['after_s']!r}"] if fields["after_s"] is not None else []
    fault = parse(",".join(["made-up:delay", *words]), INJECTORS)
    assert parse(str(fault), INJECTORS) == fault


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("made-op:delay,seconds=1", "no injector is called 'made-op'; did you mean made-up"),
        ("made-up:dely,seconds=1", "no action 'dely'; did you mean delay"),
        ("made-up", "no action ''"),
        ("", "no injector is called ''"),
        ("made-up:delay", "needs seconds"),
        ("made-up:delay,seconds=soon", "seconds=soon is no float"),
        ("made-up:delay,seconds=nan", "not finite"),
        ("made-up:delay,seconds", "is no key=value"),
        ("made-up:delay,seconds=1,seconds=2", "given twice"),
        ("made-up:delay,secnds=1", "no parameter 'secnds'; did you mean seconds"),
        ("made-up:delay,seconds=1,group=dp", "cannot aim by group"),
        ("made-up:delay,seconds=1,side=above", "side=above is unknown"),
        ("made-up:delay,seconds=1,jitter=perhaps", "neither yes nor no"),
        ("made-up:skip,rank=4", "rank 4 is outside world size 4"),
        ("made-up:skip,rank=-1", "rank -1 is negative"),
        ("made-up:skip,nth=0", "counted from 1"),
        ("made-up:skip,nth=2,every=3", "nth contradicts every"),
        ("made-up:skip,probability=1.5", "not between 0 and 1"),
        ("made-up:skip,probability=0.5,nth=2", "probability contradicts"),
        ("made-up:skip,times=0", "less than 1"),
        ("made-up:skip,after_s=-2", "is negative"),
    ],
)
def test_a_wrong_fault_is_refused_with_the_value_and_the_remedy(text, says):
    with pytest.raises(UsageError, match=says.replace("(", r"\(")):
        parse(text, INJECTORS, world_size=4)


@given(st.text(max_size=60))
def test_any_text_is_a_fault_or_a_usage_error(text):
    try:
        parse(text, INJECTORS)
    except UsageError as error:
        assert "\n" not in str(error).replace(text, "")


def test_a_replayed_fault_has_no_chance_left():
    fault = parse("made-up:skip,op=all_reduce,probability=0.3,times=9", INJECTORS).at([2, 5], rank=1)
    assert fault.target == Target(rank=(1,), op="all_reduce", nth=(2, 5))
