"""Temporary folders that know their owner (torch-free).

Whoever uses such a folder holds a shared lock on the file `owner` in it, which the system releases however that
process ends. The last to leave removes the folder. One that nobody holds was left by processes that were killed: the
next process that makes a folder in the same place removes it. Age does not count, nor does a name alone: nothing is
removed that does not belong to this user and does not hold such a file.

    with ScratchFolder.make("golden") as folder:
        (folder.path / "jobs.json").write_bytes(…)
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
import time
from pathlib import Path

_PREFIX, _OWNER, _LEFT = "lockstep-", "owner", ".left"
_MARK = b"Lockstep removes this folder once nobody holds a lock on this file.\n"

#: Where this process has removed what others left.
_swept: set[Path] = set()


class ScratchFolder:
    """One user's hold on a folder. Close it."""

    def __init__(self, path: Path, descriptor: int) -> None:
        """Use `make` or `join`."""
        self.path, self._descriptor = path, descriptor

    @classmethod
    def make(cls, purpose: str, place: Path | None = None) -> ScratchFolder:
        """A new folder lockstep-PURPOSE-… of this user alone (mode 0700), in `place` (None: the system's directory of
        temporary files). OSError where there can be none."""
        place = place or Path(tempfile.gettempdir())
        sweep(place)
        while True:
            path = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{purpose}-", dir=place))
            try:
                descriptor = os.open(path / _OWNER, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
                os.write(descriptor, _MARK)
            except OSError:  # a full disk
                shutil.rmtree(path, ignore_errors=True)
                raise
            with contextlib.suppress(
                OSError
            ):  # a file system without locks: nobody will take the folder for left
                fcntl.flock(descriptor, fcntl.LOCK_SH)
            if (path / _OWNER).exists():  # else it was swept before it was locked
                return cls(path, descriptor)
            os.close(descriptor)

    @classmethod
    def join(cls, path: Path) -> ScratchFolder:
        """Hold a folder that another process has made. OSError where it is gone, or was made by nobody here."""
        descriptor = _open_owner(path)
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_SH)
        return cls(path, descriptor)

    def close(self) -> None:
        """Let go of the folder. The last to do so removes it. Safe to call again."""
        if self._descriptor >= 0:
            _remove_if_left(self.path, self._descriptor)
            os.close(self._descriptor)
            self._descriptor = -1

    def __enter__(self) -> ScratchFolder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def remove_once_left(path: Path, patience: float = 2.0) -> None:
    """Remove a folder whose user is just about to be gone; after `patience` seconds leave it to be swept."""
    deadline = time.monotonic() + patience
    while path.exists() and time.monotonic() < deadline:
        _sweep_one(path)
        time.sleep(0.01)


def sweep(place: Path) -> None:
    """Remove the folders in `place` that killed processes have left; once a process."""
    if place in _swept:
        return
    _swept.add(place)
    for path in place.glob(f"{_PREFIX}*"):
        _sweep_one(path)


def _sweep_one(path: Path) -> None:
    with contextlib.suppress(OSError):  # not a folder of ours
        descriptor = _open_owner(path)
        _remove_if_left(path, descriptor)
        os.close(descriptor)


def _open_owner(path: Path) -> int:
    """The owner file of a folder that `make` has made for this user; OSError for anything else."""
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        descriptor = os.open(_OWNER, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
        found = os.fstat(descriptor)
        ours = stat.S_ISREG(found.st_mode) and found.st_uid == os.fstat(folder).st_uid == os.getuid()
        if ours and os.pread(descriptor, len(_MARK) + 1, 0) == _MARK:
            return descriptor
        os.close(descriptor)
    finally:
        os.close(folder)
    raise PermissionError(f"{path} is no temporary folder of Lockstep's and this user's")


def _remove_if_left(path: Path, descriptor: int) -> None:
    """Remove a folder that nobody else holds, the owner file last: cut short, it is still known for what it is.

    Under another name first, lest a thread of a process that is just ending puts more into it meanwhile.
    """
    with contextlib.suppress(
        OSError
    ):  # held by another, or on a file system that fails: it is swept another time
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        gone = path.rename(path.with_name(f"{path.name.removesuffix(_LEFT)}{_LEFT}"))
        for entry in os.scandir(gone):
            if entry.is_dir(follow_symlinks=False):
                shutil.rmtree(entry.path)
            elif entry.name != _OWNER:
                os.unlink(entry.path)
        os.unlink(gone / _OWNER)
        gone.rmdir()
