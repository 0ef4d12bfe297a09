"""Connections to the file. A reader's is read-only, bound to our tables, and refuses every other schema."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Mapping
from contextlib import closing, suppress
from functools import partial
from pathlib import Path

from lockstep.sessions.errors import SessionDamaged, SessionError, SessionWriteError
from lockstep.sessions.format import files, log_owner, mark, rows
from lockstep.sessions.format.connection import connect
from lockstep.sessions.format.schema import APPLICATION_ID, PAGE_SIZE, SCHEMA_VERSION, TABLES, objects
from lockstep.sessions.limits import ReadMeter, expired
from lockstep.sessions.text import clean

BUSY_SECONDS = 10.0

#: What a query on a damaged file may raise; UnicodeError where SQLite's own message quotes the damage.
ERRORS = (sqlite3.Error, UnicodeError)
_LONGEST_ROW = 10**9  # bytes: SQLite's own limit
_SCHEMA_BYTES = 1 << 16  # more than a row of the schema has
_INSTRUCTIONS = 4000  # of SQLite's machine between two looks at the time: about a millisecond
_LONG_LOG = 4 << 20  # bytes from which on the log is moved into the file
_CLOSING_SECONDS = 0.2  # a reader that stays attached is no reason to wait

_PRAGMAS = frozenset(
    [
        "application_id",
        "user_version",
        "page_count",
        "page_size",
        "data_version",
        "integrity_check",
        "trusted_schema",
        "cell_size_check",
        "query_only",
        "mmap_size",
        "cache_size",
    ]
)
_FUNCTIONS = frozenset({"count", "length", "min", "max", "sum"})
_SCHEMA_TABLES = frozenset({"sqlite_master", "sqlite_schema"})


def connect_reader(path: Path, meter: ReadMeter) -> tuple[sqlite3.Connection, bool]:
    """A hardened read-only connection that stays within the meter's limits, and whether it is immutable.

    A finished file is read without writing anything beside it. One that was left in log mode without a log
    (a copy of the main file alone) has to be declared immutable for that, and so has one with another file's log beside
    it: SQLite would read it. Such a connection sees no change.
    """
    files.check(path)
    immutable = bool(log_owner.foreign_log(path)) or (
        not files.exists(files.wal_of(path))
        and (files.in_log_mode(path) or files.exists(path.with_name(path.name + "-journal")))
    )
    connection = None
    try:
        connection = connect(path, "mode=ro&immutable=1" if immutable else "mode=ro", BUSY_SECONDS)
        for pragma in ("trusted_schema = OFF", "cell_size_check = ON", "query_only = ON", "mmap_size = 0"):
            connection.execute(f"PRAGMA {pragma}")
        connection.execute("PRAGMA cache_size = -4096")  # KiB; the system keeps the pages too
        longest = max(_SCHEMA_BYTES, min(meter.limits.memory // 4, _LONGEST_ROW))
        connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, longest)
        connection.set_progress_handler(expired, _INSTRUCTIONS)
        connection.text_factory = partial(_text, meter)
        connection.set_authorizer(_authorize)
        _check(connection, path)
        _check_length(connection, path, alone=immutable)
    except BaseException as error:
        if connection is not None:
            connection.close()
        if isinstance(error, ERRORS):
            raise unreadable(path, error) from error
        raise
    return connection, immutable


def connect_writer(path: Path) -> sqlite3.Connection:
    """A read-write connection in log mode; the log beside the file is its own (`log_owner.set_aside`).
    `SessionError` if the file is no session, `sqlite3.Error` if it cannot be written."""
    files.check(path)
    if (names := path.lstat().st_nlink) > 1:  # neither the lock nor the log goes by the others
        raise SessionWriteError(
            f"{path} has {names} names (hard links), by which others may write it at the same time. Record on a copy: "
            "`lockstep sessions copy`."
        )
    connection = connect(path, "mode=rw", BUSY_SECONDS)
    try:
        for pragma in ("trusted_schema = OFF", "cell_size_check = ON"):
            connection.execute(f"PRAGMA {pragma}")
        _check(connection, path)
        _check_length(connection, path)
        _use_log(connection)
    except BaseException:
        connection.close()
        raise
    return connection


def _use_log(connection: sqlite3.Connection) -> None:
    """Put the file in log mode, or leave it as one that asks for no log: closing would remove that alone."""
    if connection.execute("PRAGMA journal_mode").fetchone() != ("wal",):
        connection.execute("PRAGMA journal_mode = MEMORY")  # for the header's change; see `fold`
    try:
        connection.execute("PRAGMA journal_mode = WAL")
        # A kill loses nothing that was committed; a power cut may lose the last commits, never the file.
        connection.execute("PRAGMA synchronous = NORMAL")
        connection.execute("PRAGMA wal_autocheckpoint = 0")  # see `shorten_log`
        # Of a transaction that spilt into the log before its commit, SQLite rewrites frames that are there: a writer
        # that is killed meanwhile leaves a log that looks damaged.
        connection.execute("PRAGMA cache_spill = OFF")
        with suppress(sqlite3.OperationalError):  # without room for it the number that the file has will do
            log_owner.renew(connection)
            empty_log(connection)
    except BaseException:
        with suppress(sqlite3.Error):
            fold(connection)
        raise


def create_file(path: Path, first: Mapping[str, Iterable[rows.Row]]) -> None:
    """A session at `path` with the given first rows by table.

    Nobody sees the file before it is complete, so no journal is kept; force it to the disk before it is shown.
    """
    files.create(path)
    connection = sqlite3.connect(path, isolation_level=None)
    try:
        connection.execute("PRAGMA journal_mode = OFF")
        connection.execute("PRAGMA synchronous = OFF")
        connection.execute(f"PRAGMA page_size = {PAGE_SIZE}")
        connection.execute("BEGIN IMMEDIATE")
        connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
        for sql in TABLES.values():
            connection.execute(sql)
        rows.begin_totals(connection)
        for table, values in first.items():
            rows.insert(connection, table, values)
        connection.execute("COMMIT")
        log_owner.number(connection)
    finally:
        connection.close()


def shorten_log(connection: sqlite3.Connection, path: Path) -> None:
    """Move a long log into the file, unless a reader is at it, and cut it to nothing. What was committed stands,
    whatever becomes of this: an error is met again by the next step.

    By itself SQLite writes a log anew from its beginning, over what is there: a writer that is killed between the head
    and the page of a commit's last frame leaves a frame that looks damaged. At the end of the file it is cut short.
    """
    if files.log_bytes(path) < _LONG_LOG:
        return
    connection.execute("PRAGMA busy_timeout = 0")
    with suppress(sqlite3.Error):
        log_owner.renew(connection)
        empty_log(connection)
    connection.execute(f"PRAGMA busy_timeout = {int(BUSY_SECONDS * 1000)}")


def empty_log(connection: sqlite3.Connection) -> None:
    """Move the log into the file and cut it to nothing, unless a reader is at it."""
    connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()


def fold(connection: sqlite3.Connection) -> bool:
    """Move the log into the file, and leave log mode unless a reader is attached: then one file is left. Whether it
    is.

    The header's change needs no journal in a file: all that changes is in one sector. A journal that a killed writer
    left would be applied to whatever file bears the name next.
    """
    empty_log(connection)
    connection.execute(f"PRAGMA busy_timeout = {int(_CLOSING_SECONDS * 1000)}")
    try:
        connection.execute("PRAGMA journal_mode = MEMORY").fetchall()
    except sqlite3.OperationalError as error:
        if "locked" not in str(error):
            raise
        return False  # A reader is attached. It folds the (empty) log away when it closes; see `tidy`.
    return True


def mark_closed(path: Path) -> bool:
    """Take the mark of a writer back in a file whose log is gone; as `fold`."""
    with closing(connect(path, "mode=rw", BUSY_SECONDS)) as connection:
        connection.execute(
            "PRAGMA locking_mode = EXCLUSIVE"
        ).fetchall()  # then the log has no index on the disk
        mark.clear(connection)
        return fold(connection)


def tidy(path: Path) -> None:
    """Remove the empty log that a writer had to leave because somebody was reading. Best effort, by SQLite's own
    locks: if anybody is still attached, nothing happens."""
    for _ in range(2):
        if files.log_bytes(path):
            return  # somebody writes again, or it is another's
        try:
            with closing(connect(path, "mode=rw", _CLOSING_SECONDS)) as connection:
                folded = fold(connection)
        except sqlite3.Error:
            return  # not ours to write: the empty log does no harm
        # Who was attached may have left in between. Closing the last connection removes the log, and the header
        # still asks for one: a copy that lacks its log looks like that.
        if folded or files.exists(files.wal_of(path)):
            return


def unreadable(path: Path, error: Exception, what: str = "") -> SessionError:
    """SQLite's error on a file as a `SessionError`; `what` was being read."""
    log, complaint = files.wal_of(path), clean(str(error), limit=200)
    if files.exists(log) and "unable to open" in complaint:
        return SessionError(
            f"cannot read session {path}: its newest steps are in {log.name}, which can only be read in a "
            "directory that can be written. Copy both files to one."
        )
    kind = SessionDamaged if "malformed" in complaint else SessionError
    return kind(
        f"cannot read {f'{what} of ' if what else 'session '}{path}: {complaint}. It is no session, or it is damaged "
        "or cut short; copy it again together with its -wal file if it has one, or record it again."
    )


