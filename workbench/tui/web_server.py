"""textual-serve, for the owner alone.

Whoever drives the screens reads and writes files as the user who started them, and every user of a machine reaches
its loopback interface. So nothing is answered without a secret: the token of the printed address, and after it a
cookie. What is promised, and what is not: docs/security.md.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import secrets
import shlex
from collections.abc import Awaitable, Callable, Sequence

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from textual_serve.app_service import AppService
from textual_serve.server import Server, to_int

from lockstep.engine.children import python_command
from lockstep.workbench import error_log

#: The names by which a browser may ask; the port is another's where ssh forwards one.
_NAMES = re.compile(r"(127\.0\.0\.1|localhost|\[::1\])(:\d{1,5})?")
_COOKIE = "lockstep"
#: Sent with everything.
_HEADERS = {
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
_POLICY = (
    "default-src 'self'; script-src 'self' 'unsafe-inline'; style-src 'self' 'unsafe-inline'; font-src 'self' data:; "
    "img-src 'self' data:; connect-src 'self' ws://{host}; object-src 'none'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'"
)
#: A redirect would count as coming from the page on which the address was clicked: its request has no strict cookie.
_COME_IN = '<!DOCTYPE html><meta http-equiv="refresh" content="0;url={path}"><a href="{path}">Lockstep</a>\n'
#: textual-serve's page asks for a font of the web's.
_ELSEWHERE = re.compile(r"<link[^>]*fonts\.googleapis[^>]*>")

#: Columns and rows of the largest screen that is drawn: a wall of monitors in a tiny font.
_LARGEST = (1000, 500)
#: Seconds that a visitor's process may take to end once its socket is closed; then it is killed.
_GRACE = 10.0
#: What a message raises that no page of ours sends.
_MALFORMED = (ValueError, TypeError, LookupError, AttributeError, AssertionError, RecursionError)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Screens(AppService):
    """One visitor's process, within bounds: its screen is no larger than any, and it ends with its socket."""

    async def start(self, width: int, height: int) -> None:
        """Start it on a screen of that size."""
        await super().start(*_bounded(width, height))

    async def set_terminal_size(self, width: int, height: int) -> None:
        """The visitor's window has another size."""
        await super().set_terminal_size(*_bounded(width, height))

    async def stop(self) -> None:
        """Have it quit; one that does not hear is killed."""
        try:
            async with asyncio.timeout(_GRACE):
                await super().stop()
                if self._process is not None:
                    await self._process.wait()  # its output is closed a moment before it ends
        except TimeoutError:
            pass
        finally:
            if self._process is not None and self._process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    self._process.kill()
                await self._process.wait()


def _bounded(*size: int) -> tuple[int, ...]:
    return tuple(min(max(int(asked), 1), most) for asked, most in zip(size, _LARGEST, strict=True))


class _Failures(logging.Handler):
    """The servers' own logs: what fails is kept in ours. What a visitor sent, such as a request that is none, was
    answered, and is nothing for the owner's terminal."""

    def emit(self, record: logging.LogRecord) -> None:
        """Keep an exception of the server's own."""
        error = record.exc_info[1] if record.exc_info else None
        if error is not None and not isinstance(error, (HttpProcessingError, ConnectionError)):
            error_log.record(error, "lockstep web")


