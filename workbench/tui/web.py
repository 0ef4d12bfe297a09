"""`lockstep web`: the same screens in a browser of this machine, by textual-serve. An extra."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import socket
import sys
from collections.abc import Sequence

from lockstep.engine.children import child_environment

#: Where browsers look for `localhost`: the second, tried first where there is IPv6, must not be somebody else's.
_ADDRESSES = ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1"))
_USAGE = 2


def serve(arguments: Sequence[str] = (), port: int = 8000, visitors: int = 4) -> int:
    """Serve until interrupted. Each visitor, of so many at a time, gets a process of its own running `arguments`."""
    # Imported here: the server is an extra.
    from aiohttp import web

    from lockstep.workbench.tui.web_server import OwnersServer

    try:
        sockets = _bound(port)
    except OSError as error:
        print(f"lockstep web: port {port}: {error.strerror}: choose another with --port", file=sys.stderr)
        return _USAGE
    checked = child_environment({})
    os.environ.clear()  # textual-serve hands its own environment on
    os.environ.update(checked)
    server = OwnersServer(arguments, visitors)

    async def application() -> web.Application:
        _end_between_tasks()
        return await server.application()

    print(
        "Open this in a browser of this machine; whoever has the token may. ctrl+c ends it.", file=sys.stderr
    )
    print(f"http://127.0.0.1:{port}/?token={server.token}", flush=True)
    # No log of requests: it would repeat the token.
    web.run_app(application(), sock=sockets, access_log=None, print=None, handle_signals=False)
    return 0


def _end_between_tasks() -> None:
    """Have the loop run the handlers of the signals that end the server. As they stand they would raise within
    whichever task is running, and a task that ended so raises again in whoever awaits it: among them is what ends
    the visitors' processes."""
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        handler = signal.getsignal(number)
        if callable(handler):
            loop.add_signal_handler(number, handler, number, None)


def _bound(port: int) -> list[socket.socket]:
    sockets = []
    for family, address in _ADDRESSES:
        try:
            made = socket.socket(family, socket.SOCK_STREAM)
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            made.bind((address, port))
            made.listen(128)  # whoever reads the address may connect at once
        except OSError as error:
            if family == socket.AF_INET6 and error.errno in (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL):
                continue  # a machine without it
            raise
        sockets.append(made)
    return sockets
