"""The paged KV pool: one pair of tensors a layer, allocated once; only KV heads are stored, or latents and the part of
keys that is rotated."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lockstep.engine.batch import Batch
from lockstep.engine.errors import RequestError
from lockstep.engine.kv.states import StatePool


class KVPool:
    """Keys and values [num_blocks * block_size, heads, width] of each of `layers`, those that have attention, each as
    wide as `widths` says; of latent attention the first of the pair are the latents, the second the rotated parts of
    keys. And the `states` of the other layers."""

    def __init__(
        self,
        layers: Sequence[int],
        num_blocks: int,
        block_size: int,
        heads: int,
        widths: tuple[int, int],
        dtype: torch.dtype,
        device: torch.device,
        max_rows: int,
        unwritten: float = 0.0,
        states: StatePool | None = None,
    ) -> None:
        self._places = {layer: place for place, layer in enumerate(layers)}
        self.states = states or StatePool({})
        shape = (len(layers), num_blocks * block_size, heads)
        # Never empty: a fault that reads a slot before it was written must read the same every time.
        self.unwritten = unwritten
        self.keys, self.values = (
            torch.full((*shape, width), unwritten, dtype=dtype, device=device) for width in widths
        )
        # Where rows are gathered to before attention: one pair for all layers, which run in turn.
        self._key_rows, self._value_rows = (
            torch.empty((max_rows, heads, width), dtype=dtype, device=device) for width in widths
        )

    @property
    def layers(self) -> list[int]:
        """Those that have keys and values."""
        return list(self._places)

    def of(self, layer: int) -> tuple[Tensor, Tensor]:
        """A layer's keys and values."""
        if layer not in self._places:
            raise RequestError(f"layer {layer} keeps a state in place of keys and values")
        return self.keys[self._places[layer]], self.values[self._places[layer]]

    def write(self, layer: int, batch: Batch, keys: Tensor, values: Tensor) -> None:
        """Store a batch's new rows [T, heads, D] at its slots, and record for each sequence how far the layer's
        cache now reaches (`held`): here, where rows are written, so that it is evidence and no claim."""
        own_keys, own_values = self.of(layer)
        own_keys.index_copy_(0, batch.slots, keys)
        own_values.index_copy_(0, batch.slots, values)
        for span in batch.spans:
            span.held[layer] = max(span.held[layer], span.end)

    def read(self, layer: int, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Gather the rows of `slots` [K] into the shared buffers: two views [K, heads, D], which the
        next call overwrites."""
        rows = slots.shape[0]
        keys, values = self._key_rows[:rows], self._value_rows[:rows]
        own_keys, own_values = self.of(layer)
        torch.index_select(own_keys, 0, slots, out=keys)
        torch.index_select(own_values, 0, slots, out=values)
        return keys, values

    def contents(self, layer: int, seq: int, slots: Tensor) -> tuple[Tensor, Tensor]:
        """All that a layer holds of a sequence: its rows, or its state."""
        if layer in self._places:
            return self.read(layer, slots)
        state = self.states.of(seq, layer) or self.states.fresh[layer]
        return state.rows, state.heads

    def erase(self, slots: Tensor) -> None:
        """Make the rows of `slots` in all layers as if nobody had written them."""
        self.keys.index_fill_(1, slots, self.unwritten)
        self.values.index_fill_(1, slots, self.unwritten)
