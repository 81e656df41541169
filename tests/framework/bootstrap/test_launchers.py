"""Real launchers: torchrun, mpirun, srun over two nodes, and one inside the other. The environments are theirs, not ours."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

_PROGRAM = """
import json, sys
import torch, torch.distributed as dist
from dtprobe.framework.bootstrap import PlacementError, start
try:
    with start(deadline_s=60) as job:
        x = torch.ones(1)
        dist.all_reduce(x)
        p = job.placement
        facts = dict(sum=x.item(), rank=p.rank, size=p.world_size, local=p.local_rank, node=p.node_rank, nodes=p.nodes, source=p.source,
                     port=p.master_port is not None, disagreed=[d.source for d in p.disagreed], peers=[q.rank for q in job.peers])
except PlacementError as error:
    facts = dict(refused=str(error))
sys.stdout.write("say " + json.dumps(facts) + chr(10))
"""
_BIN = Path(sys.executable).parent


def launched(command: list[str], tmp_path: Path, extra: dict[str, str] | None = None, timeout_s: float = 240) -> list[dict]:
    """Run a launcher's command; what its processes said, in the order of their ranks."""
    program = tmp_path / "program.py"
    program.write_text(_PROGRAM, encoding="utf-8")
    environ = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("SLURM_", "OMPI_", "PMI", "TORCHELASTIC_", "MASTER_"))
        and name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    } | {
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(Path(__file__).parents[3]),
        "PATH": f"{_BIN}:{os.environ['PATH']}",
        **(extra or {}),
    }
    log = tmp_path / "launcher.log"
    with log.open("w") as output:
        process = subprocess.Popen(
            [part.format(program=program, python=sys.executable) for part in command],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environ,
            cwd=tmp_path,
        )
        try:
            process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            process.terminate()
            process.wait(30)
    text = log.read_text(encoding="utf-8", errors="replace")
    said = [json.loads(line.split("say ", 1)[1]) for line in text.splitlines() if "say {" in line]
    assert process.returncode == 0, text
    return sorted(said, key=lambda facts: facts.get("rank", -1))


def facts(said: list[dict], *names: str) -> list[tuple]:
    return [tuple(each[name] for name in names) for each in said]


TORCHRUN = ["{python}", "-m", "torch.distributed.run"]
# as root, on a host with fewer cores than processes, away from any resource manager's own launcher
MPIRUN = ["mpirun", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "--mca", "btl", "self,sm,tcp"]


def test_torchrun(tmp_path):
    said = launched([*TORCHRUN, "--standalone", "--nproc-per-node=2", "{program}"], tmp_path)
    assert facts(said, "rank", "size", "local", "node", "source", "sum") == [
        (0, 2, 0, 0, "torchrun", 2.0),
        (1, 2, 1, 0, "torchrun", 2.0),
    ]


@pytest.mark.needs("mpirun")
def test_mpirun(tmp_path):
    said = launched([*MPIRUN, "-n", "2", "{python}", "{program}"], tmp_path)
    assert facts(said, "rank", "size", "local", "source", "sum") == [(0, 2, 0, "mpirun", 2.0), (1, 2, 1, "mpirun", 2.0)]
    assert not said[0]["port"]  # derived from the run's name on both sides


def test_srun_over_two_nodes(tmp_path, slurm):
    said = launched(["srun", "-N2", "-n2", "{python}", "{program}"], tmp_path, slurm.environ | {"MASTER_ADDR": "127.0.0.1"})
    assert facts(said, "rank", "size", "local", "node", "nodes", "source", "sum") == [
        (0, 2, 0, 0, 2, "slurm", 2.0),
        (1, 2, 0, 1, 2, "slurm", 2.0),
    ]


def test_a_step_smaller_than_its_allocation(tmp_path, slurm):
    command = ["salloc", "--quiet", "-N2", "-n6", "srun", "-N1", "-n2", "{python}", "{program}"]
    said = launched(command, tmp_path, slurm.environ | {"MASTER_ADDR": "127.0.0.1"})
    assert facts(said, "rank", "size", "nodes", "source", "sum") == [(0, 2, 1, "slurm", 2.0), (1, 2, 1, "slurm", 2.0)]


def test_one_torchrun_a_node_inside_srun(tmp_path, slurm, port):
    meet = ["--nnodes=2", "--nproc-per-node=1", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=nested"]
    command = ["srun", "-N2", "--ntasks-per-node=1", *TORCHRUN, *meet, "--local-addr=127.0.0.1", "{program}"]
    said = launched(command, tmp_path, slurm.environ)
    assert facts(said, "rank", "size", "nodes", "source", "sum") == [(0, 2, 2, "torchrun", 2.0), (1, 2, 2, "torchrun", 2.0)]


def test_several_torchruns_inside_srun_that_do_not_meet_are_refused(tmp_path, slurm):
    command = ["srun", "-n2", *TORCHRUN, "--standalone", "--nproc-per-node=1", "{program}"]
    said = launched(command, tmp_path, slurm.environ)
    assert len(said) == 2
    for each in said:
        assert "WORLD_SIZE=1" in each["refused"] and "SLURM_STEP_NUM_TASKS=2" in each["refused"]
        assert "--ntasks-per-node=1 torchrun" in each["refused"]


@pytest.mark.needs("mpirun")
def test_mpirun_inside_srun(tmp_path, slurm):
    apart = ["--prtemca", "ras", "^slurm", "--prtemca", "plm", "^slurm"]
    command = ["srun", "-n1", "--overcommit", *MPIRUN, *apart, "--host", "localhost:2", "-n", "2", "{python}", "{program}"]
    said = launched(command, tmp_path, slurm.environ)
    assert facts(said, "rank", "size", "source", "sum", "disagreed") == [
        (0, 2, "mpirun", 2.0, ["slurm"]),
        (1, 2, "mpirun", 2.0, ["slurm"]),
    ]


def test_a_rank_exported_by_hand_under_srun_is_refused(tmp_path, slurm, port):
    hand = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    said = launched(["srun", "-n2", "{python}", "{program}"], tmp_path, slurm.environ | hand | {"WORLD_SIZE": "3"})
    assert len(said) == 2
    for each in said:
        assert "WORLD_SIZE=3" in each["refused"] and "SLURM_PROCID=" in each["refused"] and "unset RANK" in each["refused"]
