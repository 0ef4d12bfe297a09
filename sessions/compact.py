"""Compacting a finished session: one file without a log, free pages or unreferenced tensors."""

from __future__ import annotations

from pathlib import Path

from sessions.errors import SessionWriteError
from sessions.format import database, files
from sessions.format.schema import PAGE_SIZE, SMALL_PAGE_SIZE
from sessions.session import Session


def compact(path: Path) -> tuple[int, int]:
    """Compact the session in place; its bytes before and after (the log included).

    A short one has no rows of `columns` and needs no large pages: most of its size would be their rest.

    `SessionError` if it does not read as a session, `SessionWriteError` if there is no room for the copy
    that SQLite makes meanwhile, or somebody is writing it; it is unharmed then.
    """
    path = Path(path)
    Session.open(path).close()
    before = path.lstat().st_size + files.log_bytes(path)
    try:
        connection = database.connect_writer(path)
        try:
            connection.execute("DELETE FROM blobs WHERE id NOT IN (SELECT blob FROM tensors)")
            (chunks,) = connection.execute("SELECT count(*) FROM chunks").fetchone()
            connection.execute(
                "PRAGMA journal_mode = DELETE"
            ).fetchone()  # the size of pages is fixed in log mode
            connection.execute(f"PRAGMA page_size = {PAGE_SIZE if chunks else SMALL_PAGE_SIZE}")
            connection.execute("VACUUM")
            database.fold(connection)
        finally:
            connection.close()
    except database.ERRORS as error:
        raise SessionWriteError(
            f"cannot pack session {path}: {error}. It is unharmed; make room, close whatever writes it, try again."
        ) from error
    return before, path.lstat().st_size + files.log_bytes(path)
