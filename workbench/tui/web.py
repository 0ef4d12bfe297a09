"""`lockstep web`: the same screens in a browser of this machine, by textual-serve. An extra."""

from __future__ import annotations

import asyncio
import shlex
import socket
import sys
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from aiohttp import web
    from textual_serve.server import Server

#: Never another: whoever reaches the port drives the terminal application.
_HOST = "127.0.0.1"
_USAGE = 2


def serve(arguments: Sequence[str] = (), port: int = 8000) -> int:
    """Serve until interrupted. Each visitor gets a process of their own running `arguments`."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((_HOST, port))
        except OSError as error:
            print(f"lockstep web: port {port}: {error.strerror}: choose another with --port", file=sys.stderr)
            return _USAGE
    try:
        server = _server(arguments, port)
    except ImportError:
        print("lockstep web: textual-serve is missing: pip install 'lockstep[web]'", file=sys.stderr)
        return _USAGE
    server.serve()
    return 0


def _server(arguments: Sequence[str], port: int) -> Server:
    from aiohttp import web
    from textual_serve.server import Server

    own = f"{_HOST}:{port}", f"localhost:{port}"

    @web.middleware
    async def own_page_only(
        request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        """No page from elsewhere may drive this: not by its own name for this address, not by a websocket."""
        origin = request.headers.get("Origin")
        if request.host not in own or (origin is not None and origin not in {f"http://{one}" for one in own}):
            raise web.HTTPForbidden(text="lockstep answers its own page only")
        return await handler(request)

    async def nothing_from_elsewhere(_: web.Request, response: web.StreamResponse) -> None:
        """The page names a font of the web's: it is not fetched, and the browser's own serves."""
        response.headers["Content-Security-Policy"] = (
            "style-src 'self' 'unsafe-inline'; font-src 'self' data:"
        )

    class _Local(Server):
        visitors: ClassVar[set[asyncio.Task[object]]] = set()

        async def _make_app(self) -> web.Application:
            app = await super()._make_app()
            app.middlewares.append(own_page_only)
            app.on_response_prepare.append(nothing_from_elsewhere)
            return app

        async def handle_websocket(self, request: web.Request) -> web.WebSocketResponse:
            if (visit := asyncio.current_task()) is not None:
                self.visitors.add(visit)
                visit.add_done_callback(self.visitors.discard)
            return await super().handle_websocket(request)

        async def on_shutdown(self, app: web.Application) -> None:
            """A page that is still open must not keep the server, and its screens are to end with it."""
            for visit in self.visitors:
                visit.cancel()
            await super().on_shutdown(app)

    command = f"exec {shlex.join([sys.executable, '-P', '-m', 'workbench.tui', *arguments])}"
    return _Local(command, host=_HOST, port=port, title="Lockstep")
