"""The KV cache after a step or inside it: lengths against positions, blocks and slots, the pool, norms by position."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from lockstep.engine.graph import STATE_TAPS
from lockstep.sessions.records import StepInFlight
from lockstep.workbench.views.block_map import Pool, pool_of
from lockstep.workbench.views.cache_history import CacheHistory, cache_history
from lockstep.workbench.views.cache_rows import CacheRows, cache_rows, cached_as
from lockstep.workbench.views.cached_lengths import expected_rows
from lockstep.workbench.views.source import SessionSource
from lockstep.workbench.views.states import StateHistory, state_histories
from lockstep.workbench.views.where import Where

#: Sequences beside the one that is looked at whose growth is read.
_OTHERS = 7


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
    """The cache after `step`. `shared` blocks are in more than one table; `rows` as far as they were captured. Where
    the step after it is under way, `written` layers of it have written their rows, which are in `rows`; its sequences'
    positions are those that are being written. `states`: of layers with linear attention. `borrowing` layers have no
    rows of their own and read those of earlier ones. `history` is of the sequence that is looked at, `others` of
    those beside it, by number."""

    step: int
    block_size: int
    sequences: tuple[CachedSequence, ...]
    used: int | None
    free: int | None
    shared: frozenset[int]
    rows: CacheRows
    rows_of: str
    history: CacheHistory | None
    pool: Pool
    written: int | None = None
    states: tuple[StateHistory, ...] = ()
    borrowing: tuple[int, ...] = ()
    others: Mapping[int, CacheHistory] = field(default_factory=dict)


def cache(
    source: SessionSource, where: Where, block_size: int, layers: int, kind: str, error: bool
) -> Cache | None:
    """The cache after `where`, or inside its step; None while there is no such step. `kind` is "k_cache" or "v_cache";
    `error`: of the rows their difference to golden's, not their norms."""
    kind = cached_as(source.session.has_tap, kind)
    flight, recorded = source.under_way(where.branch, where.step), source.passed(where)
    steps = source.session.steps(where.branch)
    if recorded.step not in steps:
        return None if flight is None else _first(source, where, flight, block_size, layers, kind, error)
    record = source.record(recorded.step, where.branch)
    earlier = source.record(recorded.step - 1, where.branch).sequences if recorded.step else ()
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
    if flight is not None:
        writes = {s.seq: tuple(s.positions) for s in flight.sequences}
        sequences = tuple(replace(s, positions=writes.get(s.seq, ())) for s in sequences)
    uses = Counter(block for s in sequences for block in s.blocks)
    total = (record.used_blocks or 0) + (record.free_blocks or 0)
    return Cache(
        step=recorded.step,
        block_size=block_size,
        sequences=sequences,
        used=record.used_blocks,
        free=record.free_blocks,
        shared=frozenset(block for block, times in uses.items() if times > 1),
        rows=cache_rows(source, where, layers, kind, error),
        rows_of=kind,
        history=cache_history(source, where, layers),
        pool=pool_of(source, recorded, record.sequences, total, block_size),
        written=None if flight is None else written_layers(source, flight, layers),
        states=state_histories(source, where, layers),
        borrowing=borrowing_layers(source, layers),
        others=_others(source, where, layers, [s.seq for s in sequences]),
    )


def _others(source: SessionSource, where: Where, layers: int, seqs: Sequence[int]) -> dict[int, CacheHistory]:
    """How the first few sequences beside the one that is looked at grew, where all layers and ranks are alike."""
    beside = [seq for seq in seqs if seq != where.seq][:_OTHERS]
    found = {seq: cache_history(source, replace(where, seq=seq), layers) for seq in beside}
    return {seq: history for seq, history in found.items() if history is not None and history.even}


def borrowing_layers(source: SessionSource, layers: int) -> tuple[int, ...]:
    """Those that read cached keys, and make none."""
    taps = [
        [source.session.has_tap(f"layers.{i}.attn.{one}") for one in ("k_cache", "k_rope")]
        for i in range(layers)
    ]
    return tuple(i for i, (read, made) in enumerate(taps) if read and not made)


def written_layers(source: SessionSource, flight: StepInFlight, layers: int) -> int:
    """How many layers, from the first on, have written their rows in the step under way."""
    taps = (f"attn.{cached_as(source.session.has_tap, 'k_cache')}", *STATE_TAPS)
    names = [f"layers.{layer}.{tap}" for layer in range(layers) for tap in taps]
    session = source.session
    return sum(session.has_tap(name) and session.tap(name).index <= flight.place for name in names)


def _first(
    source: SessionSource,
    where: Where,
    flight: StepInFlight,
    block_size: int,
    layers: int,
    kind: str,
    error: bool,
) -> Cache:
    """The cache inside the first step: nothing is recorded of it but what has been written so far."""
    sequences = tuple(CachedSequence(s.seq, tuple(s.positions), 0, (), (), ()) for s in flight.sequences)
    rows, pool = cache_rows(source, where, layers, kind, error), Pool((), 0, None)
    return Cache(
        -1, block_size, sequences, None, None, frozenset(), rows, kind, None, pool,
        written_layers(source, flight, layers),
    )  # fmt: skip


def _jumps(positions: list[int], before: int | None) -> tuple[str, ...]:
    """Where a position does not follow the one before it."""
    found = []
    previous = before
    for position in positions:
        if previous is not None and position != previous + 1:
            found.append(f"position {position} after {previous}")
        previous = position
    return tuple(found[:8])