class OwnersServer(Server):
    """Serves `python -m lockstep.workbench.tui arguments` to those who have the token, at most `visitors` at a time.

    The screens lie below a path that nobody can guess, and the cookie is of that path: browsers send cookies to every
    port of a host, and the next port may be another user's.
    """

    def __init__(self, arguments: Sequence[str], visitors: int) -> None:
        command = python_command("-m", "lockstep.workbench.tui", *arguments)
        super().__init__(f"exec {shlex.join(command)}", title="Lockstep")
        self.token, self._cookie = secrets.token_urlsafe(32), secrets.token_urlsafe(32)
        self.path = f"/{secrets.token_urlsafe(32)}/"
        self._most = visitors
        self.visits: set[asyncio.Task[object]] = set()
        for name in ("aiohttp", "textual-serve"):
            log = logging.getLogger(name)
            log.handlers, log.propagate = [_Failures()], False

    async def application(self) -> web.Application:
        """The whole of it: the entrance at `/`, the screens below `path`."""

        @web.middleware
        async def owner_only(request: web.Request, handler: Handler) -> web.StreamResponse:
            self._check(request)
            return await handler(request)

        app = web.Application(middlewares=[owner_only])
        app.router.add_get("/", self._come_in)
        app.add_subapp(self.path, await self._make_app())
        app.on_response_prepare.append(_protect)
        return app

    def _check(self, request: web.Request) -> None:
        """HTTPForbidden unless the request is the owner's, by a name of this machine and from no page but our own."""
        origin = request.headers.get("Origin")
        if not _NAMES.fullmatch(request.host) or origin not in (None, f"http://{request.host}"):
            raise web.HTTPForbidden(
                text="lockstep web answers its own page only, by a name of this machine.\n"
            )
        token, cookie = request.query.get("token", ""), request.cookies.get(_COOKIE, "")
        shown, secret = (token, self.token) if request.path == "/" else (cookie, self._cookie)
        if not secrets.compare_digest(shown.encode(), secret.encode()):
            raise web.HTTPForbidden(
                text="lockstep web: open the address that it printed when it started, token included.\n"
            )

    async def _come_in(self, request: web.Request) -> web.Response:
        """The token was right: a cookie, and the way to the screens."""
        response = web.Response(text=_COME_IN.format(path=self.path), content_type="text/html")
        response.set_cookie(_COOKIE, self._cookie, path=self.path, httponly=True, samesite="Strict")
        return response

    def _check_room(self) -> None:
        if len(self.visits) >= self._most:
            raise web.HTTPServiceUnavailable(
                text=f"lockstep web: as many visitors are in as --visitors allows ({self._most}). Close the screens in "
                "another tab and load this page again, or start lockstep web with more.\n"
            )

    async def handle_index(self, request: web.Request) -> web.StreamResponse:
        """The page. It names its parts by the name under which it was asked for: others are foreign to it."""
        self._check_room()
        self.public_url = f"http://{request.host}"
        page: web.StreamResponse = await super().handle_index(request)
        if isinstance(page, web.Response) and page.text is not None:
            page.text = _ELSEWHERE.sub("", page.text)
        return page

    async def handle_websocket(self, request: web.Request) -> web.WebSocketResponse:
        """A visit: screens of its own, until it is closed."""
        self._check_room()
        if (visit := asyncio.current_task()) is not None:
            self.visits.add(visit)
            visit.add_done_callback(self.visits.discard)
        socket = web.WebSocketResponse(heartbeat=15)
        await socket.prepare(request)

        async def close() -> None:
            await socket.close()

        screens = Screens(
            self.command, write_bytes=socket.send_bytes, write_str=socket.send_str, close=close,
            download_manager=self.download_manager,
        )  # fmt: skip
        width, height = (
            to_int(request.query.get(key, ""), usual) for key, usual in (("width", 80), ("height", 24))
        )
        try:
            await screens.start(width, height)
            with contextlib.suppress(*_MALFORMED):  # a visit that ends
                await self._process_messages(socket, screens)
        finally:
            await screens.stop()
            await socket.close()
        return socket

    async def on_startup(self, app: web.Application) -> None:
        """textual-serve's banner would name neither the token nor Lockstep."""

    async def on_shutdown(self, app: web.Application) -> None:
        """A page that is still open must not keep the server, and its screens are to end with it."""
        for visit in self.visits:
            visit.cancel()


async def _protect(request: web.Request, response: web.StreamResponse) -> None:
    response.headers.update(_HEADERS)
    response.headers["Content-Security-Policy"] = _POLICY.format(host=request.host)
