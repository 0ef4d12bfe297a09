"""Compacting a finished session: one file without a log, free pages or unreferenced tensors."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from lockstep.sessions.convert import convert
from lockstep.sessions.errors import SessionError, SessionWriteError
from lockstep.sessions.format import database, files, log_owner, mark
from lockstep.sessions.format.schema import PAGE_SIZE, SMALL_PAGE_SIZE
from lockstep.sessions.lock import WriterLock
from lockstep.sessions.recording_file import aside, put_in_place
from lockstep.sessions.session import Session


@dataclass(frozen=True, slots=True)
class Packed:
    """The bytes of a session before and after (its log included), whether it was of an earlier format version, and the
    new name of a log that lay beside it and was another's."""

    before: int
    after: int
    converted: bool
    set_aside: Path | None = None


def compact(path: Path) -> Packed:
    """Compact the session. The compact one is made beside it, and takes its place where it is smaller: whenever this
    is cut short, one whole session is there. One of an earlier format version becomes one of the present version, whose
    rows have checksums from now on, and may grow by them.

    A short one has no rows of `columns` and needs no large pages: most of its size would be their rest.

    `SessionError` if it does not read as a session or is damaged, `SessionWriteError` if there is no room for a second
    one, or somebody is writing it; it is unharmed then.
    """
    path = Path(path)
    with Session.open(path) as session:
        if session.losses:
            raise SessionError(f"{path} is left as it is: it is {session.losses[0]}")
        _check_references(session)
        # A field that makes no sense would be lost on the way to the present version.
        convertible = not session.protected and not session.meta_problems
    try:
        with WriterLock.take(path):
            set_aside = log_owner.set_aside(path)
        before = _size(path)
        if convertible:
            _convert(path)
        with (
            WriterLock.take(path),
            closing(database.connect_writer(path)) as connection,
            aside(path) as fresh,
        ):
            mark.clear(connection)
            connection.execute("DELETE FROM blobs WHERE id NOT IN (SELECT blob FROM tensors)")
            (chunks,) = connection.execute("SELECT count(*) FROM chunks").fetchone()
            connection.execute(f"PRAGMA page_size = {PAGE_SIZE if chunks else SMALL_PAGE_SIZE}")
            files.create(fresh, files.mode_of(path))
            connection.execute("VACUUM INTO ?", (str(fresh),))
            with closing(sqlite3.connect(fresh, isolation_level=None)) as packed:
                log_owner.number(packed)
            folded = database.fold(connection)
            connection.close()
            if fresh.stat().st_size < _size(path):
                put_in_place(fresh, path)
            elif not folded:
                database.tidy(path)
    except (*database.ERRORS, OSError) as error:
        raise SessionWriteError(
            f"cannot pack session {path}: {error}. It is unharmed; make room, close whatever writes it, try again."
        ) from error
    return Packed(before, _size(path), convertible, set_aside)


def _size(path: Path) -> int:
    return path.lstat().st_size + files.log_bytes(path)


def _convert(path: Path) -> None:
    """Put a session of the present version in the place of an earlier one."""
    with WriterLock.take(path), aside(path) as fresh:
        convert(path, fresh)
        fresh.chmod(files.mode_of(path))
        put_in_place(fresh, path)


def _check_references(session: Session) -> None:
    """`SessionError` where a reference is damaged: the tensor that it led to would be removed."""
    with session.walk():
        for branch in session.branches():
            for step in session.own_steps(branch.id):
                session.captured(step, branch.id)
