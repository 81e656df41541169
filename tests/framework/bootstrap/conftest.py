"""A Slurm of two nodes on this host, in a private folder, on loopback, ended with the session."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from dtprobe import doctor

_CONF = """
ClusterName=dtprobe
SlurmctldHost=localhost
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
CredType=cred/munge
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
MpiDefault=none
ReturnToService=2
SlurmctldPort={ports[0]}
SlurmctldPidFile={folder}/ctld.pid
SlurmdPidFile={folder}/d.%n.pid
SlurmdSpoolDir={folder}/spool/%n
StateSaveLocation={folder}/state
SlurmctldLogFile={folder}/ctld.log
SlurmdLogFile={folder}/d.%n.log
SlurmdParameters=config_overrides
NodeName=node1 NodeHostname=localhost NodeAddr=127.0.0.1 CPUs=4 RealMemory=1000 Port={ports[1]}
NodeName=node2 NodeHostname=localhost NodeAddr=127.0.0.1 CPUs=4 RealMemory=1000 Port={ports[2]}
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=YES
"""


@dataclass(frozen=True)
class Slurm:
    """A running Slurm; give `environ` to its commands."""

    folder: Path
    environ: dict[str, str]

    def idle_nodes(self) -> int:
        found = subprocess.run(
            ["sinfo", "-h", "-t", "idle", "-o", "%D"],
            env=os.environ | self.environ,
            capture_output=True,
            text=True,
            check=False,
            timeout=20,
        )
        return int(found.stdout.strip() or 0)


@pytest.fixture(scope="session")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    """Skips, with doctor's reason, where no Slurm can be started."""
    unavailable = doctor.together(doctor.here().unmet(["slurm"]))
    if unavailable is not None or os.geteuid() != 0:
        pytest.skip(str(unavailable or "starting slurmd needs root"))
    folder = tmp_path_factory.mktemp("slurm")
    for name in ("munge", "spool/node1", "spool/node2", "state"):
        (folder / name).mkdir(parents=True, mode=0o755)
    key = folder / "munge" / "key"
    key.write_bytes(secrets.token_bytes(1024))
    key.chmod(0o400)
    conf = folder / "slurm.conf"
    conf.write_text(_CONF.format(folder=folder, ports=_free_ports(3)), encoding="utf-8")
    munge = {name: str(folder / "munge" / name) for name in ("socket", "pid", "log", "seed")}
    commands = [
        [
            "munged",
            "--foreground",
            "--force",
            "--key-file",
            str(key),
            "--socket",
            munge["socket"],
            "--pid-file",
            munge["pid"],
            "--log-file",
            munge["log"],
            "--seed-file",
            munge["seed"],
        ],
        ["slurmctld", "-D", "-i", "-f", str(conf)],
        ["slurmd", "-D", "-N", "node1", "-f", str(conf)],
        ["slurmd", "-D", "-N", "node2", "-f", str(conf)],
    ]
    path = f"{os.environ['PATH']}:/usr/sbin:/sbin"
    daemons: list[subprocess.Popen[bytes]] = []
    try:
        for command in commands:
            with (folder / "daemons.log").open("ab") as log:
                daemons.append(
                    subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=os.environ | {"PATH": path})
                )
            if command[0] == "munged":
                _until(Path(munge["socket"]).exists, "munged made no socket", folder)
        cluster = Slurm(folder, {"SLURM_CONF": str(conf)})
        _until(lambda: cluster.idle_nodes() == 2, "Slurm's two nodes did not become idle", folder)
        yield cluster
    finally:
        _end(daemons, str(folder))


def _free_ports(count: int) -> list[int]:
    import socket

    probes = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [probe.getsockname()[1] for probe in probes]
    for probe in probes:
        probe.close()
    return ports


def _until(holds: object, problem: str, folder: Path) -> None:
    deadline = time.monotonic() + 60
    while not holds():  # type: ignore[operator]
        if time.monotonic() > deadline:
            logs = "\n".join(f"{log}: {log.read_text(errors='replace')[-600:]}" for log in folder.glob("*.log"))
            pytest.fail(f"{problem}\n{logs}", pytrace=False)
        time.sleep(0.1)


def _end(daemons: list[subprocess.Popen[bytes]], folder: str) -> None:
    """End the daemons, then whatever they had detached: step daemons name the folder in their environment or arguments."""
    for daemon in reversed(daemons):
        daemon.send_signal(signal.SIGTERM)
    for daemon in daemons:
        try:
            daemon.wait(10)
        except subprocess.TimeoutExpired:
            daemon.kill()
            daemon.wait()
    for process in psutil.process_iter():
        try:
            if process.pid != os.getpid() and (
                folder in " ".join(process.cmdline()) or process.environ().get("SLURM_CONF", "").startswith(folder)
            ):
                process.kill()
        except psutil.Error:
            continue
