"""Recording a run for a user: where it may go (torch-free)."""

from __future__ import annotations

import os
from pathlib import Path

from lockstep.sessions import Session, SessionError, SessionWriteError
from lockstep.sessions.lock import WriterLock


def may_write(path: Path) -> Path:
    """`path`, if a session may be written there: it is free, or holds a session (which is replaced).

    FileExistsError for any other file, so that a slip of the hand cannot cost a checkpoint; `SessionBusy` while
    somebody records there; `SessionWriteError` where no file can be made: known before ranks are started.
    """
    try:
        WriterLock.take(path).release()
    except OSError as error:
        raise SessionWriteError(
            f"cannot write a session to {path}: {error.strerror or error}. Choose another directory."
        ) from error
    if os.path.lexists(path):
        try:
            Session.open(path).close()
        except SessionError as error:
            raise FileExistsError(
                f"{path} exists and is not a session: choose another name ({error})"
            ) from error
    return path
