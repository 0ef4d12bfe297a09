"""SQLite's write-ahead log, looked at for damage: SQLite drops all commits from the first damaged frame on, silently.

https://www.sqlite.org/fileformat2.html §4: a header of 32 bytes, then frames of 24 bytes and a page. A frame belongs to
the log if it carries the header's two salts, and holds if its checksum, which runs on from frame to frame, matches.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from lockstep.sessions.format.files import wal_of

_HEADER, _FRAME = 32, 24
_FIRST_PAGE, _FIRST = (1).to_bytes(4, "big"), 100  # the bytes of it that are the database's header
_MAGICS = {0x377F0682: "<u4", 0x377F0683: ">u4"}
_PAGE_SIZES = frozenset(1 << bits for bits in range(9, 17))
_ADVICE = (
    "What was committed before can be read; copy both files again from where they are whole, or, after a power cut, "
    "keep what can be read with `lockstep sessions copy --salvage`."
)
Sums = tuple[int, int]


def lost_commits(path: Path, check_time: Callable[[], None] = lambda: None) -> str:
    """ "incomplete: …" where frames of the session's log are damaged and commits in them lost; "" where none is.

    Looked at twice: a log that is just being written looks damaged for a moment. `check_time` ends what takes too long.
    """
    return "" if not _damage(path, check_time) else _damage(path, check_time)


def _damage(path: Path, check_time: Callable[[], None]) -> str:
    name = wal_of(path).name
    try:
        with wal_of(path).open("rb") as log:
            header = log.read(_HEADER)
            if len(header) < _HEADER:
                return ""
            order = _MAGICS.get(int.from_bytes(header[:4], "big"), "")
            if not order or _sums(header[:24], order, (0, 0)) != struct.unpack(">II", header[24:]):
                return (
                    f"incomplete: the header of {name} is damaged, none of its steps can be read. {_ADVICE}"
                )
            frame = _first_damaged(log, header, order, check_time)
    except OSError:
        return ""
    if frame is None:
        return ""
    return (
        f"incomplete: {name} is damaged at frame {frame}, what was committed from there on is lost. {_ADVICE}"
    )


def first_pages(path: Path) -> Iterator[bytes]:
    """The beginning of each copy of the database's first page in the log, unchecked, up to the log's last frame."""
    try:
        with wal_of(path).open("rb") as log:
            header = log.read(_HEADER)
            page = int.from_bytes(header[8:12], "big")
            while (
                page in _PAGE_SIZES
                and len(head := log.read(_FRAME)) == _FRAME
                and head[8:16] == header[16:24]
            ):
                content = log.read(min(page, _FIRST)) if head[:4] == _FIRST_PAGE else b""
                if len(content) == _FIRST:
                    yield content
                log.seek(page - len(content), os.SEEK_CUR)
    except OSError:
        return


def _first_damaged(log: BinaryIO, header: bytes, order: str, check_time: Callable[[], None]) -> int | None:
    """The first frame of the log that does not hold although it is one of it; None where all of them hold.

    What follows the log's last frame is a rest: of an earlier log, with other salts, or of a transaction that was
    rolled back, without a commit.
    """
    page, salts = int.from_bytes(header[8:12], "big"), header[16:24]
    if page not in _PAGE_SIZES:
        return 0
    sums: Sums = struct.unpack(">II", header[24:])
    number, suspect = 0, None
    while len(head := log.read(_FRAME)) == _FRAME:
        check_time()
        if suspect is None:
            content = log.read(page)
            if len(content) < page:
                break
            sums = _sums(head[:8] + content, order, sums)
            if head[8:16] != salts or sums != struct.unpack(">II", head[16:]):
                suspect = number
                if _commits(head) and (head[8:12] == salts[:4] or head[12:16] == salts[4:]):
                    return suspect
        else:
            log.seek(page, os.SEEK_CUR)
            if _commits(head) and head[8:16] == salts:
                return suspect
        number += 1
    return None


def _commits(frame: bytes) -> bool:
    """Whether the frame is the last of a transaction: it gives the size of the database then."""
    return any(frame[4:8])


def _sums(data: bytes, order: str, before: Sums) -> Sums:
    """The checksum of §4.2 continued over `data`: s0 += x[i] + s1; s1 += x[i+1] + s0, modulo 2^32, two words at a
    time. It is linear, so all words are weighted at once."""
    words = np.frombuffer(data, order).astype(np.uint32)
    weights = _weights(len(words) // 2)
    state = np.array(before, np.uint32)
    with np.errstate(over="ignore"):
        sums = weights[-1] @ state
        # The pair i meets the matrix once less for each pair before it.
        sums = sums + np.einsum("nij,nj->i", weights[-2::-1], _entered(words.reshape(-1, 2)))
    return int(sums[0]), int(sums[1])


def _entered(pairs: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """What a pair adds to (s0, s1): (x0, x0 + x1)."""
    return np.stack([pairs[:, 0], pairs[:, 0] + pairs[:, 1]], axis=1)


@cache
def _weights(count: int) -> NDArray[np.uint32]:
    """The powers 0 to `count` of [[1, 1], [1, 2]], which a pair of zeros applies to (s0, s1)."""
    powers = np.empty((count + 1, 2, 2), np.uint32)
    powers[0] = np.eye(2, dtype=np.uint32)
    step = np.array([[1, 1], [1, 2]], np.uint32)
    for i in range(count):
        powers[i + 1] = step @ powers[i]
    return powers
