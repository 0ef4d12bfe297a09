"""A Unix socket on which a host waits for its one client, who must be the same user."""

from __future__ import annotations

import os
import socket
import stat
import struct
from pathlib import Path

from msgspec.msgpack import Decoder

from engine.ranks.wire import Connection
from workbench.debugger.errors import DebuggerError
from workbench.debugger.host.messages import RequestFrame

#: Bytes of the longest request: a command line.
MOST_REQUEST = 1 << 20
#: Seconds for the client to come.
_PATIENCE = 120.0


def accept(path: Path) -> Connection[RequestFrame]:
    """Wait for the one client on a socket at `path`. DebuggerError when the place is not safe or nobody comes."""
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
        listener.settimeout(_PATIENCE)
        try:
            while True:
                client, _ = listener.accept()
                if _same_user(client):
                    client.settimeout(None)
                    return Connection(client, Decoder(RequestFrame), MOST_REQUEST)
                client.close()
        except TimeoutError:
            raise DebuggerError(f"no client came to {path} within {_PATIENCE:g} s") from None
        finally:
            path.unlink(missing_ok=True)


def _same_user(client: socket.socket) -> bool:
    """Whether the other side belongs to the same user (Linux tells; elsewhere the file's mode must do)."""
    if not hasattr(socket, "SO_PEERCRED"):
        return True
    size = struct.calcsize("3i")
    _, user, _ = struct.unpack("3i", client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
    return bool(user == os.getuid())
