"""The KV cache after one step: lengths against positions, blocks and slots, the pool, norms by position."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from workbench.views.cache_rows import CacheRows, cache_rows
from workbench.views.cached_lengths import expected_rows
from workbench.views.source import SessionSource
from workbench.views.where import Where


@dataclass(frozen=True, slots=True)
class CachedSequence:
    """One sequence: the rows that its positions ask for (`expected`), those that each layer of each rank holds
    (`lengths[rank][layer]`), its blocks in order; `positions` of the new tokens."""

    seq: int
    positions: tuple[int, ...]
    expected: int
    lengths: tuple[tuple[int, ...], ...]
    blocks: tuple[int, ...]
    jumps: tuple[str, ...]  # positions that do not follow each other, in words

    @property
    def agrees(self) -> bool:
        """Whether every layer of every rank holds as many rows as the positions ask for."""
        return all(length == self.expected for of_rank in self.lengths for length in of_rank)

    @property
    def wrong(self) -> str:
        """What disagrees, in words."""
        return "" if self.agrees else f"its positions ask for {self.expected}"


@dataclass(frozen=True, slots=True, eq=False)
class Cache:
    """The cache after a step. `shared` blocks are in more than one table; `rows` as far as they were captured."""

    step: int
    block_size: int
    sequences: tuple[CachedSequence, ...]
    used: int | None
    free: int | None
    shared: frozenset[int]
    rows: CacheRows
    rows_of: str


def cache(
    source: SessionSource, where: Where, block_size: int, layers: int, kind: str, error: bool
) -> Cache | None:
    """The cache after `where`; None while there is no such step. `kind` is "k_cache" or "v_cache"; `error`: of the
    rows their difference to golden's, not their norms."""
    if where.step not in source.session.steps(where.branch):
        return None
    record = source.record(where.step, where.branch)
    earlier = source.record(where.step - 1, where.branch).sequences if where.step else ()
    before = {s.seq: s.positions[-1] for s in earlier if len(s.positions)}
    sequences = tuple(
        CachedSequence(
            s.seq,
            tuple(s.positions),
            expected_rows(s) or 0,
            tuple(tuple(of_rank) for of_rank in s.kv_lens),
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
        rows=cache_rows(source, where, layers, kind, error),
        rows_of=kind,
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
