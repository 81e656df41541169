"""Real ranks on real nodes: namespaces with names, networks and clocks of their own, and what is left of them when one vanishes."""

from __future__ import annotations

import json
import os
import sys
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from dtprobe import armrun, catalog, judging, processes
from dtprobe.armrun import ArmPlan, ArmRecord, Workload
from dtprobe.clock import SystemClock
from dtprobe.confine import Confinement
from dtprobe.errors import DtprobeError, UsageError
from dtprobe.inject.spec import parse
from dtprobe.launch import Launcher, Spread
from dtprobe.launch.hosts import OnHosts
from dtprobe.launch.local import Local
from dtprobe.launch.nodes.spaces import prefix
from dtprobe.launch.slurm import cluster
from dtprobe.launch.srun import OnSlurm
from dtprobe.probes.logs import Logs
from dtprobe.probes.proc import Proc

SECOND = 10**9
AHEAD_S = 30
PLENTY_S = 60.0
NETNS = Path("/run/netns")
ARM = Path("fault", "0")

MEET = """
import json, os, socket, time
rank, store = int(os.environ["RANK"]), (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
came = []
if rank == 0:
    server = socket.create_server(("", store[1]))
    server.settimeout(50)
    callers = [server.accept() for _ in range(3)]
    came = sorted(address[0] for _, address in callers)
    [caller.close() for caller, _ in callers]
else:
    give_up = time.monotonic() + 50
    while True:
        try:
            with socket.create_connection(store, timeout=50) as way:
                way.recv(1)
            break
        except ConnectionRefusedError:
            if time.monotonic() > give_up:
                raise
            time.sleep(0.05)
names = ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "WORLD_SIZE", "NODE_RANK", "NNODES", "GLOO_SOCKET_IFNAME", "DTPROBE_NODE")
said = {"came": came, "host": os.uname().nodename, "node1": socket.gethostbyname("node1"), **{name: os.environ.get(name) for name in names}}
line = {"t_ns": time.time_ns(), "kind": "met", "rank": rank, "monotonic_ns": time.monotonic_ns(), "said": json.dumps(said)}
with open(os.environ["DTPROBE_RANK_FOLDER"] + "/events.jsonl", "a") as file:
    print(json.dumps(line), file=file)
if rank == 3:
    os.kill(os.getpid(), 9)
"""

LIVE_ON = "import time; print('up', flush=True); time.sleep(600)"


@contextmanager
def confined(tmp_path: Path) -> Iterator[Confinement]:
    """A confinement of which nothing may be left: no process, network, temporary file or journal."""
    (tmp_path / "tmp").mkdir()
    environ = {**os.environ, "XDG_STATE_HOME": str(tmp_path / "state"), "TMPDIR": str(tmp_path / "tmp")}
    with Confinement.open(f"test-{uuid.uuid4().hex[:12]}", environ=environ) as box:
        yield box
    assert processes.marked(box.run_id) == [] and not list((tmp_path / "tmp").iterdir())
    assert not list((tmp_path / "state").rglob("*.jsonl"))
    assert not list(NETNS.glob(f"{prefix(box.run_id, tmp_path / ARM)}*"))


def run(
    tmp_path: Path,
    code: str,
    launcher: Launcher | Spread,
    *faults: str,
    timeout_s: float = PLENTY_S,
    environ: dict[str, str] | None = None,
    world_size: int = 4,
) -> tuple[ArmRecord, list[str]]:
    known = catalog.injectors()[0] if faults else {}
    work = Workload((sys.executable, "-S", "-c", code), tmp_path, timeout_s, world_size)
    plan = ArmPlan(
        "fault", work, 0, traced=False, probed=True, faults=tuple(parse(one, known, world_size=world_size) for one in faults)
    )
    with confined(tmp_path) as box:
        record = armrun.execute(
            box,
            plan,
            folder=tmp_path / ARM,
            probes=[Logs(), Proc()],
            launcher=launcher,
            seed=1,
            environ={**os.environ, **(environ or {})},
            clock=SystemClock(),
        )
        return record, list(box.problems)


def said(record: ArmRecord, rank: int) -> dict:
    line = json.loads((record.folder / f"rank{rank}" / "events.jsonl").read_text())
    return {**json.loads(line["said"]), "t_ns": line["t_ns"], "monotonic_ns": line["monotonic_ns"]}


