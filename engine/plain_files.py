"""The one opener of files that somebody else has written (torch-free): regular files alone, none larger than agreed.

A link may lead anywhere, opening a pipe waits for its writer, a device never ends, and a size is whatever its writer
chose. What was opened is what was checked: the name may be given to something else meanwhile.
"""

from __future__ import annotations

import os
import stat
from io import BufferedReader
from pathlib import Path

from lockstep.engine.text import bytes_text

_KINDS = {
    stat.S_IFDIR: "a directory", stat.S_IFIFO: "a named pipe", stat.S_IFSOCK: "a socket", stat.S_IFLNK: "a link",
}  # fmt: skip


class PlainFileError(Exception):
    """A file that is not read; the message states why, without its name."""


def open_plain(path: Path, most: int) -> BufferedReader:
    """Open a regular file of at most `most` bytes for reading, itself and not what it points to. PlainFileError for
    anything else."""
    try:
        _check(path.lstat(), most)  # to open a device may do something to it
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        descriptor = os.open(path, flags)
    except (OSError, ValueError) as error:
        raise PlainFileError(f"cannot be read: {getattr(error, 'strerror', None) or error}") from error
    try:
        _check(os.fstat(descriptor), most)
    except PlainFileError:
        os.close(descriptor)
        raise
    return os.fdopen(descriptor, "rb")


def kind_of(mode: int) -> str:
    """What a file that is not regular is, in words."""
    return _KINDS.get(stat.S_IFMT(mode), "a device")


def _check(found: os.stat_result, most: int) -> None:
    if stat.S_ISLNK(found.st_mode):
        raise PlainFileError("is a link: copy what it points to there")
    if not stat.S_ISREG(found.st_mode):
        raise PlainFileError(f"is {kind_of(found.st_mode)}, not a file: put the file itself there")
    if found.st_size > most:
        raise PlainFileError(f"{bytes_text(found.st_size)}; at most {bytes_text(most)} are read")
