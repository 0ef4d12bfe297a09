"""Temporary folders that know their owner (torch-free).

Whoever uses such a folder holds a shared lock on the file `owner` in it, which the system releases however that
process ends. The last to leave removes the folder. One that nobody holds was left by processes that were killed: the
next process that makes a folder in the same place removes it. Age does not count, nor does a name alone: nothing is
removed that does not belong to this user and does not hold such a file.

Folders lie where only this user can write (`_places`). Each is checked, emptied and removed through descriptors of
itself and of the place that it lies in, never by its path: a link or another folder that is put in its place, or in the
place of one above it, is not touched.

    with ScratchFolder.make("golden") as folder:
        (folder.path / "jobs.json").write_bytes(…)
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import os
import secrets
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from lockstep.engine.folders import entries_stay, ours_alone, out_of_reach, private_folder, state_directory

_PREFIX, _OWNER, _LEFT = "lockstep-", "owner", ".left"
_MARK = b"Lockstep removes this folder once nobody holds a lock on this file.\n"
_FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_OWNER_FLAGS = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_PLACE_FLAGS = getattr(os, "O_PATH", os.O_RDONLY) | os.O_DIRECTORY | os.O_CLOEXEC

#: Where this process has removed what others left.
_swept: set[Path] = set()


class ScratchFolder:
    """One user's hold on a folder. Close it."""

    def __init__(self, path: Path, opened: _Opened) -> None:
        """Use `make` or `join`."""
        self.path, self._opened = path, opened
        with contextlib.suppress(
            OSError
        ):  # a file system without locks: nobody will take the folder for left
            fcntl.flock(opened.owner, fcntl.LOCK_SH)

    @classmethod
    def make(
        cls, purpose: str, near: Path | None = None, *, small: bool = False, longest: int = 4096
    ) -> ScratchFolder:
        """A new folder lockstep-PURPOSE-… of this user alone (mode 0700).

        It lies in `near`, on whose disk its content belongs, where nobody else can write there; else in a place of
        this user's, which may be in memory if what it is for is `small`. `longest`: bytes of that place's path.
        OSError where there can be none."""
        refused = []
        for place in _places(near, small):
            if len(os.fsencode(place)) <= longest:
                try:
                    return cls._make(purpose, place)
                except OSError as error:
                    refused.append(f"{place}: {error.strerror}")
        why = f"no place for temporary files that you alone can write to ({'; '.join(refused)}): set TMPDIR to one"
        raise OSError(errno.EACCES, why)

    @classmethod
    def _make(cls, purpose: str, place: Path) -> ScratchFolder:
        sweep(private_folder(place))
        while True:
            opened = _Opened.made(place, f"{_PREFIX}{purpose}-{secrets.token_hex(4)}")
            folder = cls(place / opened.name, opened)
            if _leads_to(_OWNER, opened.folder, opened.owner):  # else it was swept before it was locked
                return folder
            opened.close()

    @classmethod
    def join(cls, path: Path) -> ScratchFolder:
        """Hold a folder that another process has made. OSError where it is gone, or was made by nobody here."""
        return cls(path, _Opened.found(path))

    def close(self) -> None:
        """Let go of the folder. The last to do so removes it. Safe to call again."""
        if self._opened.owner >= 0:
            self._opened.remove_if_left()
            self._opened.close()

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


def deliver(finished: Path, target: Path) -> None:
    """Put a finished file of a scratch folder at `target`, in the place of what is there: whole, or not at all.

    From another disk it is copied to a file beside `target` first. Nobody has made that before, nor put a link there.
    """
    try:
        os.replace(finished, target)
        return
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
    place = os.open(target.parent, _PLACE_FLAGS)
    fresh = f"{_PREFIX}{secrets.token_hex(8)}.new"
    try:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        made = os.open(fresh, flags, 0o600, dir_fd=place)
        try:
            with finished.open("rb") as source, open(made, "wb") as copy:
                shutil.copyfileobj(source, copy, 1 << 20)
                os.fchmod(made, stat.S_IMODE(os.fstat(source.fileno()).st_mode))
                copy.flush()
                os.fsync(made)
            os.rename(fresh, target.name, src_dir_fd=place, dst_dir_fd=place)
        except BaseException:
            os.unlink(fresh, dir_fd=place)
            raise
    finally:
        os.close(place)
    finished.unlink()


def _places(near: Path | None, small: bool) -> Iterator[Path]:
    """Where a folder may lie, best first. The directory of temporary files counts where it is this user's, as one that
    TMPDIR names may be; in one that all share this user has a folder."""
    if near is not None and out_of_reach(near):
        yield near.resolve()
    runtime = Path(os.environ.get("XDG_RUNTIME_DIR", ""))
    if small and runtime.is_absolute():
        yield runtime
    shared = []
    for temporary in _temporary():
        found = temporary.stat()
        if ours_alone(found):
            yield temporary
        elif entries_stay(found):
            shared.append(temporary / f"{_PREFIX}{os.getuid()}")
    first = 1 if "TMPDIR" in os.environ else 0
    yield from (*shared[:first], state_directory() / "scratch", *shared[first:])


def _temporary() -> list[Path]:
    """The directories of temporary files; the second is for whom the path of the first is too long."""
    with contextlib.suppress(OSError):  # none can be written
        return list(dict.fromkeys(Path(one).resolve(strict=True) for one in (tempfile.gettempdir(), "/tmp")))
    return []


