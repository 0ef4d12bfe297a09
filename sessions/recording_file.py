"""The file that a writer records to: locked for it alone, and known by device and inode, not only by name."""

from __future__ import annotations

import os
import sqlite3
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from lockstep.sessions.errors import SessionMoved, SessionWriteError
from lockstep.sessions.format import database, files, log_owner, mark, rows
from lockstep.sessions.format.json_text import json_text
from lockstep.sessions.format.rows import Row
from lockstep.sessions.lock import WriterLock

FirstRows = Mapping[str, Iterable[Row]]
_Identity = tuple[int, int]  # device and inode


class RecordingFile:
    """A locked session file and the one connection that writes it. Close it.

    Raises OSError and sqlite3.Error as they come, `SessionBusy` where somebody else is writing the file.
    """

    def __init__(self, path: Path, lock: WriterLock, set_aside: Path | None) -> None:
        """Use `create` or `reopen`."""
        self.path, self._lock = path, lock
        #: The new name of a log that lay beside the file and was another's; None where there was none.
        self.set_aside = set_aside
        self._noted: Path | None = None
        self.connection = database.connect_writer(path)
        self._file, self._log = identity(path), identity(files.wal_of(path))

    @classmethod
    def create(cls, path: Path, first: FirstRows, *, overwrite: bool) -> RecordingFile:
        """A new file with the given first rows, in one step: a reader sees what was there before, or all of it."""
        lock = WriterLock.take(path)
        try:
            if files.exists(path) and not overwrite:
                raise FileExistsError(f"{path} exists; choose another name, or overwrite it explicitly")
            with aside(path) as fresh:
                database.create_file(fresh, first)
                set_aside = put_in_place(fresh, path)
            return cls(path, lock, set_aside)
        except BaseException:
            lock.release()
            raise

    @classmethod
    def reopen(cls, path: Path) -> RecordingFile:
        """The file at `path`, to be recorded on."""
        lock = WriterLock.take(path)
        try:
            return cls(path, lock, log_owner.set_aside(path))
        except BaseException:
            lock.release()
            raise

    def note_set_aside(self, step: int) -> None:
        """Note in the journal, once, what has become of another session's log. Inside a transaction."""
        if self.set_aside == self._noted:
            return
        self._noted = self.set_aside
        text = f"{files.wal_of(self.path).name} was the log of another session: it is {self.set_aside} now"
        event = rows.next_id(self.connection, "events")
        rows.insert(self.connection, "events", [(event, 0, step, "note", text, json_text(None))])

    def check_in_place(self) -> None:
        """`SessionMoved` where the name does not lead to this file any more: what is written would be lost with it."""
        now = identity(self.path)
        if now != self._file:
            what = "deleted or moved away" if now is None else "replaced by another file"
            raise SessionMoved(f"{self.path} was {what} while it was being recorded.")
        log = identity(files.wal_of(self.path))
        if log != self._log and self._log is not None:
            log = self._renewed_log()
        self._log = log

    def _renewed_log(self) -> _Identity | None:
        """Somebody has deleted or replaced the log. Its content is to be had as long as it is open: it is folded into
        the file, and another log begun. Not while a reader is attached: it would look for the new log's pages in the
        old one."""
        self.set_aside = log_owner.set_aside(self.path) or self.set_aside
        if not database.fold(self.connection):
            raise SessionMoved(
                f"{files.wal_of(self.path)} was deleted or replaced while it was being recorded."
            )
        renewed = database.connect_writer(self.path)
        self.connection.close()
        self.connection = renewed
        return identity(files.wal_of(self.path))

    def close(self) -> None:
        """Mark in the file that it is closed, fold the log into it and let others write it. A file that is not in its
        place is only let go: what goes by its name is somebody else's."""
        folded = True
        try:
            self.check_in_place()
            database.empty_log(self.connection)  # so that on a full disk there is room for the mark
            mark.clear(self.connection)
            folded = database.fold(self.connection)
        except sqlite3.Error:
            # With the last connection SQLite moves the log into the file and takes it away: then there is room.
            self.connection.close()
            if files.exists(files.wal_of(self.path)):
                raise
            folded = database.mark_closed(self.path)
        finally:
            self.connection.close()
            if not folded:
                database.tidy(self.path)
            self._lock.release()


@contextmanager
def aside(path: Path) -> Iterator[Path]:
    """NAME-new, where the file that becomes `path` is made; removed again unless it was put in its place. The holder
    of the lock alone makes such files, so one that is there already was left by a writer that was killed."""
    fresh = path.with_name(path.name + "-new")
    if files.exists(fresh) and not _half_made(fresh):
        raise SessionWriteError(
            f"{fresh} is in the way: it is not Lockstep's. Move it, or record to another name."
        )
    fresh.unlink(missing_ok=True)
    try:
        yield fresh
    finally:
        fresh.unlink(missing_ok=True)


def put_in_place(fresh: Path, path: Path, move: Callable[[Path, Path], None] = os.replace) -> Path | None:
    """Rename `fresh` to `path`, whose lock the caller holds; `move` is for one that may lie on another disk. What
    SQLite has left beside the old file goes with it; a log that is not the old file's is set aside, and its new name
    returned."""
    with fresh.open("rb+") as file:
        os.fsync(file.fileno())
    set_aside = log_owner.set_aside(path)
    for stale in files.companions(path):
        stale.unlink(missing_ok=True)
    move(fresh, path)
    return set_aside


def _half_made(file: Path) -> bool:
    if not stat.S_ISREG(file.lstat().st_mode):
        return False
    with file.open("rb") as opened:
        start = opened.read(len(files.MAGIC))
    return start == files.MAGIC or not any(start)  # pages are not written in their order


def identity(path: Path) -> _Identity | None:
    """What `path` names, by device and inode; None for nothing."""
    try:
        found = path.lstat()
    except OSError:
        return None
    return found.st_dev, found.st_ino
