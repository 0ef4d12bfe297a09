"""The KV cache after one step: lengths against positions, blocks and slots, the pool, norms by position."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sessions.errors import SessionError
from workbench.tui.snapshots.overview import Where
from workbench.tui.snapshots.source import Source


@dataclass(frozen=True, slots=True)
class CachedSequence:
    """One sequence: rows that should be cached (`expected`), rows that each rank holds, its blocks in order."""

    seq: int
    positions: tuple[int, ...]
    expected: int
    lengths: tuple[int, ...]
    blocks: tuple[int, ...]
    jumps: tuple[str, ...]  # positions that do not follow each other, in words

    @property
    def agrees(self) -> bool:
        """Whether every rank holds as many rows as there are positions."""
        return all(length == self.expected for length in self.lengths)


@dataclass(frozen=True, slots=True, eq=False)
class Cache:
    """The cache after a step. `shared` blocks are in more than one table; `norms[layers, positions]` of the
    keys as far as they were captured."""

    step: int
    block_size: int
    sequences: tuple[CachedSequence, ...]
    used: int | None
    free: int | None
    shared: frozenset[int]
    norms: NDArray[np.float32] | None
    norms_of: str


def cache(source: Source, where: Where, block_size: int, layers: int, kind: str) -> Cache | None:
    """The cache after `where`; None while there is no such step. `kind` is "k_cache" or "v_cache"."""
    if where.step not in source.session.steps(where.branch):
        return None
    record = source.record(where.step, where.branch)
    before = {
        s.seq: s.positions[-1]
        for s in (source.record(where.step - 1, where.branch).sequences if where.step else ())
        if len(s.positions)
    }
    sequences = tuple(
        CachedSequence(
            s.seq,
            tuple(s.positions),
            int(s.positions[-1]) + 1 if len(s.positions) else 0,
            tuple(s.kv_lens),
            tuple(s.block_table),
            _jumps(list(s.positions), before.get(s.seq)),
        )
        for s in record.sequences
    )
    uses = Counter(block for s in sequences for block in s.blocks)
    return Cache(
        step=where.step,
        block_size=block_size,
        sequences=sequences,
        used=record.used_blocks,
        free=record.free_blocks,
        shared=frozenset(block for block, times in uses.items() if times > 1),
        norms=_norms(source, where, layers, kind),
        norms_of=kind,
    )


def _jumps(positions: list[int], before: int | None) -> tuple[str, ...]:
    """Where a position does not follow the one before it."""
    found = []
    previous = before
    for position in positions:
        if previous is not None and position != previous + 1:
            found.append(f"position {position} after {previous}")
        previous = position
    return tuple(found[:8])


def _norms(source: Source, where: Where, layers: int, kind: str) -> NDArray[np.float32] | None:
    """L2 norms [layers, positions] of the cached keys or values; NaN for a layer that was not captured."""
    rows: list[NDArray[np.float32] | None] = []
    for layer in range(layers):
        try:
            found = source.session.rebuilt(
                f"layers.{layer}.attn.{kind}", step=where.step, seq=where.seq, branch=where.branch
            )
        except SessionError:
            return None
        whole = found.array is not None and found.array.ndim == 3 and not found.slice
        rows.append(
            np.sqrt((found.array.astype(np.float32) ** 2).sum(axis=(1, 2))) if whole else None  # type: ignore[union-attr]
        )
    length = max((len(row) for row in rows if row is not None), default=0)
    if not length:
        return None
    norms = np.full((layers, length), np.nan, np.float32)
    for layer, row in enumerate(rows):
        if row is not None:
            norms[layer, : len(row)] = row
    return norms
