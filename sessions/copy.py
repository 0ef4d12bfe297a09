"""Copying a session whole, also while it grows."""

from __future__ import annotations

import os
import sqlite3
from contextlib import closing, suppress
from pathlib import Path

from lockstep.sessions.errors import SessionDamaged, SessionError, SessionWriteError
from lockstep.sessions.format import database, files, log, log_owner, mark
from lockstep.sessions.limits import UNLIMITED, ReadMeter
from lockstep.sessions.lock import WriterLock
from lockstep.sessions.recording_file import aside, put_in_place


def copy(source: Path, target: Path, *, overwrite: bool = False, incomplete: bool = False) -> None:
    """Copy the session at `source`, as it is at one moment, to one file at `target`. Nothing in it is converted.

    `FileExistsError` where `target` is taken, unless `overwrite`; `SessionError` if `source` is no session or a part
    of one only, unless `incomplete` (`sessions.salvage` states in the copy what it lacks); `SessionWriteError` where
    there is no room; `SessionBusy` while somebody records to `target`.
    """
    source, target = Path(source), Path(target)
    connection, _ = database.connect_reader(source, ReadMeter(source.name, UNLIMITED))
    with closing(connection):
        if not incomplete and (missing := _missing(source)):
            raise SessionError(
                f"{source} is {missing} A copy would hide that: `lockstep sessions copy --salvage` makes one of what "
                "can be read and notes in its journal what it lacks."
            )
        if files.exists(target) and os.path.samefile(source, target):
            raise SessionWriteError(f"{source} cannot be copied onto itself: name another file.")
        write_copy(connection, target, overwrite=overwrite)


def _missing(source: Path) -> str:
    return log_owner.missing_log(source) or (
        "" if log_owner.foreign_log(source) else log.lost_commits(source)
    )


def write_copy(connection: sqlite3.Connection, target: Path, *, overwrite: bool = False) -> None:
    """What `connection` reads, as a closed session at `target`; see `copy`."""
    try:
        with WriterLock.take(target), aside(target) as fresh:
            if files.exists(target) and not overwrite:
                raise FileExistsError(f"{target} exists; choose another name, or overwrite it explicitly")
            files.create(fresh)
            with closing(sqlite3.connect(fresh, isolation_level=None)) as made:
                connection.backup(made)
                # The pages of a growing one ask for a log, and state that it is being recorded.
                made.execute("PRAGMA journal_mode = DELETE").fetchall()
                with suppress(SessionDamaged):  # what is damaged is copied as it is
                    mark.clear(made)
                log_owner.number(made)
            put_in_place(fresh, target)
    except FileExistsError:
        raise
    except (*database.ERRORS, OSError) as error:
        raise database.unwritable(target, error) from error
