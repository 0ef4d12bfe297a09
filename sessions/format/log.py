"""SQLite's write-ahead log, looked at for damage: SQLite drops all commits from the first damaged frame on, silently.

https://www.sqlite.org/fileformat2.html §4: a header of 32 bytes, then frames of 24 bytes and a page. A frame belongs to
the log if it carries the header's two salts, and holds if its checksum, which runs on from frame to frame, matches.
"""

from __future__ import annotations

import struct
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from sessions.format.files import wal_of

_HEADER, _FRAME = 32, 24
_MAGICS = {0x377F0682: "<u4", 0x377F0683: ">u4"}
Sums = tuple[int, int]


def lost_commits(path: Path) -> str:
    """ "incomplete: …" where frames of the session's log are damaged and commits in them lost; "" where none is.

    Looked at twice: a log that is just being written looks damaged for a moment.
    """
    return "" if not _damage(path) else _damage(path)


def _damage(path: Path) -> str:
    log = wal_of(path)
    try:
        content = log.read_bytes()
    except OSError:
        return ""
    if len(content) < _HEADER:
        return ""
    advice = "What was committed before can be read; copy both files again from where they are whole."
    order = _MAGICS.get(int.from_bytes(content[:4], "big"), "")
    if not order or _sums(content[:24], order, (0, 0)) != struct.unpack(">II", content[24:32]):
        return f"incomplete: the header of {log.name} is damaged, none of its steps can be read. {advice}"
    frame = _first_damaged(content, order)
    if frame is None:
        return ""
    return f"incomplete: {log.name} is damaged at frame {frame}, what was committed from there on is lost. {advice}"


def _first_damaged(content: bytes, order: str) -> int | None:
    """The first frame of the log that does not hold although it is one of it; None where all of them hold.

    What follows the log's last frame is a rest: of an earlier log, with other salts, or of a transaction that was
    rolled back, without a commit.
    """
    size = _FRAME + int.from_bytes(content[8:12], "big")
    salts = content[16:24]
    sums: Sums = struct.unpack(">II", content[24:32])
    starts = range(_HEADER, len(content) - size + 1, size)
    for number, at in enumerate(starts):
        frame = content[at : at + size]
        sums = _sums(frame[:8] + frame[_FRAME:], order, sums)
        if frame[8:16] == salts and sums == struct.unpack(">II", frame[16:24]):
            continue
        ours = frame[8:12] == salts[:4] or frame[12:16] == salts[4:]
        if (ours and _commits(frame)) or any(
            content[later + 8 : later + 16] == salts and _commits(content[later : later + 8])
            for later in starts[number + 1 :]
        ):
            return number
        return None
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
