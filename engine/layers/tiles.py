"""How the attention of one sequence is cut into tiles, so that its scores are never held whole.

A tile is some KV heads (with the query heads that share them) by some queries by the keys that these may see. Its
borders follow from shapes alone: what is computed does not depend on which taps are on.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

#: Scores of a tile: 1 MiB of float32, which stays in a processor's cache while it is measured.
CELLS = 1 << 18
#: The same on a GPU, where a tile must be worth the launches of its kernels: 32 MiB.
GPU_CELLS = 1 << 23
#: Most queries of a tile on the CPU, where more compute cells that the mask covers; least: fewer make slow products.
_MOST_ROWS, _LEAST_ROWS = 64, 8


@dataclass(frozen=True, slots=True)
class Tile:
    """KV heads, queries (by their number in the pass) and keys (by their row in what is read of the cache)."""

    heads: slice
    rows: slice
    keys: slice


@dataclass(frozen=True, slots=True)
class Tiling:
    """`kv_heads` times `group` query heads, `queries` new tokens, `keys` rows that are read. `causal`: the queries are
    those of the last rows and see nothing after themselves, nor what lies `window` or more before, or, where attention
    is `chunked`, in an earlier chunk of so many rows; keys that no query of a tile sees are left out of it."""

    kv_heads: int
    group: int
    queries: int
    keys: int
    causal: bool
    window: int | None = None
    on_gpu: bool = False
    chunked: bool = False

    @property
    def cells(self) -> int:
        """The most scores of a tile of more than the least number of queries."""
        return GPU_CELLS if self.on_gpu else CELLS

    @property
    def shape(self) -> tuple[int, int, int]:
        """Of the scores: query heads, queries, keys."""
        return self.kv_heads * self.group, self.queries, self.keys

    def over_all_keys(self) -> Tiling:
        """The same, no key left out."""
        return replace(self, causal=False)

    @property
    def only(self) -> Tile | None:
        """The tile, where there is one alone and it holds all cells."""
        return _only(self)

    def __iter__(self) -> Iterator[Tile]:
        return self.cut() if (only := _only(self)) is None else iter((only,))

    def cut(self) -> Iterator[Tile]:
        """The tiles one after the other."""
        most = self.queries if self.on_gpu else min(self.queries, _MOST_ROWS)
        rows = min(most, max(_LEAST_ROWS, self.cells // (self.group * self.keys)))
        heads = max(1, self.cells // (self.group * rows * self.keys))
        for span in self.by_rows(rows):
            for head in range(0, self.kv_heads, heads):
                yield Tile(slice(head, min(head + heads, self.kv_heads)), span.rows, span.keys)

    def by_rows(self, rows: int) -> Iterator[Tile]:
        """Tiles of all heads."""
        for start in range(0, self.queries, rows):
            stop = min(start + rows, self.queries)
            yield Tile(slice(0, self.kv_heads), slice(start, stop), self._seen(start, stop))

    def _seen(self, start: int, stop: int) -> slice:
        """The keys that queries from `start` to before `stop` see."""
        if not self.causal:
            return slice(0, self.keys)
        before = self.keys - self.queries  # rows that were cached already
        if self.window is None:
            return slice(0, before + stop)
        first = before + start  # the first query's own key
        first = first // self.window * self.window if self.chunked else max(0, first - self.window + 1)
        return slice(first, before + stop)


@lru_cache(1024)
def _only(tiling: Tiling) -> Tile | None:
    """Of a decode step all layers ask the same for each sequence."""
    first = next(tiling.cut())
    cells = (first.heads.stop, first.rows.stop, first.keys.stop - first.keys.start)
    return first if cells == (tiling.kv_heads, tiling.queries, tiling.keys) else None
