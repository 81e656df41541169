"""Every reader, on whatever bytes: a conforming frame, or one clear line."""

from __future__ import annotations

import random
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dtprobe.readers import bpf, events, flight_recorder, inotify, iperf, logs, nsys, perf, proc, pyspy, rdma, strace
from dtprobe.readers.artifact import Problem, ReaderError
from dtprobe.readers.schema import Schema

CORPUS = Path(__file__).parents[1] / "corpus"
READERS: dict[str, tuple[Callable[..., pd.DataFrame], Schema, str]] = {
    "strace": (strace.read_strace, strace.SCHEMA, "strace/*"),
    "flight_recorder": (flight_recorder.read_flight_recorder, flight_recorder.SCHEMA, "flight_recorder/*"),
    "groups": (
        lambda path, problems: flight_recorder.read_dump(path, problems=problems).groups,
        flight_recorder.GROUPS,
        "flight_recorder/*",
    ),
    "pyspy": (pyspy.read_pyspy, pyspy.SCHEMA, "pyspy/*"),
    "inotify": (inotify.read_inotify, inotify.SCHEMA, "inotify/*"),
    "perf_script": (perf.read_perf_script, perf.SAMPLES, "perf/*.script.txt"),
    "perf_stat": (perf.read_perf_stat, perf.COUNTS, "perf/*.stat.*"),
    "proc": (proc.read_proc, proc.SCHEMA, "flight_recorder/*.json"),
    "events": (events.read_events, events.SCHEMA, "flight_recorder/*.json"),
    "logs": (logs.read_logs, logs.SCHEMA, "strace/f-stderr.txt"),
    "nsys": (nsys.read_nsys, nsys.SCHEMA, ""),
    "perftest": (rdma.read_perftest, rdma.BANDWIDTH, "rdma/ib_write_bw*"),
    "counters": (rdma.read_counters, rdma.COUNTERS, "rdma/hw_counters*"),
    "ibstat": (rdma.read_ibstat, rdma.PORTS, "rdma/ibstat*"),
    "iperf": (iperf.read_iperf, iperf.SCHEMA, "rdma/iperf3*"),
    "bpf": (lambda path, problems: bpf.read_bpf(path, problems=problems).samples, perf.SAMPLES, ""),
}


def synthetic_export() -> bytes:
    with sqlite3.connect(":memory:") as base:
        base.execute("CREATE TABLE StringIds (id INTEGER, value TEXT)")
        base.execute("CREATE TABLE OSRT_API (start INTEGER, 'end' INTEGER, globalTid INTEGER, nameId INTEGER)")
        base.executemany("INSERT INTO StringIds VALUES (?, ?)", [(at, f"call {at}") for at in range(200)])
        base.executemany("INSERT INTO OSRT_API VALUES (?, ?, ?, ?)", [(at, at + 5, at << 24, at) for at in range(200)])
        return base.serialize()


SAMPLES = {
    name: [path.read_bytes() for path in sorted(CORPUS.glob(pattern))] for name, (_, _, pattern) in READERS.items() if pattern
}
SAMPLES["nsys"] = [synthetic_export()]
SAMPLES["bpf"] = [
    b"1790000000.000000007 41 42 tracepoint:syscalls:sys_enter_futex python\n@calls[uprobe:libc:malloc]: 9\n" * 20
]
TOKENS = [
    b"",
    b"\0",
    b"\n",
    b"\xff\xfe",
    b"(",
    b'"',
    b" = ",
    b"<unfinished ...>",
    b"<... ",
    b"9" * 30,
    b"-1",
    b"null",
    b"[",
    b"{",
    b"r\xff\xff\xff\x7f",
    b"1e999",
]


@st.composite
def damaged(draw: st.DrawFn, name: str) -> bytes:
    """A real sample with pieces cut out, doubled, overwritten or put in, at places that a drawn seed gives."""
    data = bytearray(draw(st.sampled_from(SAMPLES[name])))
    rng = random.Random(draw(st.integers(0, 1 << 32)))
    for _ in range(draw(st.integers(0, 6))):
        at, length = rng.randrange(len(data) + 1), rng.choice([1, 2, 5, 40, 500])
        how = rng.randrange(5)
        if how == 0:
            del data[at:]
        elif how == 1:
            del data[at : at + length]
        elif how == 2:
            data[at:at] = data[at : at + length]
        elif how == 3:
            data[at : at + length] = rng.randbytes(length)
        else:
            data[at:at] = rng.choice(TOKENS)
    return bytes(data)


def read(name: str, path: Path, data: bytes) -> None:
    path.write_bytes(data)
    function, schema, _ = READERS[name]
    problems: list[Problem] = []
    try:
        schema.check(function(path, problems=problems))
    except ReaderError as error:
        assert "\n" not in str(error) and len(str(error)) < 1000 and str(path) in str(error)
    assert all("\n" not in one.text for one in problems)


CHECKS = settings(
    deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)


@pytest.mark.parametrize("name", READERS)
@CHECKS
@given(data=st.data())
def test_damaged_samples(name: str, tmp_path: Path, data: st.DataObject) -> None:
    read(name, tmp_path / "strace.7", data.draw(damaged(name)))


@pytest.mark.parametrize("name", READERS)
@CHECKS
@given(data=st.binary(max_size=400) | st.text(max_size=400).map(lambda text: text.encode("utf-8", "surrogatepass")))
def test_any_bytes(name: str, tmp_path: Path, data: bytes) -> None:
    read(name, tmp_path / "artifact", data)


@pytest.mark.nightly
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("name", READERS)
@settings(CHECKS, max_examples=3000)
@given(data=st.data())
def test_damaged_samples_at_length(name: str, tmp_path: Path, data: st.DataObject) -> None:
    read(name, tmp_path / "strace.7", data.draw(damaged(name)))


@pytest.mark.parametrize("name", READERS)
def test_one_long_line_of_megabytes(name: str, tmp_path: Path) -> None:
    read(name, tmp_path / "artifact", b'7 write(1, "' + b'x(\\"' * 700_000 + b'", 5) = 5')
    read(name, tmp_path / "artifact", b"\0" * 2_000_000)
