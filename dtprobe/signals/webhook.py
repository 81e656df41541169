"""A webhook that tells of each new regression once.

One POST a night with what is new, as `dtprobe.webhook/1`:

    {"schema": "dtprobe.webhook/1", "event": "regressions", "night": str, "host": str, "began_ns": int, "versions": {name: version},
     "counts": {status: int}, "regressions": [as in summary.json]}

Headers: `X-Dtprobe-Delivery` (the same for each attempt at one message: a receiver can drop what it knows), `X-Dtprobe-Timestamp` (Unix
seconds), and with a secret `X-Dtprobe-Signature: sha256=<hex>`, the HMAC of `<timestamp>.<body>`. Any 2xx answer is a receipt. No
connection, a time-out, 408, 425, 429 and 5xx are tried again, with a wait that doubles; other answers are not, and no redirect is followed.
"""

from __future__ import annotations

import fcntl
import hashlib
import hmac
import http.client
import json
import random
import threading
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from dtprobe.clock import Clock, SystemClock
from dtprobe.errors import DtprobeError, UsageError
from dtprobe.store.files import plain, read_json, write_json

SCHEMA = "dtprobe.webhook/1"
STATE_SCHEMA = "dtprobe.webhook-state/1"
SECRET = "DTPROBE_WEBHOOK_SECRET"
"""The environment variable with the secret of the signature."""
STATE = "webhook.json"
"""Below `--out`, beside the history: what was told to whom. Addresses are kept as digests, since they may hold a token."""
ATTEMPTS = 5
TIMEOUT_S = 10.0
"""Of one attempt."""
DEADLINE_S = 90.0
"""Of all attempts together, also against a receiver that answers a byte at a time."""
FIRST_WAIT_S = 1.0
_AGAIN = frozenset({408, 425, 429})
_RAN = frozenset({"as-expected", "not-as-expected", "flaky", "broken"})


class NotDelivered(DtprobeError):
    """The receiver did not take the message."""


@dataclass(frozen=True, kw_only=True)
class Told:
    """What became of an announcement: how many regressions were new and delivered, and why others were not."""

    delivered: int = 0
    problem: str = ""


def check(url: str) -> None:
    """Raises UsageError for an address that no message could be sent to."""
    try:
        parts = urlsplit(url)
        well = (
            parts.scheme in ("http", "https")
            and bool(parts.hostname)
            and parts.port != 0
            and url.isascii()
            and url.isprintable()
        )
        well = well and " " not in url
    except ValueError:
        well = False
    if not well:
        raise UsageError("--webhook: not an address of http or https", "give one like https://example.org/hook")


