"""A real Slurm of two nodes, a real Ray of several, and tasks whose ends are known."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import psutil
import pytest

from dtprobe.engines import Task

LOOPBACK = "127.0.0.2"
"""Ray takes 127.0.0.1 for any address of this host (ray/_private/services.py, resolve_ip_for_localhost), this one as it stands."""


def lasting(name, seconds, **given):
    """A task that leaves one run folder, after so many seconds."""
    argv = ("watch", "--out", "runs", "--", "sleep", str(seconds))
    return Task(id=name, argv=argv, timeout_s=200, brings="runs", **given)


SPREAD = """
import json, os, sys
from pathlib import Path
from dtprobe.engines import Task, named
tasks = [Task(**{**one, "argv": tuple(one["argv"])}) for one in json.loads(sys.argv[2])]
named(sys.argv[1], os.environ).run(tasks, into=Path(sys.argv[3]), ended=lambda done: print(done.task, done.exit_code, flush=True))
"""


def spread(env, engine, tasks, into):
    """A process of its own that spreads these tasks."""
    told = [sys.executable, "-c", SPREAD, engine, json.dumps([asdict(one) for one in tasks]), str(into)]
    return subprocess.Popen(told, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


class Ends(list):
    """What `ended` was told, in order."""

    def ids(self):
        return sorted(one.task for one in self)

    def of(self, task):
        (one,) = [one for one in self if one.task == task]
        return one


@pytest.fixture
def ends():
    return Ends()


def within(seconds, what, so):
    deadline = time.monotonic() + seconds
    while not (found := so()):
        assert time.monotonic() < deadline, f"within {seconds} s not seen: {what}"
        time.sleep(0.1)
    return found


def held(folder):
    """Processes that work for a spread into this folder, of whichever engine, by their arguments or their own folder."""
    found = []
    for one in psutil.process_iter(["cmdline", "cwd"]):
        said = " ".join([*(one.info["cmdline"] or ()), one.info["cwd"] or ""])
        if str(folder) in said and one.pid != os.getpid() and one.status() != psutil.STATUS_ZOMBIE:
            found.append(one)
    return found


def sleeping(seconds):
    """The `sleep`s that tasks of that length wait for, on whatever node."""
    return [one for one in psutil.process_iter(["cmdline"]) if one.info["cmdline"] == ["sleep", str(seconds)]]


@pytest.fixture
def short():
    """A folder with a short name: paths of sockets are bounded."""
    folder = Path(tempfile.mkdtemp(prefix="dtp"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def slurm(short):
    """A Slurm that gives a node up after ten seconds of silence: the environment for its commands."""
    from dtprobe.launch.slurm import cluster

    with cluster(short / "slurm") as told:
        env = {**os.environ, **told}
        conf = Path(told["SLURM_CONF"])
        conf.write_text(conf.read_text() + "SlurmdTimeout=10\n")
        subprocess.run(["scontrol", "reconfigure"], env=env, check=True, timeout=60)
        yield env


@contextmanager
def ray_cluster(nodes):
    """A cluster on loopback, without telemetry and dashboard, with a head that takes no tasks: it, and its nodes of two processors."""
    from ray.cluster_utils import Cluster

    kept = {key: os.environ.get(key) for key in ("RAY_USAGE_STATS_ENABLED", "RAY_DISABLE_IMPORT_WARNING")}
    os.environ.update(RAY_USAGE_STATS_ENABLED="0", RAY_DISABLE_IMPORT_WARNING="1")
    common = {"node_ip_address": LOOPBACK, "object_store_memory": 80 << 20}
    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 0 if nodes else 2, "include_dashboard": False, **common})
    try:
        yield made, [made.add_node(num_cpus=2, **common) for _ in range(nodes)]
    finally:
        made.shutdown()
        for key, value in kept.items():
            os.environ.pop(key)
            if value is not None:
                os.environ[key] = value


def lose(env, node):
    """A node of Slurm vanishes with all that ran on it: nothing of it says a last word."""
    own = env["SLURM_CONF"]
    theirs = [
        one
        for one in psutil.process_iter(["environ", "cmdline"])
        if (one.info["environ"] or {}).get("SLURM_CONF") == own and (one.info["environ"] or {}).get("SLURMD_NODENAME") == node
    ]
    daemons = slurmd(env, node)
    steps = [parent for one in theirs if (parent := one.parent()) and "slurmstepd" in parent.name()]
    for one in [*daemons, *steps, *theirs]:
        with_signal(one, signal.SIGKILL)


def slurmd(env, node):
    conf = env["SLURM_CONF"]
    return [
        one
        for one in psutil.process_iter(["cmdline"])
        if one.info["cmdline"] and "slurmd" in one.info["cmdline"][0] and {node, conf} <= set(one.info["cmdline"])
    ]


def with_signal(process, signum):
    try:
        process.send_signal(signum)
    except psutil.NoSuchProcess:
        return
