"""A Unix socket on which a host waits for its one client, who must be the same user."""

from __future__ import annotations

import os
import select
import socket
import stat
import struct
import time
from pathlib import Path

from msgspec.msgpack import Decoder

from lockstep.engine.ranks.wire import Connection
from lockstep.workbench.debugger.errors import DebuggerError
from lockstep.workbench.debugger.host.messages import RequestFrame

#: Bytes of the longest request: a command line.
MOST_REQUEST = 1 << 20
#: Seconds for the client to come.
_PATIENCE = 120.0


def accept(path: Path, lifeline: int | None = None) -> Connection[RequestFrame]:
    """Wait for the one client on a socket at `path`. DebuggerError when the place is not safe, when nobody comes, or
    when the other end of the descriptor `lifeline` is closed before."""
    directory = path.parent.stat()
    if directory.st_uid != os.getuid() or stat.S_IMODE(directory.st_mode) & 0o077:
        raise DebuggerError(f"{path.parent} must belong to you alone (mode 0700)")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        before = os.umask(0o177)
        try:
            listener.bind(str(path))
        finally:
            os.umask(before)
        listener.listen(1)
        deadline = time.monotonic() + _PATIENCE
        awaited: list[socket.socket | int] = [listener] if lifeline is None else [listener, lifeline]
        try:
            while came := select.select(awaited, [], [], max(0.0, deadline - time.monotonic()))[0]:
                if listener not in came:
                    raise DebuggerError("the client has ended before it came")
                client, _ = listener.accept()
                if _same_user(client):
                    return Connection(client, Decoder(RequestFrame), MOST_REQUEST)
                client.close()
            raise DebuggerError(f"no client came to {path} within {_PATIENCE:g} s")
        finally:
            path.unlink(missing_ok=True)
            if lifeline is not None:
                os.close(lifeline)


def _same_user(client: socket.socket) -> bool:
    """Whether the other side belongs to the same user (Linux reports it; elsewhere the file's mode must do)."""
    if not hasattr(socket, "SO_PEERCRED"):
        return True
    size = struct.calcsize("3i")
    _, user, _ = struct.unpack("3i", client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
    return bool(user == os.getuid())
