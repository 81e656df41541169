"""Whether the hosts of the job can be reached by ssh without a password, where the launcher starts its processes through it."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from dtprobe.doctor.cluster.verdict import Problem
from dtprobe.framework.bootstrap import Placement

_AT_ONCE = 16
_MOST = 64
_OTHER_MANAGERS = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "PE_HOSTFILE")
_AGENTS = ("OMPI_MCA_plm_rsh_agent", "PRTE_MCA_plm_ssh_agent", "PRTE_MCA_plm_rsh_agent")
_PLM = ("OMPI_MCA_plm", "PRTE_MCA_plm")


def needed(placement: Placement, hosts: Sequence[str], environ: Mapping[str, str]) -> str:
    """Why this job's launcher needs ssh; empty where it does not.

    Open MPI starts its daemons by ssh unless a resource manager does or another way is chosen (its FAQ, "rsh/ssh"); DeepSpeed's
    runner starts every host of its hostfile by pdsh over ssh and marks its ranks with CROSS_SIZE (deepspeed/launcher/launch.py).
    """
    if len(hosts) < 2:
        return ""
    managed = [name for name in _OTHER_MANAGERS if environ.get(name)]
    plm = next((environ[name] for name in _PLM if environ.get(name)), "")
    if placement.source == "mpirun" and not managed and (not plm or "rsh" in plm or "ssh" in plm):
        return "mpirun starts its daemons through ssh"
    if placement.source == "explicit" and environ.get("CROSS_SIZE", "1") != "1":
        return "deepspeed starts its hosts through ssh"
    return ""


def check(
    hosts: Mapping[str, Sequence[int]], placement: Placement, environ: Mapping[str, str], *, limit_s: float
) -> list[Problem]:
    """Try each other host of the job once, from this rank's; at most `limit_s` seconds each, several at a time."""
    why = needed(placement, list(hosts), environ)
    if not why:
        return []
    agent = next((environ[name] for name in _AGENTS if environ.get(name)), "ssh").split(maxsplit=1)[0].split(":")[0]
    own = next((host for host, members in hosts.items() if placement.rank in members), "")
    others = [host for host in hosts if host != own][:_MOST]
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        complaints = dict(zip(others, pool.map(lambda host: complaint(agent, host, environ, limit_s), others), strict=True))
    return [
        Problem(
            check="ssh",
            severity="warning",
            ranks=tuple(hosts[host]),
            hosts=(host,),
            found=f"{agent} from {own} to {host} without a password fails: {said}",
            wanted=why,
            remedy=f"ssh-copy-id {host} as this user, and ssh {host} once to accept its key",
        )
        for host, said in complaints.items()
        if said
    ]


def complaint(agent: str, host: str, environ: Mapping[str, str], limit_s: float) -> str:
    """What ssh said when it could not run `true` on the host; empty where it could."""
    options = ("-o", "BatchMode=yes", "-o", f"ConnectTimeout={max(1, int(limit_s))}", "-o", "NumberOfPasswordPrompts=0")
    try:
        done = subprocess.run(
            (agent, *options, "--", host, "true"),
            env=dict(environ),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=limit_s + 1,
            check=False,
        )
    except OSError as error:
        return f"{agent}: {error.strerror}"
    except subprocess.TimeoutExpired:
        return f"no answer within {limit_s + 1:g} s"
    if done.returncode == 0:
        return ""
    lines = done.stderr.decode(errors="replace").strip().splitlines()
    return lines[-1][:200] if lines else f"exit {done.returncode}"
