"""Errors of reading and writing sessions: each message states what is wrong, where, and what to do next."""

from __future__ import annotations


class SessionError(Exception):
    """A session that cannot be read (foreign, broken, hostile), or a request for something that it does not hold."""


class SessionDamaged(SessionError):
    """A place of a session whose content is not what was written there. Other places can be read."""


class SessionWriteError(SessionError):
    """A session that cannot be written (full disk, no permission). It is intact up to its last commit."""


class SessionBusy(SessionWriteError):
    """Somebody else is writing the session."""


class RecordingLost(SessionWriteError):
    """Part of what was to be recorded is not in the session, and will not be."""


class SessionMoved(SessionWriteError):
    """The file that was being written has been deleted, moved or replaced."""


class LayoutError(SessionError, ValueError):
    """Shards that cannot make up one tensor under the declared layout; the message gives the shapes."""


class IdsMismatch(SessionError):
    """Two sessions were not fed the same token ids at the same positions: a diff of them is meaningless."""


def broken(where: str, what: str) -> SessionError:
    """The error for content that contradicts the format."""
    return SessionError(
        f"broken session: {where}: {what}. It was damaged or not written by Lockstep; "
        "`lockstep sessions verify` lists all that is wrong with it, recording it again replaces it."
    )


def damaged(where: str, what: str) -> SessionDamaged:
    """The error for a place whose content is not what was written."""
    return SessionDamaged(
        f"damaged: {where}: {what}. The rest can be read; `lockstep sessions verify` lists all damage; copy the file "
        "again from where it is whole, or record it again."
    )
