"""Rows that a request takes from a prefix cache: which row of which pass each of them is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from lockstep.workbench.foreign.cache import CacheTables
from lockstep.workbench.foreign.heads import PassHead
from lockstep.workbench.views.provenance.ledger import CacheWrite, SlotLedger, chained

#: Where a row was computed: pass and row.
Source = tuple[int, int]


@dataclass(slots=True)
class CachedPrefixes:
    """Follows the passes of a dump. Without a `ledger` nothing is known; with one that has met what no cache does,
    nothing more."""

    ledger: SlotLedger | None
    group: int = 0  # of which blocks are looked up: one that keeps all of its rows
    _tables: CacheTables | None = None
    _rows: dict[tuple[int, int, int], int] = field(default_factory=dict)  # by pass, request and place

    @classmethod
    def of(cls, heads: Sequence[PassHead]) -> CachedPrefixes:
        """Of passes that report where their rows lie, the first group that has no window."""
        reported = next((one.cache for one in heads if one.cache is not None), None)
        if reported is None or not any(
            request.cached for one in heads if one.cache for request in one.cache.requests
        ):
            return cls(None)
        groups = tuple(one.meta for one in reported.groups)
        whole = next((number for number, one in enumerate(groups) if one.window is None), 0)
        return cls(SlotLedger(groups), whole, CacheTables({}, groups))

    def follow(self, number: int, head: PassHead) -> None:
        """A pass, behind those before it."""
        if self.ledger is None or self._tables is None or head.cache is None:
            return
        one = self._tables.accesses(number, head.ids, head.positions, head.cache)
        try:
            self.ledger.follow(one)
        except ValueError:
            self.ledger = None
            return
        for row, reported in enumerate(one.rows):
            self._rows.setdefault((number, reported.request, reported.place), row)

    def of_request(self, name: str, head: PassHead) -> tuple[list[int], list[Source | None]] | None:
        """The tokens whose rows a request that begins in this pass has from the cache, and where each was computed;
        None for what was not computed for the same tokens. None where it has none."""
        if self.ledger is None or head.cache is None:
            return None
        index = next((at for at, one in enumerate(head.cache.requests) if one.request == name), None)
        if index is None or not (tokens := head.cache.requests[index].cached):
            return None
        reported = head.cache.groups[self.group]
        sources: list[Source | None] = []
        identity = 1
        for place, token in enumerate(tokens):
            identity = chained(identity, token)
            block, offset = divmod(place, reported.block_size)
            blocks = reported.blocks[index]
            slot = blocks[block] * reported.block_size + offset if block < len(blocks) else -1
            origin = self.ledger.origin(self.group, slot) if slot >= 0 else None
            same = origin is not None and origin.chain == identity
            sources.append(self._source(origin) if same else None)
        return tokens, sources

    def _source(self, origin: CacheWrite | None) -> Source | None:
        row = None if origin is None else self._rows.get((origin.number, origin.request, origin.place))
        return None if origin is None or row is None else (origin.number, row)
