"""Statistics and checksums of many steps in little space: a compressed row a step, later a compressed column a tap.

A step is written as one array of all taps (`recent`). When CHUNK_STEPS of them have gathered they are
turned, in the transaction of the step that completes them, into one row a tap with the step axis last
(`chunks`, `columns`): then one statistic over 10,000 steps is 157 small rows, and one step is one chunk.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sessions.errors import broken
from sessions.format import codec
from sessions.format.archive import Archive
from sessions.format.schema import CHECKSUMS, CHUNK_STEPS, STATS
from sessions.records import STATISTICS

DTYPES: dict[int, np.dtype[Any]] = {STATS: np.dtype("<f4"), CHECKSUMS: np.dtype("<u8")}
NAMES = {STATS: "statistics", CHECKSUMS: "checksums"}

_CACHED_CHUNKS = 4


def row_shape(kind: int, ranks: int) -> tuple[int, ...]:
    """The shape of one tap's entry at one step."""
    return (ranks, len(STATISTICS)) if kind == STATS else (ranks,)


def to_columns(connection: sqlite3.Connection, branch: int, kind: int, taps: int, ranks: int) -> None:
    """Turn the branch's oldest CHUNK_STEPS recent rows of `kind` into columns. Inside a transaction."""
    rows = connection.execute(
        "SELECT step, data FROM recent WHERE branch = ? AND kind = ? ORDER BY step LIMIT ?",
        (branch, kind, CHUNK_STEPS),
    ).fetchall()
    steps = [step for step, _ in rows]
    shape = (taps, *row_shape(kind, ranks))
    block = codec.decode_many([data for _, data in rows], DTYPES[kind], shape, "recent steps")
    block = np.moveaxis(block, 0, -1)
    if kind == STATS:
        block = block.swapaxes(1, 2)  # [taps, ranks, 8, steps] -> [taps, 8, ranks, steps]
    contiguous = steps[-1] - steps[0] + 1 == len(steps)
    cursor = connection.execute(
        "INSERT INTO chunks (branch, kind, first_step, last_step, steps) VALUES (?, ?, ?, ?, ?)",
        (branch, kind, steps[0], steps[-1], b"" if contiguous else codec.encode_ints(steps)),
    )
    connection.executemany(
        "INSERT INTO columns (chunk, tap, data) VALUES (?, ?, ?)",
        ((cursor.lastrowid, tap, data) for tap, data in enumerate(codec.encode_many(block, dense=True))),
    )
    connection.execute(
        "DELETE FROM recent WHERE branch = ? AND kind = ? AND step <= ?", (branch, kind, steps[-1])
    )


