"""Golden sessions on disk, so that the same question is put to a reference only once (torch-free).

One file an answer, KEY-CONTENT.session: the hash of all that decides the answer, then that of the file, by which
damage is found without reading what is in it. Files appear whole (written in a folder of the recorder's, then renamed);
a damaged one is set aside and recorded again; the oldest go when the cache outgrows its limit.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import stat
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path

import msgspec

from lockstep.engine.scratch import ScratchFolder, deliver
from lockstep.engine.text import printable
from lockstep.sessions.errors import SessionWriteError
from lockstep.sessions.format import files
from lockstep.sessions.format.schema import SCHEMA_VERSION
from lockstep.sessions.limits import UNLIMITED
from lockstep.sessions.remove import remove
from lockstep.sessions.verify import verify
from lockstep.workbench.paths import (
    entries,
    golden_directory,
    new_golden_directory,
    shared_golden_directory,
)
from lockstep.workbench.references.request import GoldenRequest, ReferenceName

#: What is reported of something that the user should know.
Warn = Callable[[str], None]

#: Raised whenever the recorder starts to write something else for the same question.
FORMAT = 5

#: What decides a reference's numbers, besides what is asked of it.
PACKAGES: dict[ReferenceName, tuple[str, ...]] = {
    "transformers": ("torch", "transformers"),
    "llama.cpp": ("llama-cpp-python",),
}

#: Damaged sessions that are kept.
DAMAGED_KEPT = 3

#: The names of cached sessions: two hashes each (before FORMAT 5 one). What else is in a folder that the user named is
#: not ours to remove.
_HASH = "[0-9a-f]" * 32
_NAMES = (f"{_HASH}-{_HASH}.session", f"{_HASH}.session")

#: Bytes that the cache may hold; golden sessions keep every tensor of every tap.
LIMIT_BYTES = 8 << 30


#: What distinguishes a weight file from another of the same size: its mtime in ns, or the hash of its content.
Stamp = tuple[int, int | str]


def stamp(file: Path) -> Stamp:
    """The stamp of a weight file. A copy on another machine has an mtime of its own, so where golden sessions go from
    machine to machine the content counts."""
    found = file.stat()
    mtime = found.st_mtime_ns
    return found.st_size, mtime if shared_golden_directory() is None else _content(file, found.st_size, mtime)


@functools.cache
def _content(file: Path, size: int, mtime: int) -> str:
    """The hash of a file's content, which is read once as long as size and mtime stay."""
    return _content_hash(file)


def cache_key(request: GoldenRequest, checkpoint: str, stamps: Sequence[Stamp]) -> str:
    """Hash of the checkpoint, the ids, the steps, the dtype, the device and the libraries' versions.

    `checkpoint` is its digest, which only samples large tensors; `stamps` of each weight file distinguish what the
    samples miss.
    """
    question = msgspec.to_builtins(request) | {
        "model": None,  # where a checkpoint lies does not change what it computes
        "checkpoint": checkpoint,
        "stamps": stamps,
        "format": [FORMAT, SCHEMA_VERSION],
        "versions": [version(package) for package in PACKAGES[request.reference]],
    }
    return hashlib.blake2b(json.dumps(question, sort_keys=True).encode(), digest_size=16).hexdigest()


def find(key: str, warn: Warn) -> Path | None:
    """The session of that key, None where there is none. One that is damaged is set aside, which `warn` reports."""
    for path in entries(golden_directory(), f"{key}-*.session"):
        if problem := _problem(path):
            warn(
                f"the cached golden reference {path.name} is damaged ({problem}): it is kept as "
                f"{_set_aside(path).name} beside it, and recorded again"
            )
            continue
        with contextlib.suppress(OSError):  # somebody else's, to be read only
            os.utime(path)  # used now: the last to be pruned
        return path
    return None


def folder() -> ScratchFolder:
    """A folder to record in; on the file system of the cached sessions, unless others can write there."""
    return ScratchFolder.make("golden", new_golden_directory())


def keep(key: str, recorded: Path) -> Path:
    """Put what was recorded in a `folder` under its key; returns where it lies now."""
    path = golden_directory() / f"{key}-{_content_hash(recorded)}.session"
    deliver(recorded, path)
    prune(path.parent, keep=path, names=_NAMES)
    return path


def _content_hash(file: Path) -> str:
    with file.open("rb") as opened:  # many processors have instructions for this one
        return hashlib.file_digest(opened, "sha256").hexdigest()[:32]


def prune(
    directory: Path, *, keep: Path, limit: int = LIMIT_BYTES, names: Sequence[str] = ("[!.]*.session",)
) -> None:
    """Delete the sessions (whose name matches one of the globs `names`) used longest ago until what is left fits in
    `limit` bytes; `keep` always stays."""
    found = entries(directory, *names)
    files = {path: one for path, one in found.items() if path != keep and stat.S_ISREG(one.st_mode)}
    total = keep.stat().st_size + sum(one.st_size for one in files.values())
    for path, one in reversed(files.items()):
        if total <= limit:
            return
        try:
            remove(path)
        except SessionWriteError:  # in use, or not ours to remove: the next one goes
            continue
        total -= one.st_size


def _problem(path: Path) -> str:
    """What is wrong with a cached session; "" for nothing."""
    if any(map(files.exists, files.companions(path))):
        return "somebody has written to it"
    try:
        if path.stem.endswith(_content_hash(path)):
            return ""
    except OSError as error:
        return error.strerror or str(error)
    found = verify(path, UNLIMITED) or ["it is not what was recorded"]
    return printable(found[0].partition(". ")[0], 150)  # without what to do about it


def _set_aside(path: Path) -> Path:
    """Move a damaged session out of the way. The newest few are kept, for whoever wants to know what happened."""
    aside = path.with_suffix(".damaged")
    path.replace(aside)
    for companion in files.companions(path):
        companion.unlink(missing_ok=True)
    os.utime(aside)
    for old in list(entries(path.parent, "*.damaged"))[DAMAGED_KEPT:]:
        old.unlink(missing_ok=True)
    return aside
