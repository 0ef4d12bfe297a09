"""The paged KV pool: one pair of tensors a layer, allocated once; only KV heads are stored, or latents and the part of
keys that is rotated."""

from __future__ import annotations

import torch
from torch import Tensor

from lockstep.engine.batch import Batch


class KVPool:
    """`keys[layer]` and `values[layer]`: [num_blocks * block_size, heads, width], each as wide as `widths` says. Of
    latent attention the first of the pair are the latents, the second the rotated parts of keys."""

    def __init__(
        self,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        heads: int,
        widths: tuple[int, int],
        dtype: torch.dtype,
        device: torch.device,
        max_rows: int,
        unwritten: float = 0.0,
    ) -> None:
        shape = (num_layers, num_blocks * block_size, heads)
        # Never empty: a fault that reads a slot before it was written must read the same every time.
        self.unwritten = unwritten
        self.keys, self.values = (
            torch.full((*shape, width), unwritten, dtype=dtype, device=device) for width in widths
        )
        # Where rows are gathered to before attention: one pair for all layers, which run in turn.
        self._key_rows, self._value_rows = (
            torch.empty((max_rows, heads, width), dtype=dtype, device=device) for width in widths
        )

    def write(self, layer: int, batch: Batch, keys: Tensor, values: Tensor) -> None:
        """Store a batch's new rows [T, heads, D] at its slots, and record for each sequence how far the layer's
        cache now reaches (`held`): here, where rows are written, so that it is evidence and no claim."""
        self.keys[layer].index_copy_(0, batch.slots, keys)
        self.values[layer].index_copy_(0, batch.slots, values)
        for span in batch.spans:
            span.held[layer] = max(span.held[layer], span.end)

    def read(self, layer: int, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Gather the rows of `slots` [K] into the shared buffers: two views [K, heads, D], which the
        next call overwrites."""
        rows = slots.shape[0]
        keys, values = self._key_rows[:rows], self._value_rows[:rows]
        torch.index_select(self.keys[layer], 0, slots, out=keys)
        torch.index_select(self.values[layer], 0, slots, out=values)
        return keys, values

    def erase(self, slots: Tensor) -> None:
        """Make the rows of `slots` in all layers as if nobody had written them."""
        self.keys.index_fill_(1, slots, self.unwritten)
        self.values.index_fill_(1, slots, self.unwritten)
