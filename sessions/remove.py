"""Removing a session with all that belongs to it."""

from __future__ import annotations

from pathlib import Path

from lockstep.sessions.errors import SessionWriteError
from lockstep.sessions.format import files, log_owner
from lockstep.sessions.lock import WriterLock
from lockstep.sessions.recording_file import aside


def remove(path: Path) -> None:
    """Delete the session at `path`, what SQLite keeps beside it, and what a killed writer has left; nothing happens
    where there is no such thing. A log that is another's stays. `SessionBusy` while somebody records it,
    `SessionWriteError` where it may not be.
    """
    if not any(map(files.exists, (path, *files.companions(path), files.lock_of(path)))):
        return
    try:
        with WriterLock.take(path), aside(path):
            own = log_owner.owns_log(path)
            for file in (path, *files.companions(path)):
                if own or file != files.wal_of(path):
                    file.unlink(missing_ok=True)
    except OSError as error:
        raise SessionWriteError(f"cannot remove {path}: {error.strerror or error}.") from error
