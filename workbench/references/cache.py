"""Golden sessions on disk, so that the same question is put to transformers only once (torch-free).

One file a question, named by the hash of all that decides its answer. Files appear whole (written aside,
then renamed); a damaged one is recorded again; the oldest go when the cache outgrows its limit.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path

import msgspec

from sessions import Session, SessionError
from sessions.errors import SessionBusy
from sessions.remove import remove
from workbench.paths import golden_directory
from workbench.references.request import GoldenRequest

#: Raised whenever the recorder starts to write something else for the same question.
FORMAT = 2

#: Bytes that the cache may hold; golden sessions keep every tensor of every tap.
LIMIT_BYTES = 8 << 30


def cache_key(request: GoldenRequest, checkpoint: str, stamps: Sequence[tuple[int, int]]) -> str:
    """Hash of the checkpoint, the ids, the steps, the dtype, the device and the libraries' versions.

    `checkpoint` is its digest, which only samples large tensors; `stamps` (size and mtime in ns of each
    weight file) tell apart what the samples miss.
    """
    question = msgspec.to_builtins(request) | {
        "model_dir": None,  # where a checkpoint lies does not change what it computes
        "checkpoint": checkpoint,
        "stamps": stamps,
        "format": FORMAT,
        "versions": [version("torch"), version("transformers")],
    }
    return hashlib.blake2b(json.dumps(question, sort_keys=True).encode(), digest_size=16).hexdigest()


def find(key: str) -> Path | None:
    """The session of that key, None where there is none or it is damaged (then it is deleted)."""
    path = _path(key)
    if _usable(path):
        os.utime(path)  # used now: the last to be pruned
        return path
    remove(path)
    return None


@contextmanager
def aside() -> Iterator[Path]:
    """A name beside the cached sessions to record to, free again afterwards."""
    directory = golden_directory()
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f".{os.getpid()}-{secrets.token_hex(8)}.session"
    try:
        yield path
    finally:
        remove(path)


def keep(key: str, recorded: Path) -> Path:
    """Put what was recorded `aside` under its key; returns where it lies now."""
    path = _path(key)
    recorded.replace(path)
    prune(path.parent, keep=path)
    return path


def _path(key: str) -> Path:
    return golden_directory() / f"{key}.session"


def prune(directory: Path, *, keep: Path, limit: int = LIMIT_BYTES, names: str = "[!.]*.session") -> None:
    """Delete the sessions (whose name matches the glob `names`) used longest ago until what is left fits in
    `limit` bytes; `keep` always stays."""
    stats = {path: path.stat() for path in directory.glob(names) if path != keep}
    total = keep.stat().st_size + sum(stat.st_size for stat in stats.values())
    for path, stat in sorted(stats.items(), key=lambda item: item[1].st_mtime):
        if total <= limit:
            return
        try:
            remove(path)
        except SessionBusy:  # in use: the next one goes
            continue
        total -= stat.st_size


def _usable(path: Path) -> bool:
    if not path.is_file():
        return False
    try:
        with Session.open(path) as session:
            return len(session.steps(0)) > 0
    except SessionError:
        return False
