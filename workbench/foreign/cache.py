"""The tables of a session that state where an engine puts the rows of its cache, from the passes of its dump."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from lockstep.sessions import Tap, TensorRecord
from lockstep.sessions.meta import CACHE_READS, CACHE_ROWS, CacheMeta
from lockstep.workbench.foreign.accesses import CacheAccesses
from lockstep.workbench.foreign.passes import ForeignPass
from lockstep.workbench.views.provenance.accesses import PADDING, CachedRow, CachePass, CacheRead, tables


@dataclass(slots=True)
class CacheTables:
    """Collects passes until a step is written. `sequences` are the numbers of requests by name; others are counted down
    from -2. `groups` are those of the first pass: from a pass with others on nothing is kept."""

    sequences: Mapping[str, int]
    groups: tuple[CacheMeta, ...]
    _waiting: dict[int, list[CachePass]] = field(default_factory=dict)  # by rank
    _others: dict[str, int] = field(default_factory=dict)
    _held: dict[tuple[int, int], dict[int, Sequence[CacheRead]]] = field(default_factory=dict)
    _ended: bool = False

    def add(self, number: int, found: Mapping[int, ForeignPass]) -> None:
        """What the ranks do in one pass."""
        for rank, one in found.items():
            if one.cache is None:
                continue
            self._ended = self._ended or tuple(group.meta for group in one.cache.groups) != self.groups
            if not self._ended:
                reported = self.accesses(number, one.ids, one.positions, one.cache)
                self._waiting.setdefault(rank, []).append(reported)
                for reads in zip(*reported.reads, strict=True):  # of one request in all groups
                    stop = reads[0].computed + sum(row.request == reads[0].request for row in reported.rows)
                    self._held.setdefault((reads[0].request, stop), {})[rank] = reads

    def take(self) -> Iterator[TensorRecord]:
        """The tables of the passes since the last call, of each rank."""
        for rank, passes in self._waiting.items():
            for tap, table in zip((CACHE_ROWS, CACHE_READS), tables(passes), strict=True):
                yield TensorRecord(tap, rank, 0, table, "int64")
        self._waiting = {}

    def held(self, seq: int, rows: int, layers: int) -> tuple[list[list[int]], tuple[int, ...]]:
        """What is cached of a sequence when it has so many rows: by rank the length in each layer (none where a layer's
        is not reported), and the blocks of the first group."""
        by_rank = self._held.pop((seq, rows), {})
        groups = {layer: number for number, one in enumerate(self.groups) for layer in one.layers}
        blocks = by_rank[min(by_rank)][0].blocks if by_rank else ()
        if not layers or not all(layer in groups for layer in range(layers)):
            return [], blocks
        every = [reads for _, reads in sorted(by_rank.items())]
        return [[reads[groups[layer]].length for layer in range(layers)] for reads in every], blocks

    def accesses(
        self, number: int, ids: Sequence[int], positions: Sequence[int], reported: CacheAccesses
    ) -> CachePass:
        """A pass with numbers for its requests."""
        numbers = [self._number(one.request) for one in reported.requests]
        owners = [
            request for request, one in zip(numbers, reported.requests, strict=True) for _ in range(one.rows)
        ]
        slots = list(zip(*(one.slots for one in reported.groups), strict=True)) if reported.groups else []
        rows = [
            CachedRow(request, token, place, position, slot)
            for request, place, token, position, slot in zip(
                owners, reported.places(len(owners)), ids, positions, slots, strict=False
            )
        ]
        padding = zip(*(one.padding for one in reported.groups), strict=False)
        rows += [CachedRow(PADDING, 0, 0, 0, slot) for slot in padding if max(slot) >= 0]
        reads = tuple(
            tuple(
                CacheRead(request, one.computed, length, tuple(blocks))
                for request, one, length, blocks in zip(
                    numbers, reported.requests, group.lengths, group.blocks, strict=True
                )
            )
            for group in reported.groups
        )
        cached = {
            request: tuple(one.cached)
            for request, one in zip(numbers, reported.requests, strict=True)
            if one.cached
        }
        return CachePass(number, tuple(rows), reads, cached)

    def _number(self, name: str) -> int:
        known = self.sequences.get(name)
        return self._others.setdefault(name, -2 - len(self._others)) if known is None else known


def cache_taps(first: int) -> list[Tap]:
    """The taps of a session that hold the tables, numbered from `first`."""
    return [Tap(index, name, "replicate") for index, name in enumerate((CACHE_ROWS, CACHE_READS), first)]