@dataclass(slots=True)
class _Opened:
    """Descriptors of a folder, of the place where it has the given name, and of its owner file."""

    place: int
    name: str
    folder: int = -1
    owner: int = -1

    @classmethod
    def made(cls, place: Path, name: str) -> _Opened:
        """A new folder; OSError where others could write to the place, which would let them exchange it."""
        opened = cls(os.open(place, _FOLDER_FLAGS), name)
        try:
            if not ours_alone(os.fstat(opened.place)):
                raise PermissionError(errno.EPERM, "it is not yours alone")
            os.mkdir(name, 0o700, dir_fd=opened.place)
            opened.folder = os.open(name, _FOLDER_FLAGS, dir_fd=opened.place)
            if not ours_alone(os.fstat(opened.folder)) or os.listdir(opened.folder):
                raise PermissionError(errno.EPERM, f"{name} is not the folder that was made")
            opened.owner = os.open(_OWNER, _OWNER_FLAGS | os.O_CREAT | os.O_EXCL, 0o600, dir_fd=opened.folder)
            os.write(opened.owner, _MARK)
        except OSError:  # a full disk
            if opened.owner >= 0:
                opened.remove()
            opened.close()
            raise
        return opened

    @classmethod
    def found(cls, path: Path) -> _Opened:
        """A folder that `made` has made for this user; OSError for anything else."""
        opened = cls(os.open(path.parent, _PLACE_FLAGS), path.name)
        try:
            opened.folder = os.open(path.name, _FOLDER_FLAGS, dir_fd=opened.place)
            opened.owner = os.open(_OWNER, _OWNER_FLAGS, dir_fd=opened.folder)
            if not opened.is_ours():
                raise PermissionError(
                    errno.EPERM, f"{path} is no temporary folder of Lockstep's and this user's"
                )
        except OSError:
            opened.close()
            raise
        return opened

    def is_ours(self) -> bool:
        """Whether it is a folder of this user alone, with an owner file that Lockstep has written for this user."""
        folder, owner = os.fstat(self.folder), os.fstat(self.owner)
        ours = stat.S_ISREG(owner.st_mode) and owner.st_uid == os.getuid() and ours_alone(folder)
        return ours and os.pread(self.owner, len(_MARK) + 1, 0) == _MARK

    def remove_if_left(self) -> None:
        """Remove a folder that nobody else holds.

        Under another name first, lest a thread of a process that is just ending puts more into it meanwhile."""
        with contextlib.suppress(OSError):  # another holds it, or the file system fails: swept another time
            fcntl.flock(self.owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
            left = f"{self.name.removesuffix(_LEFT)}{_LEFT}"
            if _leads_to(self.name, self.place, self.folder):
                os.rename(self.name, left, src_dir_fd=self.place, dst_dir_fd=self.place)
                self.name = left
            self.remove()

    def remove(self) -> None:
        """Remove the folder, the owner file last: cut short, it is still known for what it is. Wherever it lies by now
        it is empty then; its name is removed where that still leads to it."""
        _empty(self.folder)
        os.unlink(_OWNER, dir_fd=self.folder)
        if _leads_to(self.name, self.place, self.folder):
            os.rmdir(self.name, dir_fd=self.place)

    def close(self) -> None:
        """Close what is open."""
        for descriptor in (self.place, self.folder, self.owner):
            if descriptor >= 0:
                os.close(descriptor)
        self.place = self.folder = self.owner = -1


def _sweep_one(path: Path) -> None:
    with contextlib.suppress(OSError):  # not a folder of ours
        opened = _Opened.found(path)
        opened.remove_if_left()
        opened.close()


def _leads_to(name: str, place: int, descriptor: int) -> bool:
    """Whether `name` in the folder `place` is what is open, and no link to it."""
    try:
        named = os.stat(name, dir_fd=place, follow_symlinks=False)
    except OSError:
        return False
    return os.path.samestat(named, os.fstat(descriptor))


def _empty(folder: int) -> None:
    """Remove all that is in an open folder but its owner file, following no link.

    A folder that lies in one below is brought up to this one first, so that no depth is too great."""
    raised = (f".{secrets.token_hex(4)}-{number}" for number in itertools.count())
    while names := [name for name in os.listdir(folder) if name != _OWNER]:
        for name in names:
            found = os.stat(name, dir_fd=folder, follow_symlinks=False)
            if not stat.S_ISDIR(found.st_mode):
                os.unlink(name, dir_fd=folder)
                continue
            below = os.open(name, _FOLDER_FLAGS, dir_fd=folder)
            try:
                if not os.path.samestat(found, os.fstat(below)):
                    raise PermissionError(errno.EPERM, f"{name} was exchanged")
                _empty_but_folders(below, folder, raised)
            finally:
                os.close(below)
            os.rmdir(name, dir_fd=folder)


def _empty_but_folders(below: int, above: int, names: Iterator[str]) -> None:
    """Remove the files of an open folder; its folders go to the one above, under `names`."""
    for name in os.listdir(below):
        if stat.S_ISDIR(os.stat(name, dir_fd=below, follow_symlinks=False).st_mode):
            os.rename(name, next(names), src_dir_fd=below, dst_dir_fd=above)
        else:
            os.unlink(name, dir_fd=below)
