"""SQLite's connections to files, and reading a file's first bytes beside them without taking their locks from them.

POSIX locks belong to a process and a file: when the process closes any descriptor of the file, all of its locks on it
are gone. So what is opened beside SQLite's own connections is closed with the last of them.
"""

from __future__ import annotations

import os
import sqlite3
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path

Inode = tuple[int, int]  # device and inode

_lock = threading.RLock()
_connections: Counter[Inode] = Counter()
_to_close: dict[Inode, list[Callable[[], object]]] = {}  # when the last connection has gone
_kept: dict[Inode, int] = {}  # descriptors that are among these


def _enter(path: Path) -> Inode:
    """A connection to `path` that takes locks is about to be made. OSError where there is no such file."""
    with _lock:
        status = path.stat()
        inode = status.st_dev, status.st_ino
        _connections[inode] += 1
        return inode


def _leave(inode: Inode) -> None:
    """That connection has been closed."""
    with _lock:
        _connections[inode] -= 1
        if _connections[inode] > 0:
            return
        del _connections[inode]
        _kept.pop(inode, None)
        for close in _to_close.pop(inode, ()):
            close()


def _close(inode: Inode, what: Callable[[], object]) -> None:
    """Close what has the file open beside the connections that take locks: now, or with the last of them."""
    with _lock:
        if inode in _connections:
            _to_close.setdefault(inode, []).append(what)
        else:
            what()


def first_bytes(path: Path, count: int) -> bytes:
    """The file's first bytes. OSError."""
    with _lock:
        status = path.lstat()
        inode = status.st_dev, status.st_ino
        if inode in _kept:
            return os.pread(_kept[inode], count, 0)
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            return os.pread(descriptor, count, 0)
        finally:
            opened = os.fstat(descriptor)
            inode = opened.st_dev, opened.st_ino
            if inode in _connections:
                _kept[inode] = descriptor
            _close(inode, lambda: os.close(descriptor))


class _Connection(sqlite3.Connection):
    """A connection whose file may be read beside it; see `first_bytes`."""

    inode: Inode | None = None
    takes_locks = True

    def close(self) -> None:
        inode, self.inode = self.inode, None
        if inode is None:
            super().close()
        elif not self.takes_locks:
            _close(inode, super().close)
        else:
            super().close()
            _leave(inode)


def connect(path: Path, options: str, timeout: float) -> sqlite3.Connection:
    """A connection to the file, with the options of SQLite's URI; `timeout`: seconds to wait for a lock."""
    uri = f"{path.absolute().as_uri()}?{options}"
    # Sharing between threads is safe: every user of a connection holds a lock of its own.
    inode = _enter(path)
    try:
        connection = sqlite3.connect(
            uri,
            uri=True,
            timeout=timeout,
            isolation_level=None,
            check_same_thread=False,
            factory=_Connection,
        )
    except BaseException:
        _leave(inode)
        raise
    connection.inode, connection.takes_locks = inode, "immutable" not in options
    if not connection.takes_locks:
        _leave(inode)
    return connection
