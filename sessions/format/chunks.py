"""Statistics and checksums of many steps in little space: a compressed row a step, later a compressed column a tap.

A step is written as one array of all taps (`recent`). When CHUNK_STEPS of them have gathered they are
turned, in the transaction of the step that completes them, into one row a tap with the step axis last
(`chunks`, `columns`): then one statistic over 10,000 steps is 157 small rows, and one step is one chunk.
"""

from __future__ import annotations

import math
import sqlite3
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lockstep.sessions.errors import broken, damaged
from lockstep.sessions.format import codec, rows
from lockstep.sessions.format.archive import Archive
from lockstep.sessions.format.schema import CHECKSUMS, CHUNK_STEPS, PROTECTED_SINCE, STATS
from lockstep.sessions.limits import tensor_bytes
from lockstep.sessions.records import STATISTICS

DTYPES: dict[int, np.dtype[Any]] = {STATS: np.dtype("<f4"), CHECKSUMS: np.dtype("<u8")}
NAMES = {STATS: "statistics", CHECKSUMS: "checksums"}

_CACHED_CHUNKS = 4
#: Chunks of which one column is decoded at a time.
_TOGETHER = 64
_KEY = "WHERE branch = ? AND kind = ?"


def row_shape(kind: int, ranks: int) -> tuple[int, ...]:
    """The shape of one tap's entry at one step."""
    return (ranks, len(STATISTICS)) if kind == STATS else (ranks,)


def to_columns(connection: sqlite3.Connection, branch: int, kind: int, taps: int, ranks: int) -> None:
    """Turn the branch's oldest CHUNK_STEPS recent rows of `kind` into columns. Inside a transaction."""
    oldest = "WHERE branch = ? AND kind = ? ORDER BY step LIMIT ?"
    found = rows.several(connection, "recent", oldest, branch, kind, CHUNK_STEPS)
    steps = [row[2] for row in found]
    shape = (taps, *row_shape(kind, ranks))
    block = codec.decode_many([row[3] for row in found], DTYPES[kind], shape, "recent steps")
    block = np.moveaxis(block, 0, -1)
    if kind == STATS:
        block = block.swapaxes(1, 2)  # [taps, ranks, 8, steps] -> [taps, 8, ranks, steps]
    contiguous = steps[-1] - steps[0] + 1 == len(steps)
    chunk = rows.next_id(connection, "chunks")
    listed = b"" if contiguous else codec.encode_ints(steps)
    rows.insert(connection, "chunks", [(chunk, branch, kind, steps[0], steps[-1], listed)])
    encoded = codec.encode_many(block, dense=True)
    rows.insert(connection, "columns", ((chunk, tap, data) for tap, data in enumerate(encoded)))
    connection.execute(
        "DELETE FROM recent WHERE branch = ? AND kind = ? AND step <= ?", (branch, kind, steps[-1])
    )


