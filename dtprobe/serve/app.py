"""The application: paths of the site, files of run folders, the comparison, the login. Nothing can be changed through it."""

from __future__ import annotations

import stat
from collections.abc import Awaitable, Callable, Mapping
from functools import wraps
from pathlib import Path

from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import FileResponse, HTMLResponse, PlainTextResponse, RedirectResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dtprobe.serve.access import Access
from dtprobe.serve.compare import compare
from dtprobe.serve.live import Live
from dtprobe.site.pages import REPORT, Pages
from dtprobe.store.runs import RUN_ID

HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}
FRAMES = "frame-ancestors 'none'"
REPORT_POLICY = f"default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'; {FRAMES}"
"""A report draws with a library whose figures have inline styles; it has no script."""
FILE_POLICY = f"default-src 'none'; sandbox; {FRAMES}"
LOGIN_BYTES = 4096
Endpoint = Callable[[Request], Awaitable[Response]]


def application(live: Live, access: Access) -> ASGIApp:
    """The ASGI application, with the guard around it."""

    async def page(request: Request) -> Response:
        return answer(live.pages(), request.path_params["path"] or "index.html", request)

    def answer(pages: Pages, path: str, request: Request) -> Response:
        if path == "compare.html":
            return _compare(pages, request.query_params.get("a", ""), request.query_params.get("b", ""))
        if path.startswith("runs/"):
            return _file(pages, path.removeprefix("runs/"))
        text = pages.render(path)
        return _html(pages, text) if text is not None else _missing(pages)

    async def login(request: Request) -> Response:
        pages = live.pages()
        if not access.needs_token:
            return RedirectResponse("./", status_code=303)
        if request.method != "POST":
            return _login(pages, "", 200)
        if int(request.headers.get("content-length") or LOGIN_BYTES + 1) > LOGIN_BYTES:
            return PlainTextResponse("too long\n", status_code=413)
        given = _field((await request.body()).decode("utf-8", "replace"))
        if not access.fits(given):
            return _login(pages, "That is not the token.", 401)
        return RedirectResponse("./", status_code=303, headers={"Set-Cookie": access.cookie()})

    async def refused(request: Request) -> Response:
        return _login(live.pages(), "", 401)

    # The login is the one thing that is not read: a token has no place in an address.
    routes = [
        Route("/login", _careful(login), methods=["GET", "POST"]),
        Route("/refused", _careful(refused)),
        Route("/{path:path}", _careful(page)),
    ]
    return Guard(Starlette(routes=routes), access)


def _careful(endpoint: Endpoint) -> Endpoint:
    """A damaged folder may break one page: that is said on it, in one line, and the server goes on."""

    @wraps(endpoint)
    async def answer(request: Request) -> Response:
        try:
            return await endpoint(request)
        except Exception as error:  # noqa: BLE001
            said = f"This page could not be made: {type(error).__name__}: {error}. Others can."
            return PlainTextResponse(" ".join(said.split()) + "\n", status_code=500)

    return answer


class Guard:
    """Lets nobody past without the token, nobody who came by another host's name, and puts the headers on every answer."""

    def __init__(self, inner: ASGIApp, access: Access) -> None:
        self._inner = inner
        self._access = access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._inner(scope, receive, send)
            return
        headers = Headers(scope=scope)

        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                present = {name.lower() for name, _ in message["headers"]}
                extra = [(name.lower().encode(), value.encode()) for name, value in HEADERS.items()]
                message["headers"] = [*message["headers"], *(one for one in extra if one[0] not in present)]
            await send(message)

        if not self._access.names_this_host(headers):
            answer = PlainTextResponse("this address is not for that host name\n", status_code=421)
            await answer(scope, receive, guarded)
        elif scope["path"] != "/login" and not self._access.allowed(headers):
            if scope["method"] in ("GET", "HEAD"):
                await self._inner({**scope, "path": "/refused", "raw_path": b"/refused"}, receive, guarded)
            else:
                await PlainTextResponse("not without the token\n", status_code=401)(scope, receive, guarded)
        else:
            await self._inner(scope, receive, guarded)


def _html(pages: Pages, text: str, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return HTMLResponse(
        text, status_code=status, headers={"Content-Security-Policy": f"{pages.policy}; {FRAMES}", **(headers or {})}
    )


def _missing(pages: Pages, said: str = "There is no such page.") -> Response:
    return _html(pages, pages.own("said.html", "", title="Not found", said=said), 404)


def _login(pages: Pages, said: str, status: int) -> Response:
    """Shows nothing of what is known but that there is a login."""
    headers = {"WWW-Authenticate": 'Bearer realm="dtprobe"'} if status == 401 else None
    return _html(pages, pages.own("login.html", "", said=said), status, headers)


def _field(body: str) -> str:
    from urllib.parse import parse_qs

    return parse_qs(body).get("token", [""])[0]


def _compare(pages: Pages, a: str, b: str) -> Response:
    known = pages.known
    unknown = [one for one in (a, b) if one and one not in known.runs]
    found = None
    if a in known.runs and b in known.runs:
        found = compare(known, known.runs[a], known.runs[b])
    newest = sorted(known.runs.values(), key=lambda run: run.started_ns, reverse=True)[:100]
    text = pages.own("compare.html", "compare", found=found, a=a, b=b, unknown=unknown, newest=newest)
    return _html(pages, text, 404 if unknown else 200)


def _file(pages: Pages, path: str) -> Response:
    """A file of a run folder; nothing that lies elsewhere, whatever the path or a link in the folder says."""
    slug, _, rest = path.partition("/")
    identity, _, inner = rest.partition("/")
    run = pages.known.runs.get(identity)
    # The folder's name is checked against the history's or, for a run that is not finished, has to be one that runs have.
    if not RUN_ID.fullmatch(identity) or (run.slug if run else slug) != slug or not _known_folder(pages, slug):
        return _missing(pages)
    folder = pages.known.out / slug / identity
    file = _inside(folder, inner)
    if file is None:
        return _missing(pages, "There is no such file in this run's folder.")
    if inner == REPORT and run is not None:
        return HTMLResponse(pages.report(run, file), headers={"Content-Security-Policy": REPORT_POLICY})
    return FileResponse(file, media_type="text/plain; charset=utf-8", headers={"Content-Security-Policy": FILE_POLICY})


def _known_folder(pages: Pages, slug: str) -> bool:
    return pages.known.scenario(slug) is not None


def _inside(folder: Path, inner: str) -> Path | None:
    """The regular file that `inner` names in the folder, through no link that leaves it."""
    if "\0" in inner or "\\" in inner:
        return None
    try:
        file = (folder / inner).resolve(strict=True)
        if not file.is_relative_to(folder.resolve(strict=True)) or not stat.S_ISREG(file.stat().st_mode):
            return None
    except (OSError, RuntimeError, ValueError):
        return None
    return file
