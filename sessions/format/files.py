"""The files of a session: the database and SQLite's companions beside it, checked before SQLite opens them.

A finished session is one file in rollback mode. While it grows (or after its writer was killed) a
write-ahead log NAME.session-wal holds its newest steps.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from lockstep.sessions.errors import SessionError
from lockstep.sessions.format.connection import first_bytes
from lockstep.sessions.format.schema import APPLICATION_ID, READABLE_VERSIONS, SCHEMA_VERSION

_HEADER_BYTES = 100  # https://www.sqlite.org/fileformat.html §1.3
MAGIC = b"SQLite format 3\0"


def wal_of(path: Path) -> Path:
    """The write-ahead log beside a session."""
    return path.with_name(path.name + "-wal")


def companions(path: Path) -> tuple[Path, ...]:
    """Every file that SQLite may keep beside `path`."""
    return tuple(path.with_name(path.name + suffix) for suffix in ("-wal", "-shm", "-journal"))


def lock_of(path: Path) -> Path:
    """The file that whoever writes a session holds a lock on; see `sessions.lock`."""
    return path.with_name(path.name + "-lock")


def create(path: Path, mode: int = 0o600) -> None:
    """An empty file for SQLite to fill, which gives its log the same mode: a recording holds prompts, and is for this
    user alone unless somebody decides otherwise. FileExistsError for anything that is there, a link included."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        os.fchmod(descriptor, mode)
    finally:
        os.close(descriptor)


def mode_of(path: Path) -> int:
    """The mode that somebody gave a file."""
    return stat.S_IMODE(path.lstat().st_mode)


def exists(path: Path) -> bool:
    """Whether there is anything by that name, even a link that leads nowhere."""
    try:
        path.lstat()
    except OSError:
        return False
    return True


def log_bytes(path: Path) -> int:
    """The length of the session's write-ahead log; 0 if there is none."""
    try:
        return wal_of(path).lstat().st_size
    except OSError:
        return 0


def check(path: Path) -> None:
    """`SessionError` unless `path` is a regular file that SQLite can take for a session, and so are its
    companions regular files. Links are refused: what they lead to could be anything."""
    for file in (path, *companions(path)):
        try:
            mode = file.lstat().st_mode
        except FileNotFoundError:
            if file is path:
                raise SessionError(f"no session at {path}: the file does not exist.") from None
            continue
        except (OSError, ValueError) as error:
            raise SessionError(f"cannot look at {str(file)!r}: {error}.") from error
        if not stat.S_ISREG(mode):
            kind = (
                "a directory" if stat.S_ISDIR(mode) else "a link" if stat.S_ISLNK(mode) else "no regular file"
            )
            raise SessionError(
                f"refused {file}: it is {kind}; a session is one regular file. Name that file."
            )


def header(path: Path) -> bytes:
    """The header of the file itself, without what its log holds of it, after checking that it is a session's."""
    try:
        header = first_bytes(path, _HEADER_BYTES)
    except OSError as error:
        raise SessionError(f"cannot read session {path}: {error.strerror}.") from error
    if len(header) < _HEADER_BYTES or not header.startswith(MAGIC):
        raise SessionError(
            f"{path} is no Lockstep session: it is no SQLite 3 database. Name a .session file."
        )
    check_identity(path, int.from_bytes(header[68:72], "big"), int.from_bytes(header[60:64], "big"))
    return header


def asks_for_log(header: bytes) -> bool:
    """Whether a file with that header is to be read with a write-ahead log."""
    return header[18] == 2 or header[19] == 2


def in_log_mode(path: Path) -> bool:
    """Whether the session's header asks for a write-ahead log."""
    return asks_for_log(header(path))


def missing_log(path: Path) -> str:
    """ "incomplete: …" for a file that is still to be read with its log and has none beside it, as a copy of the file
    alone; "" where nothing is missing."""
    if exists(wal_of(path)) or exists(lock_of(path)) or not in_log_mode(path):
        return ""  # with the lock beside it, it is where it was recorded: SQLite itself has removed the log
    return (
        f"incomplete: the log {wal_of(path).name} is not beside it, and with it the newest steps. Copy both files, "
        "or make a whole one with `lockstep sessions copy` where it was recorded."
    )


def check_identity(path: Path, application: int, version: int) -> None:
    """`SessionError` unless the header's numbers are those of this format."""
    if application != APPLICATION_ID:
        raise SessionError(
            f"{path} is an SQLite database but no Lockstep session (application id "
            f"{application & 0xFFFFFFFF:#010x}, a session has {APPLICATION_ID:#010x}). Name a .session file."
        )
    if version not in READABLE_VERSIONS:
        advice = "update Lockstep" if version > SCHEMA_VERSION else "record it again"
        raise SessionError(
            f"{path} has session format {version}; this Lockstep reads {SCHEMA_VERSION}: {advice}."
        )
