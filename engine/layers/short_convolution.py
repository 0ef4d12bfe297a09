"""Short gated convolutions in place of attention (LFM2, arXiv:2511.23404): C * conv(B * x), of this rank's channels."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lockstep.engine.batch import Batch
from lockstep.engine.config import ModelConfig
from lockstep.engine.config.short_convolution import ShortConvolutionConfig
from lockstep.engine.graph.short_convolution import PROJECTED
from lockstep.engine.kv.pool import KVPool
from lockstep.engine.kv.states import LayerState
from lockstep.engine.layers.linear import MergedColumnParallelLinear, RowParallelLinear
from lockstep.engine.layers.stateful import StatefulLayer
from lockstep.engine.layers.weight import KeptTensor, Store
from lockstep.engine.layers.wiring import Wiring
from lockstep.engine.parallel import shards


class ShortConvolution(StatefulLayer):
    """One layer's convolution. `modules`: the checkpoint's, by tap. Its state is the newest rows that went in."""

    def __init__(
        self,
        layer: int,
        model: ModelConfig,
        config: ShortConvolutionConfig,
        modules: Mapping[str, str],
        out_proj: RowParallelLinear,
        store: Store,
    ) -> None:
        self.layer, self.model, self.config, self.out_proj = layer, model, config, out_proj
        channels = shards.span_of("conv_channels", model, out_proj.comm.size, out_proj.comm.rank)
        self.in_proj = MergedColumnParallelLinear(
            [modules[tap] for tap in PROJECTED], [channels] * len(PROJECTED), model.hidden_size, False, store
        )
        self.conv = store.vector(channels.size * config.conv).view(-1, config.conv)
        self.conv_name = f"{modules['attn.conv']}.weight"

    def parameters(self) -> dict[str, Tensor | KeptTensor]:
        """Checkpoint name -> this rank's share."""
        return {**self.in_proj.parameters(), self.conv_name: self.conv, **self.out_proj.parameters()}

    def fresh(self) -> LayerState:
        """The state of a sequence that has read nothing: it has no heads."""
        rows = self.conv.new_zeros(self.config.conv - 1, len(self.conv))
        return LayerState(rows, self.conv.new_zeros(0, 0, 0, dtype=torch.float32))

    def bind(self, wiring: Wiring) -> None:
        """Take the seams in force and the taps that are on."""
        self.rules = wiring.rules
        names = (*PROJECTED, "attn.conv_in", "attn.conv", "attn.conv_gated")
        self.taps = {name: tap for name in names if (tap := wiring.tap(name))}
        self.out_proj.bind(wiring, "attn.out_proj")

    def __call__(self, x: Tensor, batch: Batch, rope: Any, inputs: Any, pool: KVPool) -> Tensor:
        """[T, hidden] -> the same. It rotates nothing and has no mask."""
        in_gate, out_gate, x = self._seen(PROJECTED, self.in_proj(x))
        (gated,) = self._seen(("attn.conv_in",), (self.rules.conv_in_gate(x, in_gate),))
        parts, no_heads = [], pool.states.fresh[self.layer].heads
        for rows, span in zip(self._with_rows_before(gated, batch, pool), batch.spans, strict=True):
            parts.append(self.rules.plain_conv(rows, self.conv))
            kept = self.rules.conv_kept(rows, self.config.conv - 1)
            pool.states.write(self.layer, span, LayerState(kept, no_heads))
        (convolved,) = self._seen(("attn.conv",), (torch.cat(parts),))
        (out,) = self._seen(("attn.conv_gated",), (self.rules.conv_out_gate(convolved, out_gate),))
        return self.out_proj(out)
