"""A real receiver is told of each regression once, can check who tells it, and cannot hurt the night."""

from __future__ import annotations

import hashlib
import hmac
import json
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from dtprobe.clock import SystemClock
from dtprobe.errors import UsageError
from dtprobe.signals import webhook
from dtprobe.signals.night import Signals

NIGHT = "20261130T020000Z-7"


class Receiver:
    """Answers each POST with the next of `answers` (200 when they are used up): a status, a (status, headers), or a function of the handler."""

    def __init__(self, *answers):
        self.answers = list(answers)
        self.got = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = self.rfile.read(int(self.headers["Content-Length"]))
                outer.got.append((self.path, self.headers, body))
                said = outer.answers.pop(0) if outer.answers else 200
                if callable(said):
                    said(self)
                    return
                status, headers = said if isinstance(said, tuple) else (said, {})
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name, value)
                self.end_headers()

            do_GET = do_POST

            def log_message(self, *_):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_port}/hook/s3cr3t-path"

    def __enter__(self):
        self.thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.05})
        self.thread.start()
        return self

    def __exit__(self, *_):
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()

    def told(self):
        """The scenarios of each message."""
        return [[one["scenario"] for one in json.loads(body)["regressions"]] for _, _, body in self.got]


class Patient(SystemClock):
    """A clock that does not wait, but keeps how long it was to."""

    def __init__(self):
        self.waits = []

    def sleep(self, seconds):
        self.waits.append(seconds)


def announce(out, data, url, **more):
    return webhook.announce(out, data, url=url, night=NIGHT, clock=Patient(), rng=random.Random(1), **more)


def test_a_regression_is_told_once_however_long_it_lasts_and_again_when_it_comes_back(kit, tmp_path):
    bad, good = kit.summary(kit.row("a"), regressions=[kit.regression("a")]), kit.summary(kit.row("a"))
    moved = kit.summary(kit.row("a"), regressions=[kit.regression("a", first_bad_run="a/later", first_bad_ns=2 * 10**18)])
    with Receiver() as receiver:
        assert announce(tmp_path, good, receiver.url) == webhook.Told()
        assert announce(tmp_path, bad, receiver.url) == webhook.Told(delivered=1)
        for again in (bad, moved, bad):
            assert announce(tmp_path, again, receiver.url) == webhook.Told()
        assert receiver.told() == [["a"]]
        both = kit.summary(kit.row("a"), regressions=[kit.regression("a"), kit.regression("b")])
        assert announce(tmp_path, both, receiver.url).delivered == 1
        announce(tmp_path, good, receiver.url)
        announce(tmp_path, bad, receiver.url)
        assert receiver.told() == [["a"], ["b"], ["a"]]


@pytest.mark.parametrize(
    ("more", "messages"),
    [
        ({"after": 20.0}, 2),  # from 9 on to 20
        ({"after": 10.0}, 1),  # a better estimate of the same step
        ({"after": 0.0}, 1),  # back, and past it
        ({"after": 20.0, "first_bad_ns": 1}, 1),  # it began before it was told
        ({"after": "refuted"}, 2),
    ],
)
def test_a_further_step_of_the_same_metric_is_told(kit, tmp_path, more, messages):
    first = kit.summary(regressions=[kit.regression(first_bad_ns=1)])
    second = kit.summary(regressions=[kit.regression(**{"first_bad_ns": 2**62, **more})])
    with Receiver() as receiver:
        announce(tmp_path, first, receiver.url)
        announce(tmp_path, second, receiver.url)
        announce(tmp_path, second, receiver.url)
        assert len(receiver.got) == messages


@pytest.mark.parametrize("status", ["not-run", "unsupported", "failed"])
def test_a_night_that_did_not_run_the_scenario_does_not_forget_it(kit, tmp_path, status):
    bad = kit.summary(kit.row("a"), regressions=[kit.regression("a")])
    with Receiver() as receiver:
        for data in (bad, kit.summary(kit.row("a", status)), bad):
            announce(tmp_path, data, receiver.url)
        assert receiver.told() == [["a"]]


def test_each_receiver_is_told_and_the_file_names_none(kit, tmp_path):
    bad = kit.summary(regressions=[kit.regression()])
    with Receiver() as one, Receiver() as other:
        for receiver in (one, other, one):
            announce(tmp_path, bad, receiver.url)
        assert len(one.got) == len(other.got) == 1
        held = (tmp_path / webhook.STATE).read_text()
        assert "s3cr3t" not in held and "127.0.0.1" not in held


def test_the_message_holds_what_is_documented_and_its_signature_can_be_checked(kit, tmp_path):
    data = kit.summary(kit.row("a"), kit.row("b", "flaky"), regressions=[kit.regression("a")])
    with Receiver(503) as receiver:
        announce(tmp_path, data, receiver.url, secret="between us")
    (path, first, body), (_, second, same) = receiver.got
    assert path == "/hook/s3cr3t-path" and body == same
    assert first["X-Dtprobe-Delivery"] == second["X-Dtprobe-Delivery"]
    signed = hmac.new(b"between us", first["X-Dtprobe-Timestamp"].encode() + b"." + body, hashlib.sha256).hexdigest()
    assert first["X-Dtprobe-Signature"] == f"sha256={signed}"
    assert json.loads(body) == {
        "schema": "dtprobe.webhook/1",
        "event": "regressions",
        "night": NIGHT,
        "host": "node-a",
        "began_ns": data["began_ns"],
        "versions": data["versions"],
        "counts": {"as-expected": 1, "flaky": 1},
        "regressions": data["regressions"],
    }
    with Receiver() as receiver:
        webhook.send(receiver.url, {"any": "thing"})
    assert "X-Dtprobe-Signature" not in receiver.got[0][1]


