"""The dashboard as an aiohttp application: the page, a stream of pictures, lines of output, and the report as a file.

Only readers with the token are served, and nothing can be changed.  The token comes in a header, which proxies do not
log.  ``Host`` and ``Origin`` are checked first: a foreign page in a browser on this machine cannot send requests here,
whatever name it uses for this address.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import re
from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import Any, Final
from urllib.parse import urlsplit

import msgspec
from aiohttp import web

from asyncpar.core.addresses import spell_host
from asyncpar.dashboard.page_file import live_page, report_page
from asyncpar.harmless import harmless_values

MOST_BROWSERS: Final = 32
MOST_READ: Final = 8
"""Maximum number of ranks whose output is read together."""

SEND_PATIENCE: Final = 15.0
"""Seconds within which a browser must take a picture; otherwise its stream ends, and it asks again."""

_LOOPBACK: Final = ("localhost", "127.0.0.1", "::1")
_HOST: Final = re.compile(r"(\[[0-9a-fA-F:.%]+\]|[^:\[\]@/\\\s]+)(?::\d{1,5})?")
_RANKS: Final = re.compile(r"[0-9]{1,7}(,[0-9]{1,7})*")
_HEADERS: Final = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
}
Lines = Callable[[int], Sequence[dict[str, Any]]]
FlightView = Callable[[], Awaitable[dict[str, Any]]]
"""Asks all ranks for their recorded events, and returns the findings of a hang and the events, as plain values."""

OutputRead = Callable[[Sequence[int]], Awaitable[list[dict[str, Any]]]]
"""Asks ranks for the last lines that they have printed, and returns them as plain values."""


class Dashboard:
    """Serves the latest picture to all browsers.

    ``lines(after)`` returns the lines of output with greater numbers, ``output(ranks)`` the last ones of these ranks;
    ``flight()`` inspects the records of ranks.
    """

    def __init__(
        self,
        token: str,
        *,
        names: Collection[str] = (),
        lines: Lines = lambda _: (),
        output: OutputRead | None = None,
        flight: FlightView | None = None,
        trust: Callable[[asyncio.BaseTransport | None], None] = lambda _: None,
    ) -> None:
        """``names`` are the names of this machine and of proxies, besides loopback, that browsers may use.

        ``trust`` is called with each connection over which the token has come.
        """
        self._token = token.encode()
        self._proxies = frozenset(spell_host(name) for name in names)
        self._names = self._proxies.union(_LOOPBACK)
        self._lines = lines
        self._output = output
        self._flight = flight
        self._trust = trust
        self._inspection: asyncio.Task[dict[str, Any]] | None = None
        self._picture: dict[str, Any] | None = None
        self._event = b""
        self._number = 0
        self._has_ended = False
        self._news = asyncio.Condition()
        self.browsers = 0
        self.lines_read_at: float | None = None
        """The last time at which a browser asked for lines of output, by the loop's clock."""
        self.application = web.Application(middlewares=[self._check], client_max_size=1024)
        self.application.router.add_get("/", self._page)
        self.application.router.add_get("/events", self._events)
        self.application.router.add_get("/lines", self._new_lines)
        self.application.router.add_get("/output", self._read_output)
        self.application.router.add_get("/report", self._report)
        self.application.router.add_get("/flight", self._serve_flight)

    async def show(self, picture: dict[str, Any]) -> None:
        """Make ``picture`` the latest.  A slow browser gets the latest when it has taken an earlier one."""
        async with self._news:
            self._picture, self._event = picture, b"data: " + _encode(picture) + b"\n\n"
            self._has_ended = bool(picture.get("ended"))
            self._number += 1
            self._news.notify_all()

    @web.middleware
    async def _check(self, request: web.Request, handler: Any) -> web.StreamResponse:
        self._check_names(request)
        if request.path != "/":
            self._check_token(request)
        response: web.StreamResponse = await handler(request)
        return response

    def _check_names(self, request: web.Request) -> None:
        asked = request.headers.get("Host", "")
        host = _name_of(asked)
        if host not in self._names:
            raise web.HTTPForbidden(
                text=f"not served under the name {host!r}; --dashboard-names takes the names of proxies\n",
                headers=_HEADERS,
            )
        origin = request.headers.get("Origin")
        if origin is not None and not self._is_ours(origin, asked):
            raise web.HTTPForbidden(text=f"not for pages of {origin!r}\n", headers=_HEADERS)
        if request.headers.get("Sec-Fetch-Site", "none") not in ("none", "same-origin") and request.path != "/":
            raise web.HTTPForbidden(text="not for pages of other sites\n", headers=_HEADERS)

    def _is_ours(self, origin: str, asked: str) -> bool:
        """Return whether ``origin`` names this server as the browser has addressed it, or a proxy."""
        try:
            parts = urlsplit(origin)
        except ValueError:
            return False
        is_web = parts.scheme in ("http", "https")
        return is_web and (parts.netloc.lower() == asked.lower() or _name_of(parts.netloc) in self._proxies)

    def _check_token(self, request: web.Request) -> None:
        kind, _, token = request.headers.get("Authorization", "").partition(" ")
        if kind.lower() != "bearer" or not hmac.compare_digest(token.strip().encode(), self._token):
            raise web.HTTPUnauthorized(
                text="the token is missing or wrong; it is in the address that the launcher printed\n",
                headers={"WWW-Authenticate": "Bearer", **_HEADERS},
            )
        self._trust(request.transport)

    async def _page(self, _: web.Request) -> web.Response:
        page = live_page()
        headers = {"Content-Security-Policy": page.policy, **_HEADERS}
        return web.Response(text=page.html, content_type="text/html", headers=headers)

    async def _events(self, request: web.Request) -> web.StreamResponse:
        if self.browsers >= MOST_BROWSERS:
            raise web.HTTPServiceUnavailable(text=f"{MOST_BROWSERS} browsers are connected already\n", headers=_HEADERS)
        response = web.StreamResponse(headers={"X-Accel-Buffering": "no", **_HEADERS})
        response.content_type = "text/event-stream"
        response.charset = "utf-8"
        self.browsers += 1
        try:
            with contextlib.suppress(ConnectionError, TimeoutError):  # the browser has left, or takes nothing
                await response.prepare(request)
                await self._stream(response)
        finally:
            self.browsers -= 1
        return response

    async def _stream(self, response: web.StreamResponse) -> None:
        number = 0
        while True:
            async with self._news:
                while self._number <= number:
                    await self._news.wait()
                number, event, is_last = self._number, self._event, self._has_ended
            async with asyncio.timeout(SEND_PATIENCE):
                await response.write(event)
            if is_last:
                return

    async def _new_lines(self, request: web.Request) -> web.Response:
        after = request.query.get("after", "0")
        if not (after.isascii() and after.isdecimal() and len(after) < 16):
            raise web.HTTPBadRequest(text=f"after: expected a whole number, got {after[:40]!r}\n", headers=_HEADERS)
        self.lines_read_at = asyncio.get_running_loop().time()
        return _json(list(self._lines(int(after))))

    async def _read_output(self, request: web.Request) -> web.Response:
        if self._output is None:
            raise web.HTTPNotFound(text="no output is kept here\n", headers=_HEADERS)
        asked = request.query.get("ranks", "")
        if not _RANKS.fullmatch(asked) or asked.count(",") >= MOST_READ:
            raise web.HTTPBadRequest(
                text=f"ranks: expected at most {MOST_READ} numbers as 0,3, got {asked[:40]!r}\n", headers=_HEADERS
            )
        return _json(await self._output(list(dict.fromkeys(map(int, asked.split(","))))))

    async def _serve_flight(self, _: web.Request) -> web.Response:
        """Inspect the recorded events once for all browsers that ask meanwhile."""
        if self._flight is None:
            raise web.HTTPNotFound(text="nothing is recorded here\n", headers=_HEADERS)
        if self._inspection is None or self._inspection.done():
            self._inspection = asyncio.ensure_future(self._flight())
        return _json(await asyncio.shield(self._inspection))

    async def _report(self, _: web.Request) -> web.Response:
        if self._picture is None:
            raise web.HTTPNotFound(text="no rank has reported anything yet\n", headers=_HEADERS)
        html = report_page({"picture": self._picture, "lines": list(self._lines(0))})
        headers = {"Content-Disposition": 'attachment; filename="run.html"', **_HEADERS}
        return web.Response(text=html, content_type="text/html", headers=headers)


def _json(value: Any) -> web.Response:
    return web.Response(body=_encode(value), content_type="application/json", headers=_HEADERS)


def _encode(value: Any) -> bytes:
    return msgspec.json.encode(harmless_values(value))


def _name_of(host: str) -> str:
    """Return the name in a ``Host`` header, "" if there is none."""
    found = _HOST.fullmatch(host)
    if found is None:
        return ""
    return spell_host(found[1].rstrip("."))
