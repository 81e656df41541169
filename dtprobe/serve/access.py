"""Who may read: names of this host where only loopback is bound, else whoever has the token."""

from __future__ import annotations

import hmac
import ipaddress
import secrets
from http.cookies import CookieError, SimpleCookie

from starlette.datastructures import Headers

from dtprobe.errors import UsageError

COOKIE = "dtprobe"
LEAST = 16
"""Characters of a token at least: nobody guesses that many over a network."""


def is_loopback(host: str) -> bool:
    """Whether an address to bind is this host's alone. A name other than localhost may mean any address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class Access:
    """Decides on each request. The cookie holds a value made of the token and of this process: it says nothing of the token, and ends with it."""

    def __init__(self, host: str, token: str | None) -> None:
        if token is None and not is_loopback(host):
            raise UsageError(
                f"--host {host} can be reached by others, and no token is set",
                "add --token (or DTPROBE_TOKEN), or leave --host out to stay on 127.0.0.1",
            )
        if token is not None and len(token) < LEAST:
            raise UsageError(
                f"a token of {len(token)} characters can be guessed",
                f"use {LEAST} or more: `python -c 'import secrets; print(secrets.token_urlsafe())'`",
            )
        self._token = token
        self._local = is_loopback(host)
        self._session = hmac.digest(secrets.token_bytes(32), (token or "").encode(), "sha256").hex()

    @property
    def needs_token(self) -> bool:
        return self._token is not None

    def names_this_host(self, headers: Headers) -> bool:
        """False where a name that is not this host's leads here: a page elsewhere whose name was rebound to loopback."""
        if not self._local:
            return True
        host = headers.get("host", "").rpartition(":")[0] or headers.get("host", "")
        return is_loopback(host.strip("[]"))

    def allowed(self, headers: Headers) -> bool:
        if self._token is None:
            return True
        scheme, _, given = headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer" and self.fits(given.strip()):
            return True
        try:
            cookie = SimpleCookie(headers.get("cookie", "")).get(COOKIE)
        except CookieError:
            return False
        return cookie is not None and hmac.compare_digest(cookie.value.encode(), self._session.encode())

    def fits(self, token: str) -> bool:
        """Whether this is the token; takes as long for one that is nearly right."""
        return self._token is not None and hmac.compare_digest(token.encode(), self._token.encode())

    def cookie(self) -> str:
        """The Set-Cookie that lets a browser in: no script reads it, no other site sends it."""
        return f"{COOKIE}={self._session}; Path=/; HttpOnly; SameSite=Strict"
