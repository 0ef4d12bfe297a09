"""Linear attention with a recurrent state: Gated DeltaNet (arXiv:2412.06464).

What a sequence's earlier passes left is the newest rows of the convolution and each head's state.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lockstep.engine.batch import Batch
from lockstep.engine.config import ModelConfig
from lockstep.engine.config.linear_attention import LinearAttentionConfig
from lockstep.engine.kv.pool import KVPool
from lockstep.engine.kv.states import LayerState
from lockstep.engine.layers.linear import MergedColumnParallelLinear, RowParallelLinear
from lockstep.engine.layers.stateful import StatefulLayer
from lockstep.engine.layers.weight import KeptTensor, Store
from lockstep.engine.layers.wiring import Wiring
from lockstep.engine.parallel import shards

#: What the layer makes of its input, in the order of one product.
PROJECTED = tuple(f"attn.in_proj_{one}" for one in "qkvzba")
_CONVOLVED = tuple(f"attn.conv_{one}" for one in "qkv")


class GatedDeltaNet(StatefulLayer):
    """One layer's linear attention over this rank's heads. `modules`: the checkpoint's, by tap."""

    def __init__(
        self,
        layer: int,
        model: ModelConfig,
        config: LinearAttentionConfig,
        modules: Mapping[str, str],
        out_proj: RowParallelLinear,
        store: Store,
    ) -> None:
        self.layer, self.model, self.config, self.out_proj = layer, model, config, out_proj
        tp, rank = out_proj.comm.size, out_proj.comm.rank
        keys, values, heads = (
            shards.span_of(width, model, tp, rank)
            for width in ("linear_keys", "linear_values", "linear_heads")
        )
        spans = [keys, keys, values, values, heads, heads]
        self.in_proj = MergedColumnParallelLinear(
            [modules[tap] for tap in PROJECTED], spans, model.hidden_size, False, store
        )
        self.heads, self.sizes = heads.size, [keys.size, keys.size, values.size]
        self.conv = store.vector(sum(self.sizes) * config.conv).view(-1, config.conv)
        self.conv_names = [f"{modules[tap]}.weight" for tap in _CONVOLVED]
        self.decay_of = {role: store.vector(heads.size) for role in shards.DECAY}
        self.norm, self.norm_name = store.vector(config.value_dim), f"{modules['attn.gated_norm']}.weight"

    def parameters(self) -> dict[str, Tensor | KeptTensor]:
        """Checkpoint name -> this rank's share."""
        named = {f"model.layers.{self.layer}.{shards.DECAY[role]}": x for role, x in self.decay_of.items()}
        kernels = zip(self.conv_names, self.conv.split(self.sizes), strict=True)
        return {
            **self.in_proj.parameters(), **self.out_proj.parameters(), **dict(kernels), **named,
            self.norm_name: self.norm,
        }  # fmt: skip

    def fresh(self) -> LayerState:
        """The state of a sequence that has read nothing."""
        config = self.config
        heads = self.conv.new_zeros(self.heads, config.key_dim, config.value_dim, dtype=torch.float32)
        return LayerState(self.conv.new_zeros(config.conv - 1, len(self.conv)), heads)

    def bind(self, wiring: Wiring) -> None:
        """Take the seams in force and the taps that are on."""
        self.rules = wiring.rules
        names = (*PROJECTED, *_CONVOLVED, "attn.q_l2", "attn.k_l2", "attn.beta", "attn.decay", "attn.delta")
        self.taps = {name: tap for name in (*names, "attn.gated_norm") if (tap := wiring.tap(name))}
        self.tap_state = wiring.tap("attn.state")
        self.out_proj.bind(wiring, "attn.out_proj")

    def __call__(self, x: Tensor, batch: Batch, rope: Any, inputs: Any, pool: KVPool) -> Tensor:
        """[T, hidden] -> the same. It rotates nothing and has no mask."""
        *mixed, z, b, a = self._seen(PROJECTED, self.in_proj(x))
        rows = self._with_rows_before(torch.cat(mixed, -1), batch, pool)
        convolved = torch.cat([self.rules.short_conv(one, self.conv) for one in rows])
        q, k, v = self._seen(_CONVOLVED, convolved.split(self.sizes, -1))
        q, k = (self.rules.l2_norm(part.unflatten(-1, (-1, self.config.key_dim))) for part in (q, k))
        q, k = (
            part.view(len(x), -1, self.config.key_dim)
            for part in self._seen(("attn.q_l2", "attn.k_l2"), (q.flatten(1), k.flatten(1)))
        )
        beta, decay = self._seen(
            ("attn.beta", "attn.decay"), (self.rules.beta(b), self.rules.decay(a, *self.decay_of.values()))
        )
        q, k = (self.rules.key_heads(part, self.heads) for part in (q, k))
        v = v.unflatten(-1, (self.heads, -1))

        def delta_rule(heads: Tensor, own: slice) -> tuple[Tensor, Tensor]:
            return self.rules.delta_rule(heads, q[own], k[own], v[own], beta[own], decay[own])

        read = self._recurred(delta_rule, rows, self.config.conv - 1, batch, pool)
        delta = read.flatten(1).to(x.dtype)
        (delta,) = self._seen(("attn.delta",), (delta,))
        return self.out_proj(self._normed(delta, z))

    def _normed(self, delta: Tensor, z: Tensor) -> Tensor:
        """[T, values] twice -> the same."""
        by_head = (part.unflatten(-1, (self.heads, -1)) for part in (delta, z))
        x, gate = by_head
        out = self.rules.gated_norm(x, self.norm, gate, self.model.rms_eps).flatten(1)
        return self._seen(("attn.gated_norm",), (out,))[0]
