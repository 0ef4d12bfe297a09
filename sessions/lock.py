"""One writer a session: whoever writes NAME.session holds a lock on NAME.session-lock beside it for as long.

The lock is flock(2) on a file of its own: the system releases it however its holder ends, so a killed writer blocks
nobody. It is not on the session itself, because closing a descriptor of that would drop the locks that SQLite holds
there for the whole process, and because NFS turns flock into the very kind of lock that SQLite uses.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import stat
import time
from pathlib import Path
from types import TracebackType

from lockstep.sessions.errors import SessionBusy, SessionWriteError
from lockstep.sessions.format.files import lock_of
from lockstep.sessions.text import clean

_TITLE = "lockstep records: "
#: Tries to get the lock, and seconds between them: `holder` takes it for a moment when it looks.
_TRIES, _PAUSE = 10, 0.02


class WriterLock:
    """The right to write one session, or to remove it. Release it."""

    def __init__(self, file: Path, descriptor: int) -> None:
        """Use `take`."""
        self._file, self._descriptor = file, descriptor

    @classmethod
    def take(cls, path: Path) -> WriterLock:
        """Lock the session at `path`, which need not exist. `SessionBusy` names who has it; OSError where no file can
        be made there."""
        file = lock_of(path)
        for _ in range(_TRIES):
            descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
            try:
                owner = _owner_in(descriptor, file)
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if _names(file, descriptor):  # else its last holder removed it meanwhile: take the next one
                    _write_owner(descriptor)
                    return cls(file, descriptor)
            except BlockingIOError:
                pass
            except BaseException:
                os.close(descriptor)
                raise
            os.close(descriptor)
            time.sleep(_PAUSE)
        raise _busy(path, owner)

    def release(self) -> None:
        """Let others write. The lock file goes as well, while it is still locked: it is this writer's own."""
        if self._descriptor < 0:
            return
        if _names(self._file, self._descriptor):
            self._file.unlink(missing_ok=True)
        os.close(self._descriptor)
        self._descriptor = -1

    def __enter__(self) -> WriterLock:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


def holder(path: Path) -> str:
    """Who is writing the session at `path`: "process 4711", with the machine's name where that is another; "" for
    nobody."""
    try:
        descriptor = os.open(lock_of(path), os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return ""
    try:
        owner = _owner_in(descriptor, lock_of(path))
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return owner
    except (OSError, SessionWriteError):  # not a lock file of ours, or a file system without locks
        return ""
    finally:
        os.close(descriptor)
    return ""


def _busy(path: Path, owner: str) -> SessionBusy:
    return SessionBusy(f"{path} is being recorded by {owner}. Let that end first, or record to another file.")


def _owner_in(descriptor: int, file: Path) -> str:
    """Who wrote the lock file. `SessionWriteError` where it is none of ours: nothing is done to such a file."""
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        raise SessionWriteError(
            f"{file} is in the way: it is no regular file. Remove it, or record elsewhere."
        )
    text = os.pread(descriptor, 256, 0).decode(errors="replace")
    if text and not text.startswith(_TITLE):
        raise SessionWriteError(
            f"{file} is in the way: it is not Lockstep's. Move it, or record to another name."
        )
    process, _, machine = text.removeprefix(_TITLE).strip().partition(" on ")
    if not process:
        return "another process"
    elsewhere = "" if machine == socket.gethostname() else f" on {machine}"
    return clean(f"process {process}{elsewhere}", limit=120)


def _write_owner(descriptor: int) -> None:
    with contextlib.suppress(
        OSError
    ):  # on a full disk the lock holds, and only its holder's name is not to be had
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{_TITLE}{os.getpid()} on {socket.gethostname()}\n".encode(), 0)


def _names(file: Path, descriptor: int) -> bool:
    """Whether the name still leads to what is open."""
    try:
        named = file.lstat()
    except OSError:
        return False
    return os.path.samestat(named, os.fstat(descriptor))
