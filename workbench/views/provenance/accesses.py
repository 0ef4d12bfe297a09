"""What the passes of an engine do to its paged cache of keys and values, as integers: where each row is written, which
slots each request reads.

A *slot* is a row of the cache: block number times block size, plus the offset in the block. A *place* is the number of
a token in its request, as the scheduler counts; its *position* is what the model is given. A *group* is a set of layers
that share a block table.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

#: The request of a row that only fills up a batch.
PADDING = -1
#: The slot of a row that is not written (padding), and of a token whose row the request takes from the cache.
NOT_WRITTEN, FROM_CACHE = -1, -2
#: The tokens or blocks of a request that are not reported.
UNKNOWN = -1

#: Columns of the table of rows; of reads these, and then the blocks, filled up with UNKNOWN.
ROWS = ("pass", "group", "request", "token", "place", "position", "slot")
READS = ("pass", "group", "request", "computed", "length")


@dataclass(frozen=True, slots=True)
class CachedRow:
    """A row of a pass: the `token` at `place` of its `request` (PADDING), at `position` for the model. `slots` are
    where its key and value go, by group."""

    request: int
    token: int
    place: int
    position: int
    slots: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CacheRead:
    """What attention is given of a request in a pass: the blocks that hold its first `length` tokens, of which
    `computed` had a row before the pass, by the scheduler's count."""

    request: int
    computed: int
    length: int
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CachePass:
    """One pass. `cached`: the tokens before the first that a request computes, of which it takes the rows from the
    cache. `reads` are by group, by request."""

    number: int
    rows: tuple[CachedRow, ...]
    reads: tuple[tuple[CacheRead, ...], ...]
    cached: Mapping[int, tuple[int, ...]]


def tables(passes: Sequence[CachePass]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Passes as two tables, of rows [n, ROWS] and of reads [m, READS + blocks]: what a session holds."""
    rows: list[tuple[int, ...]] = []
    reads: list[tuple[int, ...]] = []
    for one in passes:
        for request, tokens in one.cached.items():
            rows += [
                (one.number, 0, request, token, place, UNKNOWN, FROM_CACHE)
                for place, token in enumerate(tokens)
            ]
        rows += [
            (one.number, group, row.request, row.token, row.place, row.position, slot)
            for row in one.rows
            for group, slot in enumerate(row.slots)
        ]
        reads += [
            (one.number, group, read.request, read.computed, read.length, *read.blocks)
            for group, reported in enumerate(one.reads)
            for read in reported
        ]
    width = max((len(read) for read in reads), default=len(READS))
    table = np.full((len(reads), width), UNKNOWN, np.int64)
    for line, read in zip(table, reads, strict=True):
        line[: len(read)] = read
    return np.array(rows, np.int64).reshape(-1, len(ROWS)), table


def passes_of(rows: NDArray[np.int64], reads: NDArray[np.int64]) -> Iterator[CachePass]:
    """The passes that two tables hold, in order. ValueError for tables that are none."""
    if rows.ndim != 2 or reads.ndim != 2 or rows.shape[1] != len(ROWS) or reads.shape[1] < len(READS):
        raise ValueError(f"tables of {rows.shape} and {reads.shape} are no passes of a cache")
    for number in sorted({*rows[:, 0].tolist(), *reads[:, 0].tolist()}):
        yield _pass(number, rows[rows[:, 0] == number].tolist(), reads[reads[:, 0] == number].tolist())


def _pass(number: int, rows: Iterable[Sequence[int]], reads: Iterable[Sequence[int]]) -> CachePass:
    placed: dict[int, list[tuple[int, int, int, int]]] = {}
    slots: dict[int, list[int]] = {}
    cached: dict[int, list[int]] = {}
    counts: dict[int, int] = {}
    for _, group, request, token, place, position, slot in rows:
        if slot == FROM_CACHE:
            cached.setdefault(request, []).append(token)
            continue
        counts[group] = row = counts.get(group, -1) + 1
        placed.setdefault(row, []).append((request, token, place, position))
        slots.setdefault(row, []).append(slot)
    reported: dict[int, list[CacheRead]] = {}
    for _, group, request, computed, length, *blocks in reads:
        kept = tuple(blocks[: next((at for at, one in enumerate(blocks) if one == UNKNOWN), len(blocks))])
        reported.setdefault(group, []).append(CacheRead(request, computed, length, kept))
    if any(len(set(lines)) > 1 for lines in placed.values()):
        raise ValueError(f"pass {number}: the groups of a cache have other rows")
    return CachePass(
        number,
        tuple(CachedRow(*placed[row][0], tuple(slots[row])) for row in sorted(placed)),
        tuple(tuple(reported.get(group, ())) for group in range(max(reported, default=-1) + 1)),
        {request: tuple(tokens) for request, tokens in cached.items()},
    )
