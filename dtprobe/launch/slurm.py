"""A Slurm of two nodes on this host, for as long as a block lasts: real daemons, as root, on loopback, in a private folder."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from dtprobe.confine import Confinement
from dtprobe.errors import DtprobeError, UsageError

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

_MUNGE = {"socket": "socket", "pid": "pid-file", "log": "log-file", "seed": "seed-file"}
_START_S = 60.0
LONGEST_SOCKET = 107
"""sockaddr_un holds so many bytes of path (unix(7))."""


@contextlib.contextmanager
def cluster(folder: Path, environ: Mapping[str, str] = os.environ) -> Iterator[dict[str, str]]:
    """The variables with which Slurm's commands talk to a cluster whose two nodes, of four slots each, are idle.

    Everything of it lies in `folder`, ports are free ones of loopback. Needs slurm-wlm, munge and root (doctor's `slurm`). Raises
    UsageError for a folder whose name is too long for sockets in it, DtprobeError with the
    daemons' last words where it does not come up within a minute. At the end, and when this process is killed, daemons and what they detached are ended:
    they are confined, since step daemons leave their parents, arguments and environment behind.
    """
    if len(longest := f"{folder}/spool/node1/node1_{2**32 - 1}.{2**32 - 1}") > LONGEST_SOCKET:
        raise UsageError(
            f"{folder}: sockets of Slurm's steps would have {len(longest)} characters, {LONGEST_SOCKET} can be",
            "name a shorter folder",
        )
    for name in ("munge", "spool/node1", "spool/node2", "state"):
        (folder / name).mkdir(parents=True, mode=0o755)
    key = folder / "munge" / "key"
    key.write_bytes(secrets.token_bytes(1024))
    key.chmod(0o400)
    conf = folder / "slurm.conf"
    conf.write_text(_CONF.format(folder=folder, ports=_free_ports(3)), encoding="utf-8")
    told = {"SLURM_CONF": str(conf)}
    own = {**environ, **told, "PATH": f"{environ['PATH']}:/usr/sbin:/sbin"}
    munge = [
        option for name in ("socket", "pid", "log", "seed") for option in (f"--{_MUNGE[name]}", str(folder / "munge" / name))
    ]

    def start(*command: str) -> None:
        log = folder / "daemons.log"
        box.spawn(command, env=own, cwd=folder, stdout=log, stderr=log, held=False)

    def idle() -> bool:
        found = subprocess.run(
            ["sinfo", "-h", "-t", "idle", "-o", "%D"], env=own, capture_output=True, text=True, check=False, timeout=20
        )
        return found.stdout.strip() == "2"

    with Confinement.open(f"slurm-{secrets.token_hex(4)}", environ=environ) as box:
        start("munged", "--foreground", "--force", "--key-file", str(key), *munge)
        _wait_until((folder / "munge" / "socket").exists, "munged made no socket", folder)
        start("slurmctld", "-D", "-i", "-f", str(conf))
        for node in ("node1", "node2"):
            start("slurmd", "-D", "-N", node, "-f", str(conf))
        _wait_until(idle, "Slurm's two nodes did not become idle", folder)
        yield told


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as held:
        probes = [held.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [probe.getsockname()[1] for probe in probes]


def _wait_until(holds: Callable[[], bool], problem: str, folder: Path) -> None:
    deadline = time.monotonic() + _START_S
    while not holds():
        if time.monotonic() > deadline:
            logs = "\n".join(f"{log}: {log.read_text(errors='replace')[-600:]}" for log in folder.glob("*.log"))
            raise DtprobeError(f"{problem} within {_START_S:g} s\n{logs}")
        time.sleep(0.1)
