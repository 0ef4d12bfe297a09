"""Whose log lies beside a session: SQLite applies whatever goes by the log's name, another file's too.

Each file has a random number, SQLite's schema cookie (https://www.sqlite.org/fileformat2.html §1.3, bytes 40 to 43).
Every commit writes the first page, and so the number, to the log as well: a log that never shows its file's number
belongs to another. A writer gives the file another number when it begins and when it empties the log, so that a log
that was copied earlier does not fit any more. The new number reaches the file by way of the log, which shows both.
Files of earlier versions have a small number, which many share. A file that was closed has no log, whatever its number.
"""

from __future__ import annotations

import secrets
import sqlite3
import time
from pathlib import Path

from lockstep.sessions.errors import SessionError
from lockstep.sessions.format import files, log

_COOKIE = slice(40, 44)  # of the first page
_LEAST, _END = 1 << 16, 1 << 31  # above the cookies that SQLite counts up by itself
#: Looks at what a writer may be changing meanwhile, and seconds between them.
_LOOKS, _PAUSE = 5, 0.01


def foreign_log(path: Path) -> str:
    """ "NAME-wal is the log of another session …" where the log beside the session is not its own; "" where it is, or
    there is none. `SessionError` where the file is no session."""
    if not files.log_bytes(path):
        return ""
    for look in range(_LOOKS):
        before = files.header(path)
        if not _differs(before, path):
            return ""
        if look:
            time.sleep(_PAUSE)
        if look > 1 and files.header(path) == before and files.log_bytes(path):
            break
    return (
        f"{files.wal_of(path).name} is the log of another session, or of an older state of this one, and is not read. "
        "Move it beside the file that it belongs to, or delete it."
    )


def missing_log(path: Path) -> str:
    """ "incomplete: …" for a file that is still to be read with its log and has none beside it, or only another's; ""
    where nothing is missing."""
    foreign = foreign_log(path)
    if not foreign:
        return files.missing_log(path)
    return f"incomplete: {foreign} Its own log is missing." if files.in_log_mode(path) else ""


def owns_log(path: Path) -> bool:
    """Whether there is a session at `path`, and the log beside it, if any, is its own."""
    try:
        return files.exists(path) and not foreign_log(path)
    except SessionError:
        return False


def set_aside(path: Path) -> Path | None:
    """Rename a log beside the session that is not its own; where there is no session, any log. Its new name, None for
    nothing. Whoever calls it holds the session's lock."""
    if not files.log_bytes(path) or owns_log(path):
        return None
    found, number = files.wal_of(path), 1
    while files.exists(name := path.with_name(f"{path.name}-other-wal{f'-{number}' * (number > 1)}")):
        number += 1
    found.rename(name)
    return name


def show(connection: sqlite3.Connection) -> None:
    """Have the transaction write the first page, whatever else it writes."""
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    connection.execute(f"PRAGMA user_version = {version}")


def number(connection: sqlite3.Connection) -> None:
    """Give the file, which has no log, a number of its own."""
    connection.execute(f"PRAGMA schema_version = {_LEAST + secrets.randbelow(_END - _LEAST)}")


def renew(connection: sqlite3.Connection) -> None:
    """Give a file with a log another number, which reaches it with the next checkpoint."""
    connection.execute("BEGIN IMMEDIATE")
    show(connection)
    connection.execute("COMMIT")
    number(connection)


def _differs(header: bytes, path: Path) -> bool:
    if not files.asks_for_log(header):
        return files.log_bytes(path) > 0
    shown = {page[_COOKIE] for page in log.first_pages(path)}
    return bool(shown) and header[_COOKIE] not in shown
