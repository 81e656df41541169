"""Plain data is loaded; whatever would run, build or exhaust something is refused."""

from __future__ import annotations

import contextlib
import os
import pickle
import subprocess
import sys
import types
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dtprobe.readers.safe_pickle import MAX_TUPLES, CutPickle, RefusedPickle, loads

SCALARS = st.none() | st.booleans() | st.integers(-(1 << 200), 1 << 200) | st.floats(allow_nan=False) | st.text(max_size=300)
PLAIN = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=6) | st.tuples(inner, inner) | st.tuples(inner, inner, inner, inner) | st.dictionaries(st.text(max_size=5), inner, max_size=5),
    max_leaves=60,
)  # fmt: skip


@settings(deadline=None)
@given(PLAIN, st.sampled_from([2, 3, 4, 5]))
def test_plain_data_comes_back(value: object, protocol: int) -> None:
    assert loads(pickle.dumps(value, protocol)) == value


class Runs:
    """Leaves a file behind where it is unpickled."""

    def __init__(self, call: object, *args: object) -> None:
        self.how = call, args

    def __reduce__(self) -> tuple:
        return self.how


@pytest.mark.parametrize("protocol", [0, 1, 2, 3, 4, 5])
def test_a_pickle_that_would_run_code_is_refused_and_does_not(tmp_path: Path, protocol: int) -> None:
    mark = tmp_path / "ran"
    data = pickle.dumps({"entries": [Runs(os.system, f"touch {mark}")]}, protocol)
    with pytest.raises(ValueError) as caught:
        loads(data)
    assert not mark.exists()
    if protocol >= 2:
        assert isinstance(caught.value, RefusedPickle)
        assert "posix.system" in str(caught.value)
    pickle.loads(data)  # noqa: S301  what it would have done
    assert mark.exists()


@pytest.mark.parametrize(
    "value",
    [Runs(exec, "raise SystemExit"), complex(1, 2), range(3), types.SimpleNamespace(a=1), Path("x"), {1}, frozenset([1]), b"bytes of protocol 2"],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
def test_whatever_is_not_plain_is_refused(value: object) -> None:
    with pytest.raises(RefusedPickle):
        loads(pickle.dumps([value], 2))


def test_a_hidden_call_behind_an_early_stop_or_in_a_string_changes_nothing() -> None:
    assert loads(b"\x80\x02]." + b"cos\nsystem\nX\x02\x00\x00\x00ls\x85R.") == []
    assert loads(pickle.dumps(["cos\nsystem\n(S'ls'\ntR."], 2)) == ["cos\nsystem\n(S'ls'\ntR."]


BOMBS = {
    "a memo of 2^31 places": b"\x80\x02]r\xff\xff\xff\x7f.",
    "tuples nested 300,000 deep as a key": b"\x80\x02})" + b"\x85" * 300_000 + b"Ns.",
    "tuples nested by way of the memo": b"\x80\x02)" + b"".join(b"\x85q\x010h\x01" for _ in range(100_000)) + b"\x85.",
    "lists nested 300,000 deep": b"\x80\x02" + b"]" * 300_000 + b"a" * 299_999 + b".",
    "a string of 4 GB": b"\x80\x02X\xff\xff\xff\xff.",
    "bytes of 2^62": b"\x80\x04\x8e" + (1 << 62).to_bytes(8, "little") + b".",
    "a frame of 2^63": b"\x80\x04\x95" + b"\xff" * 8 + b"].",
    "a number of 2 GB": b"\x80\x02\x8b\xff\xff\xff\x7f.",
    "a mark for each byte": b"\x80\x02" + b"(" * 300_000 + b".",
    "doubling": b"\x80\x02](" + b"2" * 1000 + b"e.",
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_is_refused_or_harmless(name: str) -> None:
    """In a process of its own: an overflow of the C stack would end the whole suite. 400 MB of address space above its start."""
    program = (
        "import resource, sys\n"
        "from dtprobe.readers.safe_pickle import loads\n"
        "used = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize()\n"
        "resource.setrlimit(resource.RLIMIT_AS, (used + 400_000_000,) * 2)\n"
        "try:\n    value = loads(sys.stdin.buffer.read())\n    print('loaded', type(value).__name__)\n"
        "except ValueError as error:\n    print(type(error).__name__, str(error)[:80])\n"
    )
    done = subprocess.run([sys.executable, "-c", program], input=BOMBS[name], capture_output=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr.decode()[-500:]
    assert done.stdout.split()[0] in (b"loaded", b"RefusedPickle", b"CutPickle", b"ValueError")
    if "2^31" in name or "deep as a key" in name:
        assert done.stdout.startswith(b"RefusedPickle")


def test_many_tuples_that_are_not_nested_are_fine() -> None:
    value = [("0", "default_pg")] * 3 + [(str(at), (at, at)) for at in range(2 * MAX_TUPLES)]
    assert loads(pickle.dumps(value, 2)) == value


@settings(deadline=None)
@given(st.lists(st.dictionaries(st.text(max_size=3), SCALARS, min_size=2, max_size=4), min_size=2, max_size=6), st.data())
def test_of_a_cut_pickle_the_complete_part_is_kept(entries: list, data: st.DataObject) -> None:
    whole = pickle.dumps({"version": "2.10", "entries": entries}, 2)
    at = data.draw(st.integers(2, len(whole) - 1))
    with pytest.raises(CutPickle) as caught:
        loads(whole[:at])
    value = caught.value.value
    if value is not None and "entries" in value:
        assert value["version"] == "2.10"
        kept = value["entries"]
        assert kept[:-1] == entries[: max(0, len(kept) - 1)]


@settings(deadline=None, max_examples=300)
@given(st.binary(max_size=300).map(lambda tail: b"\x80\x02" + tail) | st.binary(max_size=50))
def test_any_bytes_give_a_value_or_a_value_error(data: bytes) -> None:
    with contextlib.suppress(ValueError):
        loads(data)