@pytest.mark.needs("root", "netns", "veth", "mount", "cc")
def test_ranks_on_two_hosts_meet_are_recorded_where_they_run_and_stand_on_one_clock(tmp_path: Path) -> None:
    record, problems = run(tmp_path, MEET, OnHosts(nodes=2), f"clock:skew,node=1,seconds={AHEAD_S}")
    assert problems == []
    assert [(one.rank, one.exit_code, one.signal) for one in record.exits] == [
        (0, 0, None),
        (1, 0, None),
        (2, 0, None),
        (3, None, 9),
    ]
    # the network is the nodes' own: ranks of the other host come from its address
    told = [said(record, rank) for rank in range(4)]
    assert told[0]["came"] == ["10.89.0.1", "10.89.0.2", "10.89.0.2"]
    assert [one["host"] for one in told] == ["node0", "node0", "node1", "node1"]
    assert {one["node1"] for one in told} == {"10.89.0.2"}
    assert [(one["LOCAL_RANK"], one["LOCAL_WORLD_SIZE"], one["NODE_RANK"]) for one in told] == [
        ("0", "2", "0"), ("1", "2", "0"), ("0", "2", "1"), ("1", "2", "1"),
    ]  # fmt: skip
    assert {(one["WORLD_SIZE"], one["NNODES"], one["GLOO_SOCKET_IFNAME"], one["DTPROBE_NODE"]) for one in told} == {
        ("4", "2", "dtp0", None)
    }
    # gathered here, with the host they ran on
    for rank, name in enumerate(("node0", "node0", "node1", "node1")):
        folder = record.folder / f"rank{rank}"
        assert json.loads((folder / "process.json").read_text())["host"] == name
        assert (folder / "proc.jsonl").stat().st_size and (folder / "stdout.log").exists()
    assert {str(file.relative_to(record.folder)) for file in record.recorded["proc"].files} == {
        f"rank{rank}/proc.jsonl" for rank in range(4)
    }
    # the clocks: the wrong one is measured, to within what it is said to be uncertain by
    assert record.hosts is not None and record.hosts.reference == os.uname().nodename
    right, wrong = record.hosts.hosts
    assert abs(right.offset_ns) <= right.uncertainty_ns and not right.stepped
    assert abs(wrong.offset_ns + AHEAD_S * SECOND) <= wrong.uncertainty_ns < SECOND and wrong.after is not None
    ((fault,),) = (record.injected,)
    assert [hit.detail for hit in fault.fired] == ["node1: wall clock +30 s, monotonic clock untouched"]
    # frames on one clock: one kernel's monotonic clock is the witness of the true order and distance
    evidence = judging.gather(tmp_path, 4, [record], {}, 0)
    met = evidence.frame("events").set_index("rank")
    assert met["host"].to_list() == ["node0", "node0", "node1", "node1"]
    for rank in (1, 2, 3):
        true_ns = told[rank]["monotonic_ns"] - told[0]["monotonic_ns"]
        assert abs(int(met.loc[rank, "t_ns"] - met.loc[0, "t_ns"]) - true_ns) < SECOND
    assert told[2]["t_ns"] - told[0]["t_ns"] > (AHEAD_S - 5) * SECOND  # the artifact keeps the host's own stamp


@pytest.mark.needs("root", "netns", "veth", "mount")
def test_a_node_that_vanishes_is_named_and_what_the_others_left_is_kept(tmp_path: Path) -> None:
    record, problems = run(tmp_path, LIVE_ON, OnHosts(nodes=2, silence_s=2), "node:lose,node=1,after_s=1", timeout_s=4)
    assert problems == []
    assert [(one.rank, one.exit_code, one.signal, one.timed_out) for one in record.exits] == [
        (0, None, 9, True), (1, None, 9, True), (2, None, None, False), (3, None, None, False),
    ]  # fmt: skip
    assert all(one.pid for one in record.exits)
    assert record.hosts is not None
    kept, lost = record.hosts.hosts
    assert not kept.lost and lost.lost and lost.lost_ns is not None and lost.ranks == (2, 3)
    (fault,) = record.injected
    (hit,) = fault.fired
    assert hit.detail.startswith("node1: cable dead") and lost.lost_ns > hit.t_ns
    assert any(text.startswith("node1 was lost") for text in record.recorded["proc"].problems)
    assert (record.folder / "rank0" / "stdout.log").read_text() == "up\n"
    # what the lost one had sent until then is kept too
    assert (record.folder / "rank2" / "process.json").exists()