class StepArrays:
    """The arrays of every step, read back from either form. `taps` and `ranks` are the session's."""

    def __init__(self, archive: Archive, taps: int, ranks: int) -> None:
        self._archive = archive
        self._taps, self._ranks = taps, ranks
        self._chunks: dict[int, NDArray[np.uint8]] = {}

    def at(self, kind: int, owner: int, step: int) -> NDArray[Any] | None:
        """The array of one step, [taps, ranks(, 8)]; None if it has none."""
        with self._archive.snapshot():
            found = self._archive.query(
                "SELECT data FROM recent WHERE branch = ? AND kind = ? AND step = ?", owner, kind, step
            )
            return self._recent(found[0][0], kind) if found else self._chunked(kind, owner, step)

    def series(
        self, kind: int, tap: int, pick: tuple[int, ...], owner: int, first: int, stop: int
    ) -> tuple[NDArray[np.int64], NDArray[Any]]:
        """One number of one tap, `pick` = (rank, statistic) or (rank,), over the owner's steps in
        [first, stop): (steps, values)."""
        with self._archive.snapshot():
            # CROSS JOIN keeps SQLite from scanning all columns for the tap instead of seeking each chunk's.
            chunks = self._archive.query(
                "SELECT c.id, c.first_step, c.last_step, c.steps, k.data FROM chunks c"
                " CROSS JOIN columns k ON k.chunk = c.id AND k.tap = ? WHERE c.branch = ? AND c.kind = ?"
                " AND c.first_step < ? AND c.last_step >= ? ORDER BY c.first_step",
                *(tap, owner, kind, stop, first),
            )
            recent = self._archive.query(
                "SELECT step, data FROM recent WHERE branch = ? AND kind = ? AND step >= ? AND step < ?"
                " ORDER BY step",
                *(owner, kind, first, stop),
            )
        planes = self._planes([row[-1] for row in chunks], kind, f"tap {tap}")
        picked = planes[:, :, pick[1], pick[0]] if kind == STATS else planes[:, :, pick[0]]
        old = codec.from_planes(picked, DTYPES[kind])
        new = np.array([self._recent(data, kind)[(tap, *pick)] for _, data in recent], DTYPES[kind])
        steps = [step for row in chunks for step in _chunk_steps(*row[:4])] + [step for step, _ in recent]
        at = np.array(steps, np.int64)
        keep = (at >= first) & (at < stop)
        return at[keep], np.concatenate([old.reshape(-1), new])[keep]

    def _chunked(self, kind: int, owner: int, step: int) -> NDArray[Any] | None:
        for row in self._archive.query(
            "SELECT id, first_step, last_step, steps FROM chunks"
            " WHERE branch = ? AND kind = ? AND first_step <= ? AND last_step >= ?",
            *(owner, kind, step, step),
        ):
            steps = _chunk_steps(*row)
            if step in steps:
                planes = self._chunk(row[0], kind)[..., steps.index(step)]
                array = codec.from_planes(planes, DTYPES[kind])
                return np.ascontiguousarray(array.swapaxes(1, 2)) if kind == STATS else array
        return None

    def _chunk(self, chunk: int, kind: int) -> NDArray[np.uint8]:
        """A whole chunk's planes [taps, itemsize, (8, )ranks, steps], kept for the neighbouring steps."""
        if chunk not in self._chunks:
            where = f"chunk {chunk}"
            rows = self._archive.query("SELECT tap, data FROM columns WHERE chunk = ? ORDER BY tap", chunk)
            if [tap for tap, _ in rows] != list(range(self._taps)):
                raise broken(where, f"{len(rows)} columns where each of {self._taps} taps should have one")
            planes = self._planes([data for _, data in rows], kind, where)
            while len(self._chunks) >= _CACHED_CHUNKS:
                self._chunks.pop(next(iter(self._chunks)))
            self._chunks[chunk] = planes
        return self._chunks[chunk]

    def _planes(self, blobs: Sequence[object], kind: int, where: str) -> NDArray[np.uint8]:
        """[columns, itemsize, (8, )ranks, CHUNK_STEPS]"""
        shape = (*row_shape(kind, self._ranks)[::-1], CHUNK_STEPS)
        return codec.planes_of(blobs, DTYPES[kind], shape, f"{NAMES[kind]}, {where}")

    def _recent(self, blob: object, kind: int) -> NDArray[Any]:
        """[taps, ranks(, 8)]"""
        shape = (self._taps, *row_shape(kind, self._ranks))
        return codec.decode(blob, DTYPES[kind], shape, f"{NAMES[kind]} of a recent step")


def _chunk_steps(chunk: object, first: object, last: object, listed: object) -> Sequence[int]:
    """The CHUNK_STEPS steps of a chunk; they are stored only where they are not contiguous."""
    where = f"chunk {chunk}"
    if not isinstance(first, int) or not isinstance(last, int) or not CHUNK_STEPS <= last - first + 1 < 2**31:
        raise broken(where, f"no steps from {str(first)[:20]} to {str(last)[:20]}")
    steps = range(first, last + 1) if listed == b"" else codec.decode_ints(listed, where)
    if len(steps) != CHUNK_STEPS or steps[0] != first or steps[-1] != last:
        raise broken(where, f"{len(steps)} steps where {CHUNK_STEPS} from {first} to {last} should be")
    return steps
