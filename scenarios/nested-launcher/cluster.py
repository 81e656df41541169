"""A Slurm of two nodes on this host, for as long as one `srun` takes: `python cluster.py TASKS PROGRAM ARGS...`, as root.
PROGRAM is a file beside this one.

Daemons, sockets, spool and state lie in a folder of the run; ports are free ones of loopback.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil

CONF = """
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

START_S = 60.0
END_S = 10.0


@contextlib.contextmanager
def cluster(folder: Path) -> Iterator[dict[str, str]]:
    """The environment in which Slurm's commands talk to a cluster whose two nodes are idle."""
    for name in ("munge", "spool/node1", "spool/node2", "state"):
        (folder / name).mkdir(parents=True, mode=0o755)
    key = folder / "munge" / "key"
    key.write_bytes(secrets.token_bytes(1024))
    key.chmod(0o400)
    conf = folder / "slurm.conf"
    conf.write_text(CONF.format(folder=folder, ports=free_ports(3)), encoding="utf-8")
    environ = {**os.environ, "SLURM_CONF": str(conf), "PATH": f"{os.environ['PATH']}:/usr/sbin:/sbin"}
    munge = [
        option for name in ("socket", "pid", "log", "seed") for option in (f"--{MUNGE[name]}", str(folder / "munge" / name))
    ]
    daemons: list[subprocess.Popen[bytes]] = []

    def start(*command: str) -> None:
        with (folder / "daemons.log").open("ab") as log:
            daemons.append(subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environ))

    def idle() -> bool:
        found = subprocess.run(
            ["sinfo", "-h", "-t", "idle", "-o", "%D"], env=environ, capture_output=True, text=True, check=False, timeout=20
        )
        return found.stdout.strip() == "2"

    try:
        start("munged", "--foreground", "--force", "--key-file", str(key), *munge)
        wait_until((folder / "munge" / "socket").exists, "munged made no socket", folder)
        start("slurmctld", "-D", "-i", "-f", str(conf))
        for node in ("node1", "node2"):
            start("slurmd", "-D", "-N", node, "-f", str(conf))
        wait_until(idle, "Slurm's two nodes did not become idle", folder)
        yield environ
    finally:
        end(daemons, str(folder))


MUNGE = {"socket": "socket", "pid": "pid-file", "log": "log-file", "seed": "seed-file"}


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as held:
        probes = [held.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [probe.getsockname()[1] for probe in probes]


def wait_until(holds: Callable[[], bool], problem: str, folder: Path) -> None:
    """Raises SystemExit with the daemons' last words where it does not hold in time."""
    deadline = time.monotonic() + START_S
    while not holds():
        if time.monotonic() > deadline:
            logs = "\n".join(f"{log}: {log.read_text(errors='replace')[-600:]}" for log in folder.glob("*.log"))
            raise SystemExit(f"{problem}\n{logs}")
        time.sleep(0.1)


def end(daemons: list[subprocess.Popen[bytes]], folder: str) -> None:
    """End the daemons, then the step daemons that they detached: these name the folder in their arguments or environment."""
    for daemon in reversed(daemons):
        daemon.send_signal(signal.SIGTERM)
    for daemon in daemons:
        try:
            daemon.wait(END_S)
        except subprocess.TimeoutExpired:
            daemon.kill()
            daemon.wait()
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            theirs = folder in " ".join(process.cmdline()) or process.environ().get("SLURM_CONF", "").startswith(folder)
            if theirs and process.pid != os.getpid():
                process.kill()


def main() -> None:
    tasks, program, *args = sys.argv[1:]
    program = str(Path(__file__).with_name(program))
    with tempfile.TemporaryDirectory(prefix="slurm-") as folder, cluster(Path(folder)) as environ:
        command = ["srun", f"--ntasks={tasks}", "--nodes=2", "--kill-on-bad-exit=0", sys.executable, program, *args]
        ended = subprocess.run(command, env=environ, check=False)
    sys.exit(ended.returncode)


if __name__ == "__main__":
    main()
