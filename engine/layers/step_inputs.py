"""What the attention of all layers shares in a step."""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from lockstep.engine.batch import Batch
from lockstep.engine.layers.cpu_decode import CachedRows, decodes
from lockstep.engine.layers.paged_attention import Pages
from lockstep.engine.layers.tiles import Tile, Tiling
from lockstep.engine.layers.wiring import Wiring
from lockstep.engine.rules import CORRECT


class StepInputs:
    """Inputs shared by the attention of all layers in a step, computed on first use: additive biases, as far as they
    are few, and block tables."""

    def __init__(self, batch: Batch, wiring: Wiring, dtype: torch.dtype) -> None:
        self._batch, self._rules, self._dtype = batch, wiring.rules, dtype
        self._made: dict[tuple[int, int | None, int, int, int, int], Tensor] = {}
        self._cells = 0
        self._pages: Pages | None = None
        #: Of each sequence the rows [T, S] that the last indexer has chosen.
        self.chosen: dict[int, Tensor] = {}
        own = ("window", "chunk", "mask", "cache_reuse")
        self._as_usual = all(getattr(wiring.rules, seam) is getattr(CORRECT, seam) for seam in own)

    def pages(self, page_size: int) -> Pages:
        """The batch's block tables and lengths."""
        if self._pages is None:
            self._pages = Pages.of(self._batch, page_size)
        return self._pages

    @cached_property
    def cached_rows(self) -> CachedRows | None:
        """Of all sequences, where each reads one token."""
        spans = self._batch.spans
        return CachedRows.of([span.rows for span in spans]) if decodes(spans) else None

    def tiling(
        self, index: int, kv_heads: int, group: int, window: int | None, chunked: bool = False
    ) -> Tiling:
        """That of the batch's sequence `index`. Where a fault decides what is seen, no key is left out."""
        span = self._batch.spans[index]
        queries = span.stop - span.start
        keys = span.kv_len - self._rules.cache_reuse(span.kv_len, queries)
        causal = self._as_usual and span.in_order
        return Tiling(kv_heads, group, queries, keys, causal, window, span.rows.is_cuda, chunked)

    def bias(self, index: int, tiling: Tiling, tile: Tile, *, every_key: bool = False) -> Tensor | None:
        """What is added to the scores of a tile's last keys, or of every one, [queries, keys]; None where all of its
        keys are seen."""
        rows, keys = tile.rows, tile.keys
        if tiling.causal and rows.stop - rows.start == 1:
            return None
        if (
            tiling.causal and tiling.window is None and not every_key
        ):  # all see what lies before the tile's own queries
            keys = slice(keys.stop - (rows.stop - rows.start), keys.stop)
        key = (index, tiling.window, rows.start, rows.stop, keys.start, keys.stop)
        if key not in self._made:
            self._make_room((rows.stop - rows.start) * (keys.stop - keys.start), tiling.cells)
            span = self._batch.spans[index]
            read = span.kv_positions[span.kv_len - tiling.keys :]
            allowed = self._allowed(tiling, span.q_positions, rows, read[keys])
            self._made[key] = self._rules.mask(allowed).to(self._dtype)
        return self._made[key]

    def sight(self, index: int, rows: slice, keys: int) -> Tensor:
        """Which of the last so many keys of the batch's sequence `index` an indexer may choose, [rows, K] bool."""
        span = self._batch.spans[index]
        return self._rules.index_sight(span.q_positions, rows, span.kv_positions[span.kv_len - keys :])

    def _allowed(self, tiling: Tiling, queries: Tensor, rows: slice, keys: Tensor) -> Tensor:
        """Which of those keys each of the queries `rows` may see, by their positions."""
        if tiling.chunked and tiling.window is not None:
            return self._rules.chunk(queries, rows, keys, tiling.window)
        return self._rules.window(queries, rows, keys, tiling.window)

    def _make_room(self, cells: int, most: int) -> None:
        """Let go of the biases that were made where they would have more cells than `most`."""
        if self._cells + cells > most:
            self._made.clear()
            self._cells = 0
        self._cells += cells
