"""The parts of a run on several nodes by themselves: who gets which rank, clocks compared, artifacts sent, frames corrected."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from dtprobe.errors import UsageError
from dtprobe.launch import named
from dtprobe.launch.nodes import split
from dtprobe.launch.nodes.agent import described, made
from dtprobe.launch.nodes.exchange import Exchange
from dtprobe.launch.nodes.shipping import Shipper, take
from dtprobe.probes.inotify import Inotify
from dtprobe.probes.proc import Proc
from dtprobe.readers import events
from dtprobe.readers.hosts import Host, Hosts, Reading, on_one_clock, read_hosts

SECOND = 10**9


@pytest.mark.parametrize(
    ("world_size", "nodes", "ranks"), [(4, 2, [(0, 1), (2, 3)]), (5, 2, [(0, 1, 2), (3, 4)]), (3, 3, [(0,), (1,), (2,)])]
)
def test_ranks_are_dealt_in_blocks(world_size: int, nodes: int, ranks: list[tuple[int, ...]]) -> None:
    assert split(world_size, nodes) == ranks


def test_fewer_ranks_than_nodes_are_refused() -> None:
    with pytest.raises(UsageError, match="2 ranks cannot run on 3 nodes"):
        split(2, 3)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("hosts:0", "'0' is no number of nodes"),
        ("hosts:x", "'x' is no number of nodes"),
        ("slurm:", "'' is no number of nodes"),
        ("local:2", "local has one node"),
        ("warp:2", "no launcher 'warp:2'"),
    ],
)
def test_a_launcher_that_cannot_be_is_one_clear_line(name: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        named(name)


def test_launchers_take_the_number_of_nodes() -> None:
    assert (named("hosts").nodes, named("hosts:3").nodes, named("slurm:4").nodes) == (2, 3, 4)  # type: ignore[union-attr]


def test_a_recorders_configuration_survives_the_wire() -> None:
    for probe in (Proc(hz=7.5), Inotify()):
        assert made(described(probe)) == probe


class Peer:
    """A node whose clock is `ahead_ns` ahead; a message takes `out_ns` there and `back_ns` back. Time is only what passes here."""

    def __init__(self, ahead_ns: int, ways: list[tuple[int, int]]) -> None:
        self.now = 1000 * SECOND
        self.ahead_ns = ahead_ns
        self.ways = iter(ways)
        self.exchange = Exchange(self.send, lambda: self.now)

    def send(self, *, ping: int, t_ns: int) -> bool:
        out_ns, back_ns = next(self.ways)
        self.now += out_ns
        came = self.now + self.ahead_ns
        self.now += 1000
        left = self.now + self.ahead_ns
        self.now += back_ns
        self.exchange.answered({"pong": ping, "came_ns": came, "left_ns": left}, self.now)
        return True


def test_the_quickest_exchange_says_how_far_a_clock_is_off_and_how_surely() -> None:
    reading = Peer(3 * SECOND, [(50_000, 5_000_000), (20_000, 30_000)] + [(400_000, 90_000)] * 14).exchange.burst()
    assert reading is not None
    assert reading.uncertainty_ns == 25_000  # half of the shortest round trip
    assert abs(reading.offset_ns + 3 * SECOND) == 5_000  # half of what that trip's two ways differ by


def reading(at_s: float, offset_ns: int, uncertainty_ns: int = 10_000) -> Reading:
    return Reading(t_ns=int(at_s * SECOND), offset_ns=offset_ns, uncertainty_ns=uncertainty_ns)


def host(before: Reading, after: Reading | None) -> Host:
    return Host(name="node1", node=1, ranks=(1,), address="", before=before, after=after)


def test_a_clock_that_agrees_with_itself_has_the_surer_readings_offset() -> None:
    one = host(reading(0, -5_000, 9_000), reading(10, -6_000, 2_000))
    assert (one.offset_ns, one.uncertainty_ns, one.stepped) == (-6_000, 2_000, False)
    assert one.offset_at(0) == one.offset_at(10 * SECOND) == -6_000


def test_a_clock_that_drifts_is_corrected_between_its_readings() -> None:
    one = host(reading(0, 0), reading(100, -10_000_000))  # 100 ppm
    assert not one.stepped
    assert [one.offset_at(at * SECOND) for at in (-1, 0, 50, 100, 200)] == [0, 0, -5_000_000, -10_000_000, -10_000_000]


def test_a_clock_that_was_set_in_mid_run_is_uncertain_by_the_step() -> None:
    one = host(reading(0, 0), reading(10, 3 * SECOND))
    assert one.stepped and one.uncertainty_ns >= 3 * SECOND and one.offset_at(5 * SECOND) == 0


def test_hosts_are_read_back_as_they_were_written(tmp_path: Path) -> None:
    hosts = Hosts(reference="here", hosts=(replace(host(reading(0, -5), reading(9, -6)), lost="silent", lost_ns=7),))
    hosts.write(tmp_path)
    assert read_hosts(tmp_path / "hosts.json") == hosts


def test_frames_are_put_on_one_clock_and_rows_of_other_ranks_left_alone() -> None:
    frame = events.SCHEMA.frame(
        {"t_ns": [5 * SECOND, 5 * SECOND, None], "rank": [0, 1, 1], "host": [None, None, "own"], "kind": "x"}
    )
    hosts = Hosts(reference="here", hosts=(host(reading(0, -3 * SECOND), None),))
    found = on_one_clock({"events": frame}, hosts)["events"]
    events.SCHEMA.check(found)
    assert found["t_ns"].to_list()[:2] == [5 * SECOND, 2 * SECOND] and found["t_ns"].isna().to_list() == [False, False, True]
    assert found["host"].fillna("").to_list() == ["", "node1", "own"]
    assert frame["t_ns"].to_list()[1] == 5 * SECOND


def test_artifacts_arrive_as_they_grow_and_as_they_are_replaced(tmp_path: Path) -> None:
    there, here = tmp_path / "there", tmp_path / "here"
    (there / "rank0").mkdir(parents=True)
    here.mkdir()
    sent: list[int] = []

    def send(**part: object) -> bool:
        sent.append(len(str(part["data"])))
        take(here, part)
        return True

    shipper = Shipper(there, send)
    log, state = there / "rank0" / "stdout.log", there / "rank0" / "process.json"
    log.write_text("one\n")
    state.write_text("{}")
    (there / "rank0" / ".half").write_text("x")
    (there / "rank0" / "link").symlink_to("/etc/passwd")
    os.mkfifo(there / "rank0" / "pipe")
    shipper.ship()
    with log.open("a") as file:
        file.write("two\n" * 200_000)
    state.write_text('{"pid": 1}')
    sent.clear()
    shipper.ship()
    assert max(sent) < 400_000  # in parts
    sent.clear()
    shipper.ship()
    assert sent == []
    assert (here / "rank0" / "stdout.log").read_bytes() == log.read_bytes()
    assert (here / "rank0" / "process.json").read_text() == '{"pid": 1}'
    assert sorted(path.name for path in (here / "rank0").iterdir()) == ["process.json", "stdout.log"]


def test_a_large_file_that_is_no_log_comes_once_at_the_end(tmp_path: Path) -> None:
    there, here = tmp_path / "there", tmp_path / "here"
    there.mkdir()
    here.mkdir()
    shipper = Shipper(there, lambda **part: take(here, part) is None)
    (there / "big.sqlite").write_bytes(os.urandom((1 << 20) + 7))
    shipper.ship()
    assert not (here / "big.sqlite").exists()
    shipper.ship(last=True)
    assert (here / "big.sqlite").read_bytes() == (there / "big.sqlite").read_bytes()


@pytest.mark.parametrize("name", ["../out", "/etc/out", "a/../../out", "", "link/out"])
def test_a_file_that_leads_out_of_the_folder_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "link").symlink_to(tmp_path)
    with pytest.raises(ValueError, match="leads out"):
        take(tmp_path / "in", {"file": name, "at": 0, "fresh": True, "data": ""})
    assert not (tmp_path / "out").exists()