def test_what_may_pass_is_tried_again_with_waits_that_double(kit, tmp_path):
    clock = Patient()
    with Receiver(500, 429, lambda handler: handler.connection.close(), 503) as receiver:
        assert webhook.send(receiver.url, {}, clock=clock, rng=random.Random(1)) == 5
    assert len(clock.waits) == 4 and all(2**n / 2 <= wait <= 2**n for n, wait in enumerate(clock.waits))


@pytest.mark.parametrize("status", [400, 401, 404, 410, 302])
def test_an_answer_that_is_final_is_not_tried_again(tmp_path, status):
    with Receiver() as elsewhere, Receiver((status, {"Location": elsewhere.url})) as receiver:
        with pytest.raises(webhook.NotDelivered, match=f"it answered {status}") as caught:
            webhook.send(receiver.url, {}, clock=Patient())
        assert len(receiver.got) == 1 and not elsewhere.got, "a redirect would carry the signature elsewhere"
    assert "s3cr3t" not in str(caught.value)


def test_what_was_not_delivered_is_said_and_told_by_the_next_night(kit, tmp_path):
    bad = kit.summary(regressions=[kit.regression()])
    with Receiver(*[500] * webhook.ATTEMPTS) as receiver:
        said = announce(tmp_path, bad, receiver.url)
        assert said.delivered == 0 and "5 attempt(s): it answered 500; the next night" in said.problem
        assert announce(tmp_path, bad, receiver.url) == webhook.Told(delivered=1)
    said = announce(tmp_path, kit.summary(regressions=[kit.regression("b")]), receiver.url)
    assert "refused" in said.problem


def test_a_receiver_that_trickles_or_is_silent_does_not_hold_the_night(tmp_path, monkeypatch):
    monkeypatch.setattr(webhook, "TIMEOUT_S", 0.4)
    monkeypatch.setattr(webhook, "DEADLINE_S", 1.5)
    over = threading.Event()

    def trickles(handler):
        handler.wfile.write(b"HTTP/1.1 200 OK\r\nX-Long: ")
        while not over.wait(0.1):
            try:
                handler.wfile.write(b"x")
            except OSError:
                return

    with Receiver(trickles) as receiver:
        with pytest.raises(webhook.NotDelivered, match=r"no answer in 1\.5 s"):
            webhook.send(receiver.url, {})
        over.set()
    silent = threading.Event()
    with Receiver(lambda _: silent.wait(30)) as receiver:
        assert webhook.send(receiver.url, {}, clock=Patient()) == 2, "the second attempt was answered"
        silent.set()


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"schema": "dtprobe.webhook-state/1", "told": {"x": {"y": 1}}}', "\x00"])
def test_a_damaged_memory_is_put_aside_and_said_and_the_regression_is_told(kit, tmp_path, text):
    (tmp_path / webhook.STATE).write_text(text)
    bad = kit.summary(regressions=[kit.regression()])
    with Receiver() as receiver:
        said = announce(tmp_path, bad, receiver.url)
        assert said.delivered == 1 and "was damaged and is now webhook.broken.json" in said.problem
        assert (tmp_path / "webhook.broken.json").read_text() == text
        assert announce(tmp_path, bad, receiver.url) == webhook.Told()


def test_two_nights_that_end_at_once_tell_it_once(kit, tmp_path):
    bad = kit.summary(regressions=[kit.regression()])
    with Receiver() as receiver, ThreadPoolExecutor(4) as pool:
        said = list(pool.map(lambda _: announce(tmp_path, bad, receiver.url), range(4)))
        assert sum(one.delivered for one in said) == len(receiver.got) == 1


@pytest.mark.parametrize(
    "url", ["", "example.org", "ftp://example.org", "http://", "http://a:port/", "http://a b/", "file:///etc/passwd"]
)
def test_an_address_that_cannot_be_is_said_before_the_night(url):
    with pytest.raises(UsageError, match="--webhook"):
        Signals(webhook=url).check()


def test_a_night_says_what_became_of_its_signals_and_raises_nothing(kit, tmp_path):
    night = tmp_path / "suites" / NIGHT
    night.mkdir(parents=True)
    bad = kit.summary(regressions=[kit.regression()])
    with Receiver() as receiver:
        signals = Signals(file=tmp_path / "dtprobe.prom", webhook=receiver.url)
        signals.check()
        assert signals.after(bad, night, out=tmp_path) == [
            f"webhook: 1 new regression(s) told to http://127.0.0.1:{receiver.server.server_port}"
        ]
    assert f'night="{NIGHT}"' in (tmp_path / "dtprobe.prom").read_text()
    lost = Signals(file=tmp_path / "gone" / "dtprobe.prom", webhook=receiver.url)
    said = lost.after(kit.summary(regressions=[kit.regression("b")]), night, out=tmp_path, clock=Patient())
    assert said[0].startswith("metrics were not written") and "the next night tries again" in said[1]
