"""The server as a process: what it answers, and what it refuses."""

from __future__ import annotations

import http.client
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from types import ModuleType
from urllib.parse import urlencode, urlsplit

import pytest

from dtprobe.errors import UsageError
from dtprobe.serve import listen
from dtprobe.serve.access import Access
from dtprobe.store import Store

TOKEN = "not-to-be-guessed-by-anyone"
Serve = Callable[..., AbstractContextManager[tuple[str, subprocess.Popen[str]]]]


def ask(
    address: str, path: str, *, method: str = "GET", headers: dict[str, str] | None = None, body: str | None = None
) -> tuple[int, dict[str, str], str]:
    """One request with the path exactly as it is given: no client of ours tidies it."""
    parts = urlsplit(address)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=20)
    try:
        connection.request(method, path, body=body, headers=headers or {})
        answer = connection.getresponse()
        return answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read().decode()
    finally:
        connection.close()


def ends(*options: str) -> tuple[int, str]:
    """A server that does not start: its exit code and what it said."""
    done = subprocess.run(
        [sys.executable, "-m", "dtprobe", "serve", *options], capture_output=True, text=True, timeout=60, check=False
    )
    return done.returncode, done.stderr


def one_run(runs: Path, scenario: str) -> Path:
    return max(path for path in (runs / scenario).iterdir() if (path / "report.html").is_file())


def test_every_page_of_the_site_is_served_with_a_strict_policy(server: str, made: ModuleType) -> None:
    for path in ("/", "/nights.html", "/regressions.html", "/claims.html", "/confusion.html", f"/scenarios/{made.GOOD}.html"):
        status, headers, text = ask(server, path)
        assert (status, headers["content-type"]) == (200, "text/html; charset=utf-8"), path
        policy = headers["content-security-policy"]
        assert "default-src 'none'" in policy and "unsafe" not in policy and "frame-ancestors 'none'" in policy
        assert headers["x-content-type-options"] == "nosniff" and headers["cache-control"] == "no-store"
        assert "server" not in headers
        assert "<script>document" not in text


def test_a_report_and_its_raw_files_are_served_but_never_as_pages_of_ours(server: str, runs: Path, made: ModuleType) -> None:
    run = one_run(runs, made.GOOD)
    status, headers, text = ask(server, f"/runs/{made.GOOD}/{run.name}/report.html")
    assert status == 200 and "script-src" not in headers["content-security-policy"]
    assert 'href="./fault/0/rank0/stderr.log"' in text and "All runs of rank-stopped" in text
    status, headers, text = ask(server, f"/runs/{made.GOOD}/{run.name}/fault/0/rank0/stderr.log")
    assert (status, text) == (200, "<b>raw</b>\n")
    assert headers["content-type"].startswith("text/plain") and "sandbox" in headers["content-security-policy"]


@pytest.mark.parametrize(
    "inner",
    [
        "../../../outside.txt",
        "..%2f..%2f..%2foutside.txt",
        "%2e%2e/%2e%2e/%2e%2e/outside.txt",
        "..\\..\\..\\outside.txt",
        "/../../../outside.txt",
        "link.txt",
        "folder-link/outside.txt",
        "fault",
        "",
        "pipe",
        "a%00b",
    ],
)
def test_nothing_outside_a_run_folder_can_be_read(server: str, runs: Path, made: ModuleType, inner: str) -> None:
    (runs.parent / "outside.txt").write_text("secret")
    run = one_run(runs, made.GOOD)
    if not (run / "pipe").exists():
        (run / "link.txt").symlink_to(runs.parent / "outside.txt")
        (run / "folder-link").symlink_to(runs.parent)
        os.mkfifo(run / "pipe")
    status, _, text = ask(server, f"/runs/{made.GOOD}/{run.name}/{inner}")
    assert status == 404 and "secret" not in text


def test_other_folders_of_runs_are_no_runs(server: str, runs: Path, made: ModuleType) -> None:
    run = one_run(runs, made.GOOD).name
    for path in (
        f"/runs/history/{run}/x",
        f"/runs/../{run}/x",
        f"/runs/{made.HOSTILE}/{run}/report.html",
        "/runs/",
        "/../../etc/passwd",
    ):
        assert ask(server, path)[0] == 404, path


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
def test_nothing_can_be_changed(server: str, method: str) -> None:
    assert ask(server, "/", method=method)[0] == 405
    assert ask(server, "/", method="HEAD")[::2] == (200, "")


def test_another_hosts_name_for_loopback_is_refused(server: str) -> None:
    port = urlsplit(server).port
    assert ask(server, "/", headers={"Host": f"evil.example:{port}"})[0] == 421
    for name in (f"localhost:{port}", "127.0.0.1", f"[::1]:{port}"):
        assert ask(server, "/", headers={"Host": name})[0] == 200, name


def test_beyond_loopback_it_does_not_start_without_a_token(runs: Path) -> None:
    code, said = ends("--out", str(runs), "--host", "0.0.0.0", "--port", "0")
    assert code == 2 and said.count("\n") == 1
    assert "can be reached by others, and no token is set" in said


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.0.1", "example.org", "127.0.0.1.example.org", ""])
def test_only_loopback_goes_without_a_token(host: str) -> None:
    with pytest.raises(UsageError, match="no token is set"):
        Access(host, None)
    with pytest.raises(UsageError, match="can be guessed"):
        Access(host, "short")
    assert Access(host, TOKEN).needs_token
    for own in ("127.0.0.1", "127.8.8.8", "::1", "localhost"):
        assert not Access(own, None).needs_token