def unwritable(path: Path, error: Exception) -> SessionWriteError:
    """What hinders the writing of a file, as a `SessionWriteError`."""
    advice = "make room, or choose another directory, to record on"
    if isinstance(error, sqlite3.IntegrityError):
        advice = "another process has been writing it; let one of them record to another file"
    return SessionWriteError(
        f"cannot write session {path}: {error}. What was committed before is kept; {advice}."
    )


def _text(meter: ReadMeter, stored: bytes) -> str | bytes:
    """A TEXT value. What is not UTF-8 stays bytes, which no column may hold: then its row is damaged, not the query.
    One character beyond ASCII makes all of them up to four bytes wide."""
    meter.room(len(stored) if stored.isascii() else 4 * len(stored), "a text")
    try:
        return stored.decode()
    except UnicodeDecodeError:
        return stored


def _authorize(
    action: int, first: str | None, second: str | None, database: str | None, via: str | None
) -> int:
    """Allow reads of our tables only; `via` names a view or trigger, of which a session has none."""
    allowed = (
        action in (sqlite3.SQLITE_SELECT, sqlite3.SQLITE_TRANSACTION)
        or (action == sqlite3.SQLITE_READ and (first in TABLES or first in _SCHEMA_TABLES))
        or (action == sqlite3.SQLITE_PRAGMA and first in _PRAGMAS)
        or (action == sqlite3.SQLITE_FUNCTION and second in _FUNCTIONS)
    )
    return sqlite3.SQLITE_OK if allowed and via is None else sqlite3.SQLITE_DENY