def shown(url: str) -> str:
    """The address without its path, query and user, which may be secrets."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.hostname}" + (f":{parts.port}" if parts.port else "")


def signature(secret: str, timestamp: str, body: bytes) -> str:
    """The value of X-Dtprobe-Signature; a receiver computes the same and compares in constant time."""
    return "sha256=" + hmac.new(secret.encode(), timestamp.encode() + b"." + body, hashlib.sha256).hexdigest()


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: Any, **__: Any) -> None:
        return None


def send(
    url: str, payload: Mapping[str, Any], *, secret: str = "", clock: Clock | None = None, rng: random.Random | None = None
) -> int:
    """POST the payload, and say how many attempts it took. Raises NotDelivered after the last one, or at an answer that is final."""
    check(url)
    body = json.dumps(plain(payload), allow_nan=False, separators=(",", ":")).encode()
    attempt = _Attempts(url, body, secret, clock or SystemClock(), rng or random.Random())
    # A socket's timeout is that of one read: only another thread can bound a receiver that trickles.
    thread = threading.Thread(target=attempt.run, name="dtprobe-webhook", daemon=True)
    thread.start()
    thread.join(DEADLINE_S)
    if not attempt.delivered:
        raise NotDelivered(
            f"{shown(url)} did not take the message after {attempt.tried} attempt(s): "
            + (attempt.problem or f"no answer in {DEADLINE_S:g} s")
        )
    return attempt.tried


class _Attempts:
    """Attempts at one message, until one is answered, or the answer is final, or none is left."""

    def __init__(self, url: str, body: bytes, secret: str, clock: Clock, rng: random.Random) -> None:
        self._url, self._body, self._secret, self._clock, self._rng = url, body, secret, clock, rng
        self._opener = urllib.request.build_opener(_NoRedirect)
        self.tried = 0
        self.problem = ""
        self.delivered = False

    def run(self) -> None:
        deadline, wait_s = self._clock.monotonic() + DEADLINE_S, FIRST_WAIT_S
        while True:
            self.tried += 1
            if not self._once() or self.tried == ATTEMPTS or self._clock.monotonic() + wait_s > deadline:
                return
            self._clock.sleep(wait_s * self._rng.uniform(0.5, 1.0))
            wait_s *= 2

    def _once(self) -> bool:
        """Whether it is worth another attempt."""
        try:
            with self._opener.open(self._request(), timeout=TIMEOUT_S) as answer:
                self.delivered = 200 <= answer.status < 300
                self.problem = f"it answered {answer.status}"
                return False
        except urllib.error.HTTPError as error:
            error.close()
            self.problem = f"it answered {error.code}"
            return error.code >= 500 or error.code in _AGAIN
        except (OSError, http.client.HTTPException, ValueError) as error:
            self.problem = str(getattr(error, "reason", "") or error) or type(error).__name__
            return not isinstance(error, ValueError)

    def _request(self) -> urllib.request.Request:
        timestamp = str(self._clock.now_ns() // 10**9)
        headers = {
            "Content-Type": "application/json",
            "User-Agent": "dtprobe",
            "X-Dtprobe-Delivery": hashlib.sha256(self._body).hexdigest()[:32],
            "X-Dtprobe-Timestamp": timestamp,
        }
        if self._secret:
            headers["X-Dtprobe-Signature"] = signature(self._secret, timestamp, self._body)
        return urllib.request.Request(self._url, self._body, headers, method="POST")


def message(data: Mapping[str, Any], new: Sequence[Mapping[str, Any]], night: str) -> dict[str, Any]:
    """The payload: see the module."""
    return {
        "schema": SCHEMA,
        "event": "regressions",
        "night": night,
        "host": data["machine"]["host"],
        "began_ns": data["began_ns"],
        "versions": data["versions"],
        "counts": dict(Counter(row["status"] for row in data["scenarios"])),
        "regressions": list(new),
    }


def announce(
    out: Path,
    data: Mapping[str, Any],
    *,
    url: str,
    night: str,
    secret: str = "",
    clock: Clock | None = None,
    rng: random.Random | None = None,
) -> Told:
    """Tell `url` of the regressions of a summary that it was not told of before.

    A regression is the one that was told while its scenario, metric, arm and kind are the same, although its first bad run may move
    as more nights are known, unless it is a further step. It is forgotten when a night runs its scenario without it, so that one
    that comes back is told again. What could not be delivered is tried again by the next night. Never raises for the
    receiver's or the state file's sake: the reason is in the result.
    """
    clock = clock or SystemClock()
    try:
        with _locked(out):
            return _announce(out / STATE, data, url, night, secret, clock, rng)
    except NotDelivered as error:
        return Told(problem=f"{error}; the next night tries again")
    except (DtprobeError, OSError) as error:
        return Told(problem=f"what was told before is not known: {error}")


def _announce(
    file: Path, data: Mapping[str, Any], url: str, night: str, secret: str, clock: Clock, rng: random.Random | None
) -> Told:
    found = list(data.get("regressions") or ())
    state, problem = _state(file)
    mine = hashlib.sha256(url.encode()).hexdigest()[:16]
    before = state.get(mine, {})
    there = {_key(one): one for one in found}
    ran = {row["scenario"] for row in data["scenarios"] if row["status"] in _RAN}
    told = {key: at for key, at in before.items() if key in there or json.loads(key)[0] not in ran}
    new = [one for key, one in there.items() if key not in told or _another(one, told[key])]
    if new:
        send(url, message(data, new, night), secret=secret, clock=clock, rng=rng)
        now_ns = clock.now_ns()
        told |= {_key(one): {"told_ns": now_ns, "before": one["before"], "after": one["after"]} for one in new}
    if told != before:
        write_json(file, {"schema": STATE_SCHEMA, "told": {**state, mine: told}})
    return Told(delivered=len(new), problem=problem)


def _key(one: Mapping[str, Any]) -> str:
    return json.dumps([one["scenario"], one["metric"], one["arm"], one["kind"]])


def _another(one: Mapping[str, Any], told: Mapping[str, Any]) -> bool:
    """Whether this is a further step after the one that was told: it began later, and goes on from there by half as much at least."""
    if (one.get("first_bad_ns") or 0) <= told["told_ns"]:
        return False
    values = (told["before"], told["after"], one["after"])
    if not all(isinstance(value, int | float) for value in values):
        return bool(one["after"] != told["after"])
    first, step = told["after"], told["after"] - told["before"]
    return bool((one["after"] - first) * (1 if step > 0 else -1) > abs(step) / 2)


_Told = dict[str, dict[str, Any]]


def _state(file: Path) -> tuple[dict[str, _Told], str]:
    """What was told, by receiver. A file that is damaged is put aside: better told twice than never."""
    if not file.exists():
        return {}, ""
    try:
        held = read_json(file)
        if held.get("schema") == STATE_SCHEMA and all(
            len(json.loads(key)) == 4 and isinstance(one["told_ns"], int) and {"before", "after"} <= one.keys()
            for told in held["told"].values()
            for key, one in told.items()
        ):
            return held["told"], ""
    except (DtprobeError, KeyError, AttributeError, TypeError, ValueError):
        pass
    aside = file.with_suffix(".broken.json")
    file.replace(aside)
    return {}, f"{file} was damaged and is now {aside.name}: regressions that were told before are told again"


@contextmanager
def _locked(out: Path) -> Iterator[None]:
    """Two nights that end at once tell a regression once."""
    with (out / f".{STATE}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