def test_a_port_in_use_and_a_strange_address_are_one_line_each(runs: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, said = ends("--out", str(runs), "--port", str(port))
        assert code == 2 and said.count("\n") == 1
        assert f"port {port}: Address already in use; name a free port" in said
    with pytest.raises(UsageError, match=r"192\.0\.2\.1.*name an address of this host"):
        listen("192.0.2.1", 0)


def test_with_a_token_nothing_is_shown_without_it_and_it_is_never_printed(serve: Serve, runs: Path, made: ModuleType) -> None:
    run = one_run(runs, made.GOOD)
    with serve(runs, "--host", "0.0.0.0", "--token", TOKEN) as (printed, process):
        address = f"http://127.0.0.1:{urlsplit(printed).port}/"
        for path in ("/", f"/scenarios/{made.GOOD}.html", f"/runs/{made.GOOD}/{run.name}/report.html", f"/?token={TOKEN}"):
            status, headers, text = ask(address, path)
            assert status == 401 and made.GOOD not in text and "Token" in text
            assert headers["www-authenticate"].startswith("Bearer")
        assert ask(address, "/", method="POST")[0] == 401
        assert ask(address, "/", headers={"Authorization": f"Bearer {TOKEN}x"})[0] == 401
        assert ask(address, "/", headers={"Authorization": f"Bearer {TOKEN}"})[0] == 200
        form = {"Content-Type": "application/x-www-form-urlencoded"}
        status, headers, text = ask(address, "/login", method="POST", headers=form, body=urlencode({"token": "wrong"}))
        assert status == 401 and "set-cookie" not in headers and "not the token" in text
        assert ask(address, "/login", method="POST", headers=form, body="token=" + "x" * 10_000)[0] == 413
        status, headers, _ = ask(address, "/login", method="POST", headers=form, body=urlencode({"token": TOKEN}))
        cookie = headers["set-cookie"]
        assert status == 303 and TOKEN not in cookie and "HttpOnly" in cookie and "SameSite=Strict" in cookie
        value = cookie.partition(";")[0]
        assert ask(address, "/", headers={"Cookie": value})[0] == 200
        assert ask(address, "/", headers={"Cookie": value[:-1]})[0] == 401
        process.send_signal(signal.SIGINT)
        said = "".join(process.communicate(timeout=20))
        assert process.returncode == 0 and TOKEN not in said and "unencrypted" in said


def test_a_run_that_ends_meanwhile_is_on_the_next_page(serve: Serve, tmp_path: Path, made: ModuleType) -> None:
    store = Store.open(tmp_path / "runs")
    made.run(store, made.GOOD, 0, torch="2.13.0")
    with serve(tmp_path / "runs") as (address, _):
        assert made.HOSTILE not in ask(address, "/")[2]
        made.run(store, made.HOSTILE, 1, torch="2.14.0")
        text = ask(address, "/")[2]
        assert f"scenarios/{made.HOSTILE}.html" in text and "torch 2.14.0" in text


def test_two_runs_side_by_side(server: str, runs: Path, made: ModuleType) -> None:
    first, *_, last = sorted(path.name for path in (runs / made.HOSTILE).iterdir())
    status, _, text = ask(server, f"/compare.html?{urlencode({'a': first, 'b': last})}")
    assert status == 200
    assert "apart: intervals do not meet" in text and "torch" in text and "worker.py --night 0" in text
    status, _, text = ask(server, f"/compare.html?{urlencode({'a': first, 'b': first})}")
    assert "intervals do not meet" not in text and "differs" not in text.partition("<main")[2].replace('class="differs', "")
    status, _, text = ask(server, f"/compare.html?{urlencode({'a': first, 'b': made.EVIL})}")
    assert status == 404 and "&lt;script&gt;" in text and "<script>document" not in text


def test_the_comparison_goes_without_a_folder_that_vanished(server: str, made: ModuleType, runs: Path) -> None:
    from dtprobe.store import history

    gone = history(runs).sql("SELECT run FROM history WHERE scenario = ? ORDER BY started_ns LIMIT 1", (made.GOOD,))["run"][0]
    status, _, text = ask(server, f"/compare.html?{urlencode({'a': gone, 'b': one_run(runs, made.GOOD).name})}")
    assert status == 200 and f"{gone}: its run.json cannot be read" in text and "time to error" in text


def test_an_unfinished_run_is_said_and_its_files_can_be_read(server: str, made: ModuleType) -> None:
    text = ask(server, f"/scenarios/{made.GOOD}.html")[2]
    assert "unfinished: it was killed, or runs on another host" in text and "folder gone" in text
    assert ask(server, "/no-such-page.html")[0] == 404
    assert ask(server, "/scenarios/none.html")[0] == 404


def test_a_run_folder_in_a_form_of_its_own_breaks_no_other_page(serve: Serve, tmp_path: Path, made: ModuleType) -> None:
    store = Store.open(tmp_path / "runs")
    first, last = (made.run(store, made.GOOD, night, torch="2.13.0") for night in (0, 1))
    record = tmp_path / "runs" / made.GOOD / first / "run.json"
    record.write_text('{"versions": [1], "arms": "none", "machine": 7}')
    with serve(tmp_path / "runs") as (address, process):
        status, _, text = ask(address, f"/compare.html?a={first}&b={last}")
        assert status == 500 and text.count("\n") == 1 and "could not be made" in text
        assert ask(address, "/")[0] == 200
        process.send_signal(signal.SIGINT)
        assert "Traceback" not in process.communicate(timeout=20)[1]