class StepArrays:
    """The arrays of every step, read back from either form. `taps` and `ranks` are the session's."""

    def __init__(self, archive: Archive, taps: int, ranks: int) -> None:
        self._archive, self._meter = archive, archive.meter
        self._taps, self._ranks = taps, ranks
        self._chunks: dict[int, NDArray[np.uint8]] = {}
        self._meter.register(self)

    def forget(self) -> None:
        """Let go of the chunks kept."""
        self._chunks.clear()

    def at(self, kind: int, owner: int, step: int) -> NDArray[Any] | None:
        """The array of one step, [taps, ranks(, 8)]; None if it has none."""
        where = f"step {step} of branch {owner}, {NAMES[kind]}"
        with self._archive.snapshot():
            row = self._archive.rows("recent", f"{_KEY} AND step = ?", owner, kind, step, where=where)
            found = self._recent(row[0][3], kind) if row else self._chunked(kind, owner, step, where)
            if found is None and self._recorded(kind, owner, step, step + 1) > 0:
                raise damaged(where, "they are missing")
        return found

    def _recorded(self, kind: int, owner: int, first: int, stop: int) -> int:
        """How many of the owner's steps in [first, stop) have arrays of that kind; -1: the file does not state it."""
        if self._archive.version < PROTECTED_SINCE:
            return -1
        (number,) = self._archive.one(
            "SELECT count(*) FROM steps WHERE branch = ? AND step >= ? AND step < ? AND arrays & ?",
            *(owner, first, stop, 1 << kind),
        )
        return int(number)

    def series(
        self, kind: int, tap: int, pick: tuple[int, ...], owner: int, first: int, stop: int
    ) -> tuple[NDArray[np.int64], NDArray[Any]]:
        """One number of one tap, `pick` = (rank, statistic) or (rank,), over the owner's steps in
        [first, stop): (steps, values)."""
        with self._archive.snapshot():
            within = f"{_KEY} AND first_step < ? AND last_step >= ?"
            chunks = self._archive.rows("chunks", f"{within} ORDER BY first_step", owner, kind, stop, first)
            of_these = f"WHERE tap = ? AND chunk IN (SELECT id FROM chunks {within})"
            found = self._archive.rows("columns", of_these, tap, owner, kind, stop, first)
            columns = {chunk: data for chunk, _, data in found}
            within = f"{_KEY} AND step >= ? AND step < ? ORDER BY step"
            recent = self._archive.rows("recent", within, owner, kind, first, stop)
            recorded = self._recorded(kind, owner, first, stop)
        if missing := [row for row in chunks if row[0] not in columns]:
            raise damaged(f"chunk {missing[0][0]}, tap {tap}", "it is missing")
        old = [np.empty(0, DTYPES[kind])]
        for begin in range(0, len(chunks), _TOGETHER):
            together = [columns[row[0]] for row in chunks[begin : begin + _TOGETHER]]
            planes = self._planes(together, kind, f"tap {tap}")
            picked = planes[:, :, pick[1], pick[0]] if kind == STATS else planes[:, :, pick[0]]
            old.append(codec.from_planes(picked, DTYPES[kind]).reshape(-1))
        new = np.array([self._recent(row[3], kind)[(tap, *pick)] for row in recent], DTYPES[kind])
        steps = [step for row in chunks for step in _chunk_steps(row)] + [row[2] for row in recent]
        at = np.array(steps, np.int64)
        keep = (at >= first) & (at < stop)
        at = at[keep]
        if recorded not in (-1, len(at)) or (np.diff(at) <= 0).any():
            raise damaged(
                f"{NAMES[kind]} of branch {owner}, steps {first} to {stop - 1}",
                f"{len(at)} of {recorded} steps are there",
            )
        return at, np.concatenate([*old, new])[keep]

    def _chunked(self, kind: int, owner: int, step: int, where: str) -> NDArray[Any] | None:
        within = f"{_KEY} AND first_step <= ? AND last_step >= ?"
        for row in self._archive.rows("chunks", within, owner, kind, step, step, where=where):
            steps = _chunk_steps(row)
            if step in steps:
                planes = self._chunk(row[0], kind, where)[..., steps.index(step)]
                array = codec.from_planes(planes, DTYPES[kind])
                array = np.ascontiguousarray(array.swapaxes(1, 2)) if kind == STATS else array
                self._meter.keep_array(array)
                return array
        return None

    def _chunk(self, chunk: int, kind: int, where: str) -> NDArray[np.uint8]:
        """A whole chunk's planes [taps, itemsize, (8, )ranks, steps], kept for the neighbouring steps."""
        if chunk not in self._chunks:
            where = f"{where}, chunk {chunk}"
            columns = self._archive.rows("columns", "WHERE chunk = ? ORDER BY tap", chunk, where=where)
            if [row[1] for row in columns] != list(range(self._taps)):
                raise broken(where, f"{len(columns)} columns where each of {self._taps} taps should have one")
            planes = self._planes([row[2] for row in columns], kind, where)
            self._meter.keep_array(planes, planes.nbytes)
            while len(self._chunks) >= _CACHED_CHUNKS:
                self._chunks.pop(next(iter(self._chunks)))
            self._chunks[chunk] = planes
            return planes
        return self._chunks[chunk]

    def _planes(self, blobs: Sequence[object], kind: int, where: str) -> NDArray[np.uint8]:
        """[columns, itemsize, (8, )ranks, CHUNK_STEPS]"""
        shape = (*row_shape(kind, self._ranks)[::-1], CHUNK_STEPS)
        nbytes = len(blobs) * math.prod(shape) * DTYPES[kind].itemsize
        self._meter.room(nbytes + nbytes // 8, f"{NAMES[kind]} of {CHUNK_STEPS} steps, {where}")
        return codec.planes_of(blobs, DTYPES[kind], shape, f"{NAMES[kind]}, {where}")

    def _recent(self, blob: object, kind: int) -> NDArray[Any]:
        """[taps, ranks(, 8)]"""
        shape, where = (self._taps, *row_shape(kind, self._ranks)), f"{NAMES[kind]} of a recent step"
        self._meter.room(tensor_bytes(math.prod(shape), DTYPES[kind].itemsize), where)
        array = codec.decode(blob, DTYPES[kind], shape, where)
        self._meter.keep_array(array)
        return array


def _chunk_steps(row: rows.Row) -> Sequence[int]:
    """The CHUNK_STEPS steps of a chunk; they are stored only where they are not contiguous."""
    chunk, _, _, first, last, listed = row
    where = f"chunk {chunk}"
    if not isinstance(first, int) or not isinstance(last, int) or not CHUNK_STEPS <= last - first + 1 < 2**31:
        raise broken(where, f"no steps from {str(first)[:20]} to {str(last)[:20]}")
    steps = range(first, last + 1) if listed == b"" else codec.decode_ints(listed, where, CHUNK_STEPS)
    if len(steps) != CHUNK_STEPS or steps[0] != first or steps[-1] != last:
        raise broken(where, f"{len(steps)} steps where {CHUNK_STEPS} from {first} to {last} should be")
    return steps
