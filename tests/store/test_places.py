"""A history at a URL: on a real S3 server, in memory, and on a file system that has a rename and no atomic PUT."""

from __future__ import annotations

import multiprocessing
import os
import socket
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from dtprobe.errors import DtprobeError, UsageError
from dtprobe.store import ELSEWHERE, History, Store, history
from dtprobe.store.places import Folder, Remote, place
from dtprobe.store.rows import table_of

START = 1_750_000_000_000_000_000
S3 = {
    "AWS_ACCESS_KEY_ID": "key",
    "AWS_SECRET_ACCESS_KEY": "secret",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
}


@pytest.fixture(scope="module")
def s3() -> Iterator[str]:
    """A bucket of a real S3 server (moto) on loopback; the environment names it as it would name any other."""
    import boto3
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    address = f"http://127.0.0.1:{server.get_host_and_port()[1]}"
    with pytest.MonkeyPatch.context() as patch:
        for name, value in S3.items():
            patch.setenv(name, value)
        patch.setenv("AWS_ENDPOINT_URL", address)
        boto3.client("s3").create_bucket(Bucket="nights")
        try:
            yield "s3://nights"
        finally:
            import s3fs

            s3fs.S3FileSystem.clear_instance_cache()
            server.stop()


@pytest.fixture(params=["s3", "memory", "renaming"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    name = uuid.uuid4().hex
    if request.param == "s3":
        return f"{request.getfixturevalue('s3')}/{name}"
    return f"memory://{name}" if request.param == "memory" else f"dir::file://{tmp_path}/{name}"


def rows(run: str, value: float = 1.0, **more: Any) -> list[dict[str, Any]]:
    common = {
        "run": run,
        "scenario": "leak",
        "variant": "",
        "started_ns": START,
        "torch": "2.13.0",
        "host": "h",
        "verdict": "partly",
    }
    return [{**common, "metric": "threads", "arm": arm, "value": value, **more} for arm in ("control", "fault")]


def test_what_is_appended_is_read_and_folded_as_in_a_folder(url: str) -> None:
    made = History(url, fold_at=4)
    assert made.read().frame().empty
    for number in range(3):
        made.append(rows(f"run-{number}", number))
        made.fold_if_due(lambda: START)
    assert len(made.files()) == 3
    before = history(url).frame()
    made.append(rows("run-0", 0.0))
    pd.testing.assert_frame_equal(history(url).frame(), before)
    made.append(rows("run-3", 3.0))
    made.fold_if_due(lambda: START)
    assert [name.startswith("block-") for name in made.files()] == [True]
    assert history(url).overview()["runs"].tolist() == [4]


def test_a_broken_object_is_named_by_its_url_and_the_rest_is_read(url: str) -> None:
    made = History(url)
    made.append(rows("run-0"))
    remote = place(url)
    assert isinstance(remote, Remote)
    remote._system.pipe_file(f"{remote._root}/run-1.parquet", b"PAR1 cut")
    reading = made.read()
    assert len(reading.frame()) == 2
    assert [broken.path for broken in reading.broken] == [f"{remote.where}/run-1.parquet"]
    made.append(rows("run-2"))
    made.fold(lambda: START)
    assert len(made.files()) == 2, "what is broken stays"


def _write(url: str, name: str, count: int, environ: dict[str, str]) -> None:
    os.environ.update(environ)
    made = History(url, fold_at=5)
    for number in range(count):
        made.append(rows(f"{name}-{number}", number))
        made.fold_if_due(lambda: START)


def test_writers_that_fold_without_a_lock_lose_nothing_and_a_reader_sees_no_gap(s3: str) -> None:
    url = f"{s3}/{uuid.uuid4().hex}"
    environ = {name: os.environ[name] for name in (*S3, "AWS_ENDPOINT_URL")}
    spawn = multiprocessing.get_context("spawn")
    writers = [spawn.Process(target=_write, args=(url, name, 20, environ)) for name in ("a", "b")]
    for writer in writers:
        writer.start()
    seen = [0]
    try:
        while any(writer.is_alive() for writer in writers):
            reading = history(url)
            assert reading.broken == ()
            counts = reading.sql("SELECT count(*) AS n FROM history GROUP BY run")["n"]
            assert set(counts) <= {2}, "a run is seen whole or not at all, and once"
            seen.append(len(counts))
    finally:
        for writer in writers:
            writer.join(60)
    assert [writer.exitcode for writer in writers] == [0, 0]
    assert seen == sorted(seen), "what was there once stays"
    assert len(history(url).sql("SELECT DISTINCT run FROM history")) == 40


class Unlocked(Folder):
    """A folder as an object store is: nobody waits for anybody. `then` happens between the reading of files and the writing of their block."""

    def __init__(self, path: Path, then: Callable[[], object]) -> None:
        super().__init__(path)
        self._then = then

    @contextmanager
    def alone(self) -> Iterator[bool]:
        yield True

    def write(self, name: str, table: Any) -> None:
        if name.startswith("block-"):
            self._then()
        super().write(name, table)


def unlocked(path: Path, then: Callable[[], object]) -> History:
    made = History(path)
    made._place = Unlocked(path, then)
    return made


@pytest.mark.parametrize("meanwhile", ["append", "the same again", "fuller", "fold", "fold and append"])
def test_what_another_writer_does_while_a_block_is_made_is_kept(tmp_path: Path, meanwhile: str) -> None:
    other = unlocked(tmp_path, lambda: None)
    for number in range(3):
        other.append(rows(f"run-{number}"))

    def then() -> None:
        if "fold" in meanwhile:
            other.fold(lambda: START)
        if "append" in meanwhile:
            other.append(rows("run-3"))
        if meanwhile == "the same again":
            other.append(rows("run-1"))
        if meanwhile == "fuller":
            other.append(rows("run-1", night="a-night"))

    unlocked(tmp_path, then).fold(lambda: START)
    frame = other.read().frame()
    assert sorted(set(frame["run"])) == [f"run-{number}" for number in range(4 if "append" in meanwhile else 3)]
    assert len(frame) == 2 * frame["run"].nunique()
    assert frame.loc[frame["run"].eq("run-1"), "night"].notna().all() == (meanwhile == "fuller")


def test_rows_that_are_known_are_not_added_again_and_the_fullest_count(url: str) -> None:
    made = History(url)
    made.append(rows("run-0"))
    both = table_of([*rows("run-0"), *rows("run-1")])
    assert made.add(both) == ["run-1"]
    assert made.add(both) == []
    files = made.files()
    assert made.add(table_of(rows("run-0", night="a-night"))) == ["run-0"]
    assert made.add(both) == [], "poorer rows than it has"
    assert len(made.files()) == len(files) + 1
    assert set(history(url).sql("SELECT night FROM history WHERE run = 'run-0'")["night"]) == {"a-night"}


def test_a_folder_of_runs_keeps_its_history_at_the_url_it_was_given_once(tmp_path: Path, url: str) -> None:
    before = Store.open(tmp_path / "runs", need_bytes=0)
    before.history.append(rows("run-0"))
    Store.open(tmp_path / "runs", history=url, need_bytes=0)
    Store(tmp_path / "runs").history.append(rows("run-1"))
    assert sorted(set(history(tmp_path / "runs").frame()["run"])) == ["run-0", "run-1"]
    assert sorted(set(history(url).frame()["run"])) == ["run-0", "run-1"]
    assert len(list((tmp_path / "runs" / "history").glob("*.parquet"))) == 1, "nothing more is written there"


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("gopher://x/y", "gopher"),
        ("runs/elsewhere", "is no URL"),
        ("s3://user:secret@/", "history"),
    ],
)
def test_a_url_that_is_none_is_refused_in_one_line(tmp_path: Path, url: str, says: str) -> None:
    with pytest.raises((UsageError, DtprobeError)) as refused:
        Store.open(tmp_path, history=url, need_bytes=0)
    assert says in str(refused.value) and "\n" not in str(refused.value) and "secret" not in str(refused.value)
    assert not (tmp_path / ELSEWHERE).exists()