def _check(connection: sqlite3.Connection, path: Path) -> None:
    """First the header's numbers, read without parsing the schema; then the schema, which must be ours to
    the letter: no view, trigger, virtual table, index or column besides."""
    (application,) = connection.execute("PRAGMA application_id").fetchone()
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    files.check_identity(path, application, version)
    known = objects(version)
    found = connection.execute("SELECT type, name, tbl_name, sql FROM sqlite_master LIMIT 100").fetchall()
    for row in found:
        if row not in known:
            raise SessionError(
                f"refused {path}: its schema has a {str(row[0])[:20]!r} {str(row[1])[:60]!r} that no session "
                f"of format {version} has. It was not written by Lockstep; do not trust it."
            )
    if missing := known - set(found):
        names = ", ".join(sorted(name for _, name, _, _ in missing))
        raise SessionError(f"{path} is an incomplete session: it lacks {names}. Record it again.")


def _check_length(connection: sqlite3.Connection, path: Path, *, alone: bool = False) -> None:
    """A file without a log, or one that is read `alone`, must be as long as its header states."""
    if files.exists(files.wal_of(path)) and not alone:
        return
    (pages,) = connection.execute("PRAGMA page_count").fetchone()
    (size,) = connection.execute("PRAGMA page_size").fetchone()
    actual = path.lstat().st_size
    if actual != pages * size:
        raise SessionError(
            f"{path} is {actual} bytes long, its header states {pages * size}: cut short or damaged. "
            "Copy it again."
        )
