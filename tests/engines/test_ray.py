"""Tasks on a real Ray cluster: each exactly once, whatever becomes of its nodes or of us."""

from __future__ import annotations

import os
import signal
import tarfile
import threading

import pytest

from dtprobe.engines import Task, named, ray_node
from dtprobe.errors import UsageError

from .conftest import held, lasting, ray_cluster, sleeping, spread, within

pytestmark = pytest.mark.needs("ray")


def at(cluster):
    return f"ray:address={cluster.address}"


def test_each_task_ends_once_and_brings_its_artifacts_through_the_object_store(tmp_path, ends):
    tasks = [
        Task(id="wrong", argv=("run", "no-such", "--out", "runs"), timeout_s=60, brings="runs"),
        Task(id="leaves:it", argv=("watch", "--out", "runs", "--", "true"), timeout_s=60, brings="runs", alone=True),
        Task(id="late", argv=("watch", "--", "sleep", "160"), timeout_s=0),
    ]
    with ray_cluster(0) as (cluster, _):
        named(at(cluster), os.environ).run(tasks, into=tmp_path, ended=ends.append)
        with pytest.raises(UsageError, match="a task takes 64 processors, the largest node has 2"):
            named(f"{at(cluster)},cpus=64", os.environ).run(tasks, into=tmp_path, ended=ends.append)
    assert ends.ids() == ["late", "leaves:it", "wrong"]
    assert (ends.of("wrong").exit_code, ends.of("leaves:it").exit_code) == (2, 0)
    assert ends.of("late").problem == "it ran past its 0 s" and ends.of("wrong").versions["dtprobe"]
    assert [one.name for one in tmp_path.iterdir()] == ["leaves:it"] and list(tmp_path.glob("leaves:it/watch/*/run.json"))


@pytest.mark.nightly
def test_a_node_that_dies_loses_and_doubles_nothing(tmp_path, ends):
    tasks = [lasting(f"t{k}", 12, alone=k == 0) for k in range(5)]
    with ray_cluster(3) as (cluster, nodes):

        def kill():
            within(90, "tasks at work", lambda: len(sleeping(12)) >= 3)
            cluster.remove_node(nodes[0], allow_graceful=False)

        killer = threading.Thread(target=kill)
        killer.start()
        named(at(cluster), os.environ).run(tasks, into=tmp_path, ended=ends.append)
        killer.join()
        within(60, "nothing left", lambda: not sleeping(12))
    assert ends.ids() == [f"t{k}" for k in range(5)] and all(one.exit_code == 0 for one in ends), ends
    assert any(one.attempts == 2 for one in ends)
    for task in tasks:
        assert len(list(tmp_path.glob(f"{task.id}/watch/*/run.json"))) == 1


@pytest.mark.nightly
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_the_end_of_ours_ends_what_runs_on_all_nodes(tmp_path, signum):
    with ray_cluster(2) as (cluster, _):
        ours = spread(os.environ, at(cluster), [lasting(f"t{k}", 153, alone=k == 0) for k in range(4)], tmp_path)
        within(90, "tasks at work", lambda: len(sleeping(153)) >= 2)
        ours.send_signal(signum)
        said, _ = ours.communicate(timeout=90)
        assert ours.returncode != 0 and not said
        within(60, "nothing left", lambda: not sleeping(153) and not held(tmp_path))
    assert signum == signal.SIGKILL or not list(tmp_path.iterdir())


def test_an_archive_is_bounded_and_lands_nowhere_else(tmp_path, monkeypatch):
    (tmp_path / "left" / "deep").mkdir(parents=True)
    (tmp_path / "left" / "deep" / "file").write_bytes(os.urandom(5000))
    packed = ray_node.pack(tmp_path / "left", tmp_path / "archive")
    ray_node.unpack(packed, tmp_path / "back")
    assert (tmp_path / "back" / "deep" / "file").read_bytes() == (tmp_path / "left" / "deep" / "file").read_bytes()
    (tmp_path / "left" / "out").symlink_to("/etc")
    with pytest.raises(tarfile.TarError):
        ray_node.unpack(ray_node.pack(tmp_path / "left", tmp_path / "archive"), tmp_path / "again")
    monkeypatch.setattr(ray_node, "LIMIT_BYTES", 4000)
    assert ray_node.pack(tmp_path / "left", tmp_path / "archive") is None