def test_a_pointer_that_says_nothing_is_told(tmp_path: Path) -> None:
    (tmp_path / ELSEWHERE).write_text("")
    with pytest.raises(UsageError, match="is no URL"):
        history(tmp_path)


def test_an_address_that_does_not_answer_is_one_line_and_the_run_says_it_is_not_entered(
    tmp_path: Path, s3: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import s3fs

    url = f"{s3}/{uuid.uuid4().hex}"
    store = Store.open(tmp_path, history=url, need_bytes=0)
    run = store.create("leak", "", {}, started_ns=START)
    run.write_verdict({"verdict": "partly", "as_expected": True})
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{unused.getsockname()[1]}")
        monkeypatch.setattr(s3fs.S3FileSystem, "retries", 1)
        s3fs.S3FileSystem.clear_instance_cache()
        with pytest.raises(DtprobeError) as refused:
            Store(tmp_path).finish(run, now_ns=lambda: START + 1)
    assert url in str(refused.value) and "history merge" in str(refused.value) and "\n" not in str(refused.value)
    assert run.state == "unfinished"


def test_a_bucket_that_is_not_there_is_told_and_no_empty_history(s3: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import s3fs

    monkeypatch.setattr(s3fs.S3FileSystem, "retries", 1)
    absent = History(s3.replace("nights", "absent-bucket"))
    with pytest.raises(DtprobeError, match="absent-bucket cannot be written"):
        absent.append(rows("run-0"))
    with pytest.raises(DtprobeError, match="absent-bucket cannot be listed"):
        absent.read()
