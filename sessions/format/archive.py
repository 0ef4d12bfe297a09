"""A session file being read: one connection, shared by threads, that follows the file while it grows."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from sys import getsizeof
from typing import Any

from lockstep.sessions.errors import SessionDamaged, SessionError, broken
from lockstep.sessions.format import database, files, log, log_owner, rows
from lockstep.sessions.format.rows import Row
from lockstep.sessions.limits import Charged, ReadMeter

#: Bytes of rows that are taken between two looks at what is left of the budget.
_BETWEEN_LOOKS = 1 << 16


class Archive:
    """Queries on one session file; SQLite's errors become `SessionError`."""

    def __init__(self, path: Path, meter: ReadMeter, *, follow: bool = True) -> None:
        self.path, self.meter, self._follows = path, meter, follow
        self._lock = threading.RLock()
        self._depth = 0
        self._grew = False
        self._closed = False
        self._connections = 0
        self.version = 0  # of the file's format
        self._connect()

    @property
    def growing(self) -> bool:
        """Whether part of the session is still in its log: it is being written, or its writer was killed."""
        return not self._foreign and files.log_bytes(self.path) > 0

    @property
    def missing(self) -> str:
        """ "incomplete: …" where the file's log is not beside it, or damaged; "" where nothing is missing."""
        return log_owner.missing_log(self.path) if self._immutable else self._lost

    def file_bytes(self) -> int:
        """The length of the file and its log."""
        return self.path.lstat().st_size + (files.log_bytes(self.path) if self.growing else 0)

    def query(self, sql: str, *arguments: object, what: str = "") -> Charged[Row]:
        """All rows at once: an open cursor would hold the log back from being folded in. They count while the list
        lives. Their checksums are not looked at. `what` names in an error what is read."""
        with self._lock:
            if self._closed:
                raise SessionError(f"session {self.path.name} has been closed.")
            if self._depth == 0:
                self._follow()
            with self.meter.view():
                try:
                    with closing(self._connection.execute(sql, arguments)) as cursor:
                        return self._take(cursor, what)
                except database.ERRORS as error:
                    self.meter.check_time()  # it was interrupted
                    if isinstance(error, sqlite3.DataError):  # a row longer than SQLITE_LIMIT_LENGTH
                        self.meter.room(self.meter.limits.memory + 1, f"a row of {what}" if what else "a row")
                    raise database.unreadable(self.path, error, what) from error

    def _take(self, cursor: sqlite3.Cursor, what: str) -> Charged[Row]:
        taken, counted, found = 0, 0, []
        for row in cursor:
            taken += getsizeof(row) + sum(map(getsizeof, row))
            if taken >= counted:  # not of each: there may be a hundred thousand
                self.meter.room(taken, f"the rows of {what}" if what else "the rows")
                counted = taken + _BETWEEN_LOOKS
            found.append(row)
        if found:  # what returns nothing, as BEGIN, has been done
            self.meter.room(taken, f"the rows of {what}" if what else "the rows")
        return self.meter.charged(found, taken)

    def rows(self, table: str, clause: str = "", *arguments: object, where: str = "") -> Charged[Row]:
        """The rows of a table, as `schema.COLUMNS` has them. `SessionError` at the first that is damaged: it names
        `where`, or the row's own place."""
        good, bad = self.sift(table, clause, *arguments, where=where)
        if bad:
            raise bad[0]
        return good

    def sift(
        self, table: str, clause: str = "", *arguments: object, where: str = ""
    ) -> tuple[Charged[Row], list[SessionDamaged]]:
        """The rows that are sound, and an error for each that is damaged."""
        found = self.query(f"{rows.select(table, self.version)} {clause}", *arguments, what=where or table)
        good, bad = rows.sift(table, found, self.version, where)
        return self.meter.charged(good, found.nbytes), bad

    def one(self, sql: str, *arguments: object) -> tuple[Any, ...]:
        """The single row."""
        found = self.query(sql, *arguments)
        if len(found) != 1:
            raise broken(self.path.name, f"{len(found)} rows where one was expected")
        return found[0]

    @contextmanager
    def snapshot(self) -> Iterator[None]:
        """Several queries of one state of the file, which are one view. May be nested."""
        with self._lock, self.meter.view():
            if self._depth == 0:
                self.query("BEGIN")
            self._depth += 1
            try:
                yield
            finally:
                self._depth -= 1
                if self._depth == 0:
                    self._end()

    def state(self) -> tuple[int, int]:
        """A number that changes when anything was committed since."""
        with self._lock:
            (version,) = self.one("PRAGMA data_version")
            return self._connections, int(version)

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._grew |= self.growing
            self._connection.close()
            if self._grew and files.exists(files.wal_of(self.path)) and self._in_place():
                database.tidy(self.path)

    def _end(self) -> None:
        """End the read transaction; even that can fail on a damaged file."""
        try:
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")
        except database.ERRORS as error:
            raise database.unreadable(self.path, error) from error

    def _connect(self) -> None:
        self._log = _stamp(files.wal_of(self.path))
        self._connection, self._immutable = database.connect_reader(self.path, self.meter)
        self._foreign = log_owner.foreign_log(self.path) if self._immutable else ""
        self._lost = "" if self._foreign else log.lost_commits(self.path, self.meter.check_time)
        (self.version,) = self._connection.execute("PRAGMA user_version").fetchone()
        self._connections += 1
        self._stamp = self._file_stamp()
        self._grew |= self.growing

    def _follow(self) -> None:
        """Reconnect when the file was replaced, or, if opened as immutable, when it changed."""
        self._grew = self._grew or self.growing
        if not self._follows:
            return
        stamp = self._file_stamp()
        replaced = stamp[0] != self._stamp[0]
        changed = stamp != self._stamp or _stamp(files.wal_of(self.path)) != self._log
        if replaced or (self._immutable and changed):
            self._connection.close()
            self._connect()

    def _in_place(self) -> bool:
        """Whether the name still leads to what was read."""
        return files.exists(self.path) and self._file_stamp()[0] == self._stamp[0]

    def _file_stamp(self) -> tuple[int, int, int]:
        stamp = _stamp(self.path)
        if stamp is None:
            raise SessionError(f"{self.path} has gone while it was open.")
        return stamp


def _stamp(path: Path) -> tuple[int, int, int] | None:
    """Inode, length and time of change; None where there is no such file."""
    try:
        status = path.lstat()
    except (OSError, ValueError):  # a name that no file can have
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns
