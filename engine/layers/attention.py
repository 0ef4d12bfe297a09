"""Grouped-query attention over the paged cache.

There are three paths, which agree: the explicit scores -> probs -> context when a tap on scores or probs is on,
`scaled_dot_product_attention` otherwise, and on a GPU in half precision `paged_attention` for the whole batch at
once, unless a tap or a replaced seam lies inside the kernel. The first two take the same additive bias, so a wrong
mask is wrong in both, and run a ragged batch sequence by sequence, so that a sequence's result does not depend on
the rest of the batch. With `Comm.all_reduce` it is bit-equal alone and in a batch on the CPU in half precision, at any
tp; in float32 with `EngineConfig.batch_invariant`, else to rounding, as MKL's order of summation depends on the number
of rows. On a GPU neither is promised.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from lockstep.engine.batch import Batch, SequenceSpan
from lockstep.engine.config import ModelConfig
from lockstep.engine.kv.pool import KVPool
from lockstep.engine.layers import paged_attention
from lockstep.engine.layers.linear import QKVParallelLinear, RowParallelLinear
from lockstep.engine.layers.paged_attention import Pages
from lockstep.engine.layers.wiring import Wiring
from lockstep.engine.parallel import shards
from lockstep.engine.rules import CORRECT


class StepInputs:
    """Inputs shared by the attention of all layers in a step, computed on first use: additive biases (one per
    sequence and window) and block tables."""

    def __init__(self, batch: Batch, wiring: Wiring, dtype: torch.dtype) -> None:
        self._batch, self._rules, self._dtype = batch, wiring.rules, dtype
        self._made: dict[tuple[int, int | None], Tensor] = {}
        self._pages: Pages | None = None

    def pages(self, page_size: int) -> Pages:
        """The batch's block tables and lengths."""
        if self._pages is None:
            self._pages = Pages.of(self._batch, page_size)
        return self._pages

    def bias(self, index: int, window: int | None) -> Tensor:
        """Bias [T, keys read] of the batch's sequence `index` under `window`."""
        key = (index, window)
        if key not in self._made:
            span = self._batch.spans[index]
            first = self._rules.cache_reuse(span.kv_len, span.stop - span.start)
            allowed = self._rules.window(span.q_positions, span.kv_positions[first:], window)
            self._made[key] = self._rules.mask(allowed).to(self._dtype)
        return self._made[key]


class Attention:
    """One layer's attention over this rank's heads."""

    def __init__(
        self,
        layer: int,
        model: ModelConfig,
        qkv: QKVParallelLinear,
        o_proj: RowParallelLinear,
        norms: tuple[Tensor, Tensor] | None,
        page_size: int,
    ) -> None:
        self.layer, self.model, self.page_size = layer, model, page_size
        self.qkv, self.o_proj, self.norms = qkv, o_proj, norms
        comm = o_proj.comm
        self.heads = shards.heads(model, comm.size, comm.rank).size
        self.kv_heads = shards.kv_heads(model, comm.size, comm.rank).size
        self.head_dim, self.eps = model.head_dim, model.rms_eps
        self.window = model.windows[layer] if model.windows else None

    def bind(self, wiring: Wiring) -> None:
        """Take the seams in force and the taps that are on."""
        self.rules = wiring.rules
        self.scale = wiring.rules.scale(self.model)
        self.cache = wiring.rules.cache_layer(self.layer)  # the layer of the pool that is this one's
        self.qkv.bind(wiring)
        self.o_proj.bind(wiring, "attn.o_proj")
        names = ("q_proj", "k_proj", "v_proj")
        self.tap_q, self.tap_k, self.tap_v = (wiring.tap(f"attn.{name}") for name in names)
        self.tap_q_norm, self.tap_k_norm = wiring.tap("attn.q_norm"), wiring.tap("attn.k_norm")
        self.tap_q_rope, self.tap_k_rope = wiring.tap("attn.q_rope"), wiring.tap("attn.k_rope")
        self.tap_k_cache, self.tap_v_cache = wiring.tap("attn.k_cache"), wiring.tap("attn.v_cache")
        self.tap_scores, self.tap_probs = wiring.tap("attn.scores"), wiring.tap("attn.probs")
        self.tap_context = wiring.tap("attn.context")
        self.explicit = bool(self.tap_scores or self.tap_probs or wiring.rules.softmax is not CORRECT.softmax)
        tapped = self.explicit or self.tap_k_cache or self.tap_v_cache
        weight = self.o_proj.weight
        #: Why the paged kernel is not used and rows are gathered for SDPA; None: it is used.
        self.unpaged = "a tap is on" if tapped else paged_attention.refusal(
            wiring.rules, device=weight.device, dtype=weight.dtype, heads=self.heads, kv_heads=self.kv_heads,
            head_dim=self.head_dim, page=self.page_size,
        )  # fmt: skip

    def __call__(
        self, x: Tensor, batch: Batch, rope: tuple[Tensor, Tensor], inputs: StepInputs, pool: KVPool
    ) -> Tensor:
        q, k, v = self._project(x)  # [T, heads, D], [T, kv_heads, D] twice
        q, k = self._rotate(q, k, rope)
        group = self.heads // self.kv_heads
        stored = (self.rules.cache_heads(k, group), self.rules.cache_heads(v, group))
        pool.write(self.cache, batch, *stored)
        context = self._paged(q, inputs, pool) if self.unpaged is None else self._each(q, batch, inputs, pool)
        if self.tap_context:
            self.tap_context(context)
        return self.o_proj(context)  # [T, H]

    def _paged(self, q: Tensor, inputs: StepInputs, pool: KVPool) -> Tensor:
        """All sequences at once: q [T, heads, D] -> [T, heads * D]."""
        keys, values = pool.keys[self.cache], pool.values[self.cache]
        pages = inputs.pages(self.page_size)
        return paged_attention.attend(q, keys, values, pages, scale=self.scale, window=self.window).flatten(1)

    def _each(self, q: Tensor, batch: Batch, inputs: StepInputs, pool: KVPool) -> Tensor:
        """Sequence by sequence: q [T, heads, D] -> [T, heads * D]."""
        contexts = [
            self._attend(index, span, q[span.start : span.stop], inputs.bias(index, self.window), pool)
            for index, span in enumerate(batch.spans)
        ]
        return contexts[0] if len(contexts) == 1 else torch.cat(contexts)

    def _project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = self.qkv(x)  # [T, q], [T, kv], [T, kv]
        if self.tap_q:
            self.tap_q(q)
        if self.tap_k:
            self.tap_k(k)
        if self.tap_v:
            self.tap_v(v)
        q, k, v = (
            self.qkv.own_heads(i, part).unflatten(-1, (-1, self.head_dim)) for i, part in enumerate((q, k, v))
        )
        if self.norms is not None:  # Qwen3 normalises every head of q and k on its own
            q, k = self.rules.norm(q, self.norms[0], self.eps), self.rules.norm(k, self.norms[1], self.eps)
            if self.tap_q_norm:
                self.tap_q_norm(q)
            if self.tap_k_norm:
                self.tap_k_norm(k)
        return q, k, v

    def _rotate(self, q: Tensor, k: Tensor, rope: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        q, k = self.rules.rope(q, *rope), self.rules.rope(k, *rope)
        if self.tap_q_rope:
            self.tap_q_rope(q)
        if self.tap_k_rope:
            self.tap_k_rope(k)
        return q, k

    def _attend(self, index: int, span: SequenceSpan, q: Tensor, bias: Tensor, pool: KVPool) -> Tensor:
        """One sequence: q [T, heads, D] over its cached rows -> [T, heads * D]."""
        first = self.rules.cache_reuse(span.kv_len, q.shape[0])
        k, v = pool.read(self.cache, span.rows[first:])  # [K, kv_heads, D]
        if self.tap_k_cache:
            self.tap_k_cache(k, index)
        if self.tap_v_cache:
            self.tap_v_cache(v, index)
        v = self.rules.cache_values(k, v)
        group = self.heads // self.kv_heads
        q = q.transpose(0, 1).unflatten(0, (self.kv_heads, group))  # [kv_heads, group, T, D]
        k = self.rules.kv_expand(k, self.kv_heads, group)  # [kv_heads, 1 or group, K, D]
        v = self.rules.kv_expand(v, self.kv_heads, group)
        attend = self._explicit if self.explicit else self._fused
        return self.rules.merge(attend(index, q, k, v, bias).flatten(0, 1))

    def _fused(self, index: int, q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        """q [kv_heads, group, T, D] -> [kv_heads, group, T, D]."""
        if q.shape[2] == 1:  # one token: query heads that share a KV head and their one row of bias
            rows = q.reshape(self.kv_heads, k.shape[1], -1, self.head_dim)
            out = F.scaled_dot_product_attention(rows, k, v, attn_mask=bias, scale=self.scale)
            return out.reshape(q.shape)
        k, v = k.expand(-1, q.shape[1], -1, -1), v.expand(-1, q.shape[1], -1, -1)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=self.scale)

    def _explicit(self, index: int, q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        """q [kv_heads, group, T, D] -> [kv_heads, group, T, D]. Query heads that share a KV head are rows of
        one product, so that the shared rows are read once and never copied."""
        rows = q.reshape(self.kv_heads, k.shape[1], -1, self.head_dim)  # [kv_heads, n, group / n * T, D]
        products = (rows @ k.transpose(-1, -2)).view(*q.shape[:3], -1)
        scores = products * self.scale + bias  # [kv_heads, group, T, K]
        if self.tap_scores:
            self.tap_scores(scores.flatten(0, 1), index)
        probs = self.rules.softmax(scores, q.dtype)
        if self.tap_probs:
            self.tap_probs(probs.flatten(0, 1), index)
        return (probs.view(*rows.shape[:3], -1) @ v).view(q.shape)
