"""The paged KV pool: one pair of tensors a layer, allocated once; only KV heads are stored, or latents and the part of
keys that is rotated. A layer that reads another one's keys and values has none."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from lockstep.engine.batch import Batch
from lockstep.engine.errors import RequestError
from lockstep.engine.kv.states import StatePool


@dataclass(frozen=True, slots=True)
class RowShape:
    """What is cached of a token: so many heads of keys and of values, of these two widths."""

    heads: int
    widths: tuple[int, int]


class KVPool:
    """Keys and values [num_blocks * block_size, heads, width] of each of `layers`, those that write any; of latent
    attention the first of the pair are the latents, the second the rotated parts of keys. `shared`: layers that have
    none and read those of another one. And the `states` of layers with linear attention."""

    def __init__(
        self,
        layers: Mapping[int, RowShape],
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        max_rows: int,
        unwritten: float = 0.0,
        states: StatePool | None = None,
        shared: Mapping[int, int] | None = None,
    ) -> None:
        self.shared = dict(shared or {})
        self.states = states or StatePool({})
        # Never empty: a fault that reads a slot before it was written must read the same every time.
        self.unwritten = unwritten
        self.keys, self.values = (
            {
                layer: torch.full(
                    (num_blocks * block_size, one.heads, one.widths[part]),
                    unwritten,
                    dtype=dtype,
                    device=device,
                )
                for layer, one in layers.items()
            }
            for part in (0, 1)
        )
        # Where rows are gathered to before attention: one pair for all layers, which run in turn.
        widest = (
            max((one.heads * one.widths[part] for one in layers.values()), default=0) for part in (0, 1)
        )
        buffers = [torch.empty(max_rows * width, dtype=dtype, device=device) for width in widest]
        self._gathered = {
            layer: [
                flat[: max_rows * one.heads * width].view(max_rows, one.heads, width)
                for flat, width in zip(buffers, one.widths, strict=True)
            ]
            for layer, one in layers.items()
        }

    @property
    def layers(self) -> list[int]:
        """Those that have keys and values."""
        return list(self.keys)

    def of(self, layer: int) -> tuple[Tensor, Tensor]:
        """The keys and values that a layer reads."""
        layer = self.shared.get(layer, layer)
        if layer not in self.keys:
            raise RequestError(f"layer {layer} keeps a state in place of keys and values")
        return self.keys[layer], self.values[layer]

    def write(self, layer: int, batch: Batch, keys: Tensor, values: Tensor) -> None:
        """Store a batch's new rows [T, heads, D] at its slots, and record for each sequence how far the layer's
        cache now reaches (`held`): here, where rows are written, so that it is evidence and no claim."""
        own_keys, own_values = self.of(layer)
        own_keys.index_copy_(0, batch.slots, keys)
        own_values.index_copy_(0, batch.slots, values)
        for span in batch.spans:
            span.held[layer] = max(span.held[layer], span.end)

    def lend(self, layer: int, batch: Batch) -> None:
        """A layer reads what another one holds: what it has reaches as far."""
        for span in batch.spans:
            span.held[layer] = span.held[self.shared[layer]]

    def pass_over(self, layer: int, batch: Batch) -> None:
        """A layer that has nothing to remember has all that was run."""
        for span in batch.spans:
            span.held[layer] = max(span.held[layer], span.end)

    def read(self, layer: int, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Gather the rows of `slots` [K] into the shared buffers: two views [K, heads, D], which the
        next call overwrites."""
        own_keys, own_values = self.of(layer)
        keys, values = (rows[: len(slots)] for rows in self._gathered[self.shared.get(layer, layer)])
        torch.index_select(own_keys, 0, slots, out=keys)
        torch.index_select(own_values, 0, slots, out=values)
        return keys, values

    def contents(self, layer: int, seq: int, slots: Tensor) -> tuple[Tensor, Tensor]:
        """All that a layer holds of a sequence: its rows, or its state."""
        if layer not in self.states.fresh:
            return self.read(layer, slots)
        state = self.states.of(seq, layer) or self.states.fresh[layer]
        return state.rows, state.heads

    def erase(self, slots: Tensor) -> None:
        """Make the rows of `slots` in all layers as if nobody had written them."""
        for rows in (*self.keys.values(), *self.values.values()):
            rows.index_fill_(0, slots, self.unwritten)
