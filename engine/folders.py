"""Folders that belong to this user alone (torch-free)."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

_NOBODY_ELSE_WRITES = stat.S_IWGRP | stat.S_IWOTH


def state_directory() -> Path:
    """What reports on earlier runs and may be lost: `$LOCKSTEP_STATE_DIR`, or the user's state directory (XDG)."""
    if root := os.environ.get("LOCKSTEP_STATE_DIR"):
        return Path(root)
    # Imported here: a damaged installation is to be reported as well.
    from platformdirs import user_state_path

    return user_state_path("lockstep", appauthor=False)


def private_folder(path: Path) -> Path:
    """`path`, made if need be with every folder that it lacks, mode 0700. One that is there stays as it is."""
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    for folder in reversed(missing):
        folder.mkdir(0o700, exist_ok=True)
    if not path.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path))
    return path


def ours_alone(found: os.stat_result) -> bool:
    """Whether a folder belongs to this user, and nobody else can write to it."""
    return found.st_uid == os.getuid() and not found.st_mode & _NOBODY_ELSE_WRITES


def entries_stay(found: os.stat_result) -> bool:
    """Whether nobody else can rename what this user has in a folder: only this user and root can write to it, or it
    is sticky, as /tmp is."""
    others = found.st_mode & _NOBODY_ELSE_WRITES and not found.st_mode & stat.S_ISVTX
    return found.st_uid in (0, os.getuid()) and not others


def out_of_reach(path: Path) -> bool:
    """Whether `path` is a folder of this user's that nobody else can write to, exchange, or reach under another name
    tomorrow: so it is with every folder that it lies in."""
    try:
        path = path.resolve(strict=True)
        return ours_alone(path.stat()) and all(entries_stay(folder.stat()) for folder in path.parents)
    except OSError:
        return False