@pytest.mark.needs("root", "netns", "veth", "mount")
@pytest.mark.parametrize(
    ("launcher", "faults", "error", "message"),
    [
        (OnHosts(nodes=5), (), UsageError, "4 ranks cannot run on 5 nodes"),
        (OnHosts(nodes=2), ("node:lose,node=2",), UsageError, "there is no node 2"),
        (OnHosts(nodes=2), ("network:delay,rank=1,seconds=1",), UsageError, "joins ranks of one machine"),
        (Local(), ("node:lose,node=1",), UsageError, "names a node: the local launcher has none"),
        (OnSlurm(), (), DtprobeError, "srun is not on PATH"),
    ],
)
def test_what_cannot_be_is_one_clear_line_and_leaves_nothing(
    tmp_path: Path, launcher: Launcher | Spread, faults: Sequence[str], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        run(tmp_path, LIVE_ON, launcher, *faults, environ={"PATH": str(tmp_path)})


@pytest.mark.needs("root", "netns", "veth", "mount", "cc")
@pytest.mark.nightly
def test_a_clock_that_is_set_in_mid_run_is_said_to_be(tmp_path: Path) -> None:
    code = "import time; time.sleep(4)"
    record, _ = run(tmp_path, code, OnHosts(nodes=2), "clock:jump,node=1,after_s=1,seconds=-5")
    assert record.hosts is not None
    right, wrong = record.hosts.hosts
    assert not right.stepped and wrong.stepped and wrong.uncertainty_ns >= 5 * SECOND > 1000 * right.uncertainty_ns


@pytest.mark.needs("root", "netns", "veth", "mount")
@pytest.mark.nightly
def test_a_node_whose_cable_is_pulled_is_given_up_and_taken_down(tmp_path: Path) -> None:
    record, problems = run(tmp_path, LIVE_ON, OnHosts(nodes=2, silence_s=2), "node:unplug,node=0,after_s=1", timeout_s=4)
    assert problems == [] and record.hosts is not None
    assert [bool(host.lost) for host in record.hosts.hosts] == [True, False]


@pytest.mark.needs("root", "netns", "veth", "mount")
@pytest.mark.nightly
def test_an_interrupt_takes_all_nodes_down(tmp_path: Path) -> None:
    import signal
    import threading

    threading.Timer(8, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, LIVE_ON, OnHosts(nodes=2))


@pytest.mark.needs("root", "netns", "veth", "mount")
@pytest.mark.nightly
def test_a_program_that_is_not_there_is_said_by_the_node_that_lacks_it(tmp_path: Path) -> None:
    plan = ArmPlan("fault", Workload(("/nowhere/program",), tmp_path, 5, 2), 0, traced=False, probed=True)
    with confined(tmp_path) as box, pytest.raises(DtprobeError, match="node0: cannot execute /nowhere/program"):
        armrun.execute(
            box,
            plan,
            folder=tmp_path / ARM,
            probes=[],
            launcher=OnHosts(nodes=2),
            seed=0,
            environ=os.environ,
            clock=SystemClock(),
        )


@pytest.mark.needs("slurm", "root", "command:srun")
@pytest.mark.nightly
@pytest.mark.alone
def test_the_same_under_a_real_slurm_of_two_nodes(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    with cluster(tmp_path / "slurm") as told:
        code = MEET.replace('socket.gethostbyname("node1")', "None")
        record, problems = run(tmp_path / "run", code, OnSlurm(nodes=2), environ=told)
    assert problems == []
    assert [(one.rank, one.exit_code, one.signal) for one in record.exits] == [
        (0, 0, None),
        (1, 0, None),
        (2, 0, None),
        (3, None, 9),
    ]
    assert record.hosts is not None and [(host.name, host.ranks) for host in record.hosts.hosts] == [
        ("node1", (0, 1)),
        ("node2", (2, 3)),
    ]
    assert all(abs(host.offset_ns) <= host.uncertainty_ns for host in record.hosts.hosts)
    assert all("SLURM_PROCID" not in said(record, rank) for rank in range(4))
    assert all((record.folder / f"rank{rank}" / "proc.jsonl").stat().st_size for rank in range(4))
