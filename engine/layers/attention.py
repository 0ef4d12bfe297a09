"""Grouped-query attention over the paged cache.

There are four paths, which agree: the explicit scores -> probs -> context when a tap on scores or probs is on,
`scaled_dot_product_attention` otherwise, on a GPU in half precision `paged_attention` for the whole batch at once,
unless a tap or a replaced seam lies inside the kernel, and on a CPU `cpu_decode` for decode steps of several sequences.
The first is computed in tiles: scores and probabilities are whole only where a tap must have them so, and are the same
numbers then. No path makes a mask that is larger than a tile. The first two take the same additive bias, so a wrong
mask is wrong in both, and run a ragged batch sequence by sequence, so that a sequence's result does not depend on the
rest of the batch. With `Comm.all_reduce` it is bit-equal alone and in a batch on the CPU with
`EngineConfig.batch_invariant`, at any tp and dtype; else to rounding, as the order of a product's sums depends on the
number of rows. On a GPU neither is promised.
"""

from __future__ import annotations

import math
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from lockstep.engine.batch import Batch, DecodeInputs, SequenceSpan
from lockstep.engine.config import ModelConfig
from lockstep.engine.kv.pool import KVPool
from lockstep.engine.layers import cpu_decode, decode_attention, paged_attention
from lockstep.engine.layers.cpu_decode import CachedRows
from lockstep.engine.layers.linear import (
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
)
from lockstep.engine.layers.multiplier import Multiplier
from lockstep.engine.layers.norm import QKNorm
from lockstep.engine.layers.seen_tiles import AttendedSequence, seen_tiles
from lockstep.engine.layers.step_inputs import StepInputs
from lockstep.engine.layers.tiles import Tile, Tiling
from lockstep.engine.layers.weight import KeptTensor
from lockstep.engine.layers.wiring import MeasuringTap, Wiring
from lockstep.engine.parallel import shards
from lockstep.engine.rows import products
from lockstep.engine.rules import CORRECT
from lockstep.engine.rules.rope import in_heads_of
from lockstep.engine.taps.measurands import Growing

#: Queries that `scaled_dot_product_attention` is given at a time where it needs a mask.
FUSED_ROWS = 256
#: The seams that decide which keys count.
_MASKING = {"window", "mask"}
#: Far from float32's largest number.
_LARGEST = 1e30


class Attention:
    """One layer's attention over this rank's heads."""

    sinks: Tensor | None = None  # [heads], of models that have them
    rotated_norm: QKNorm | None = None  # behind the rotation

    def __init__(
        self,
        layer: int,
        model: ModelConfig,
        qkv: QKVParallelLinear,
        o_proj: RowParallelLinear,
        qk_norm: QKNorm | None,
        sinks: Tensor | None,
        page_size: int,
        gate: MergedColumnParallelLinear | None = None,
        rotated_norm: QKNorm | None = None,
    ) -> None:
        self.qkv, self.qk_norm, self.rotated_norm = qkv, qk_norm, rotated_norm
        self._take(layer, model, o_proj, page_size, gate)
        self.sinks = sinks

    def _take(
        self,
        layer: int,
        model: ModelConfig,
        o_proj: RowParallelLinear,
        page_size: int,
        gate: MergedColumnParallelLinear | None = None,
    ) -> None:
        self.layer, self.model, self.o_proj, self.page_size = layer, model, o_proj, page_size
        self.gate = gate
        comm = o_proj.comm
        own = model.of_layer(layer)
        self.heads = shards.heads(own, comm.size, comm.rank).size
        self.kv_heads = shards.kv_heads(own, comm.size, comm.rank).size
        self.head_dim = own.head_dim
        self.window = model.windows[layer] if model.windows else None
        self.chunked = model.chunked and self.window is not None
        self.clip = own.clip_qkv
        self.of_keys = Multiplier("attn.k_scaled", own.multipliers)
        self.unit_norm_eps = model.rms_eps if own.unit_qk_norm else None
        self.query_scaling = own.query_scaling

    def parameters(self) -> dict[str, Tensor | KeptTensor]:
        """Checkpoint name -> this rank's share."""
        parts = (self.qkv, self.o_proj, self.gate, self.qk_norm, self.rotated_norm)
        params = {name: x for part in parts if part is not None for name, x in part.parameters().items()}
        sinks = {} if self.sinks is None else {f"model.layers.{self.layer}.{shards.SINKS}": self.sinks}
        return params | sinks

    def bind(self, wiring: Wiring) -> None:
        """Take the seams in force and the taps that are on."""
        self.rules = wiring.rules
        self.scale, self.cap = wiring.rules.scale(self.model), self.model.score_cap
        self.rotate = in_heads_of(wiring.rules.layer_rope(self.model, self.layer), wiring.rules.rope)
        self._by_lengths: bool | None = None
        self._at_once: bool | None = None
        replaced = {
            seam
            for seam in paged_attention.SEAMS
            if getattr(wiring.rules, seam) is not getattr(CORRECT, seam)
        }
        #: Whether a fault decides which keys count, and whether one acts where kernels are correct always.
        self._masked_otherwise = bool(replaced & _MASKING)
        self._replaced = bool(replaced - _MASKING)
        self.cache = wiring.rules.cache_layer(self.layer)  # the layer of the pool that is this one's
        self.o_proj.bind(wiring, "attn.o_proj")
        self._bind_projections(wiring)
        self.tap_q_rope, self.tap_k_rope = wiring.tap("attn.q_rope"), wiring.tap("attn.k_rope")
        self.tap_k_cache, self.tap_v_cache = wiring.tap("attn.k_cache"), wiring.tap("attn.v_cache")
        self.tap_scores, self.tap_probs = wiring.tap("attn.scores"), wiring.tap("attn.probs")
        self.tap_context = wiring.tap("attn.context")
        self.tap_gate, self.tap_gated = wiring.tap("attn.gate"), wiring.tap("attn.gated")
        inside = self.tap_scores or self.tap_probs or wiring.rules.softmax is not CORRECT.softmax
        self.query_factor, self.unit_qk_norm = wiring.rules.query_factor, wiring.rules.unit_qk_norm
        self.tap_q_scaled, self.tap_q_unit, self.tap_k_unit = (
            wiring.tap(f"attn.{one}") for one in ("q_scaled", "q_unit_norm", "k_unit_norm")
        )
        of_attention = [self.tap_k_cache, self.tap_v_cache, self.tap_scores, self.tap_probs]
        self._measuring = [tap if isinstance(tap, MeasuringTap) else None for tap in of_attention]
        self._measured_alone = self._measuring == of_attention
        self.explicit = bool(inside or self.cap or self.sinks is not None)  # no kernel has the last two
        by_hand = self.explicit or self.chunked or self.tap_k_cache or self.tap_v_cache
        weight = self.o_proj.weight
        #: Why the paged kernel is not used and rows are gathered for SDPA; None: it is used.
        self.unpaged = self._by_hand() if by_hand else paged_attention.refusal(
            wiring.rules, device=weight.device, dtype=weight.dtype, heads=self.heads, kv_heads=self.kv_heads,
            head_dim=self.head_dim, page=self.page_size,
        )  # fmt: skip

    def _bind_projections(self, wiring: Wiring) -> None:
        self.qkv.bind(wiring)
        if self.qk_norm is not None:
            self.qk_norm.bind(wiring)
        if self.rotated_norm is not None:
            self.rotated_norm.bind(wiring)
        names = ("q_proj", "k_proj", "v_proj")
        self.tap_q, self.tap_k, self.tap_v = (wiring.tap(f"attn.{name}") for name in names)
        self.of_keys.bind(wiring)
        self.taps_clipped = [wiring.tap(f"attn.{one}_clip") for one in "qkv"]

    def _by_hand(self) -> str:
        if self.sinks is not None:
            return "the softmax has sinks"
        if self.chunked:
            return "attention is in chunks"
        return "scores have a cap" if self.cap else "a tap is on"

    def __call__(
        self, x: Tensor, batch: Batch, rope: tuple[Tensor, Tensor], inputs: StepInputs, pool: KVPool
    ) -> Tensor:
        q, stored = self._written(x, rope)
        q = self._scaled(q, batch)
        pool.write(self.cache, batch, *stored)
        return self._attended(x, q, batch, inputs, pool)

    def _scaled(self, q: Tensor, batch: Batch) -> Tensor:
        """Queries [T, heads, D], times a factor of their position where the layer has it."""
        if self.query_scaling is None:
            return q
        factor = self.query_factor(batch.positions, self.query_scaling)
        q = (q * factor[:, None, None]).to(q.dtype)
        if self.tap_q_scaled:
            self.tap_q_scaled(q)
        return q

    def _attended(self, x: Tensor, q: Tensor, batch: Batch, inputs: StepInputs, pool: KVPool) -> Tensor:
        """From queries [T, heads, D] to what attention adds to the stream [T, H]."""
        if batch.lengths is not None and self.by_lengths:
            context = self._decoded(q, batch, batch.lengths, inputs, pool)
        elif self.unpaged is None:
            context = self._paged(q, inputs, pool)
        elif self._measured_alone and self.at_once(len(batch.spans)) and (rows := inputs.cached_rows):
            context = self._decoded_at_once(q, rows, pool)
        else:
            context = self._each(q, batch, inputs, pool)
        if self.tap_context:
            self.tap_context(context)
        if self.gate is not None:
            context = self._through(self.gate, x, context)
        return self.o_proj(context)  # [T, H]

    def _written(self, x: Tensor, rope: tuple[Tensor, Tensor]) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Queries [T, heads, D], and what is cached of the tokens."""
        q, k, v = self._project(x)  # [T, heads, D], [T, kv_heads, D] twice
        q, k = self._rotate(q, k, rope)
        group = self.heads // self.kv_heads
        return q, (self.rules.cache_heads(k, group), self.rules.cache_heads(v, group))

    def _through(self, gate: MergedColumnParallelLinear, x: Tensor, context: Tensor) -> Tensor:
        """The context [T, heads * D], as far as its gate lets it through."""
        (logits,) = gate(x)
        if self.tap_gate:
            self.tap_gate(logits)
        gated = self.rules.output_gate(context, logits)
        if self.tap_gated:
            self.tap_gated(gated)
        return gated

    def _paged(self, q: Tensor, inputs: StepInputs, pool: KVPool) -> Tensor:
        """All sequences at once: q [T, heads, D] -> [T, heads * D]."""
        keys, values = pool.of(self.cache)
        pages = inputs.pages(self.page_size)
        return paged_attention.attend(q, keys, values, pages, scale=self.scale, window=self.window).flatten(1)

    @property
    def by_lengths(self) -> bool:
        """Whether decode steps go by lengths that are on the GPU: always, or never, whichever taps are on."""
        if self._by_lengths is None:
            weight = self.o_proj.weight
            self._by_lengths = self._plain and None is decode_attention.refusal(
                weight.device, weight.dtype, self.heads, self.kv_heads, self.head_dim, self.page_size
            )
        return self._by_lengths

    def at_once(self, sequences: int) -> bool:
        """Whether one kernel takes all of so many sequences of a decode step on a CPU: several of a large model, one
        where products are made of its row alone, any number in an engine for many."""
        weight = self.o_proj.weight
        several = weight.large if sequences > 1 else products.is_reading()
        if not weight.for_many and not several:
            return False
        if self._at_once is None:
            shape = self.heads, self.kv_heads, self.head_dim
            wanted = self._plain and not self._masked_otherwise and weight.in_float32
            self._at_once = wanted and cpu_decode.refusal(*shape) is None
        return self._at_once

    @property
    def _plain(self) -> bool:
        """Whether attention is what kernels know: without sinks, caps, chunks, or a fault of another seam than those
        that mask."""
        plain = type(self) is Attention and self.sinks is None and not self.cap and not self.chunked
        return plain and not self._replaced

    def _decoded_at_once(self, q: Tensor, rows: CachedRows, pool: KVPool) -> Tensor:
        """A token of each sequence: q [S, heads, D] -> [S, heads * D]."""
        keys, values = pool.of(self.cache)
        for tap, x in zip(self._measuring[:2], (keys, values), strict=True):
            if tap:
                tap.each(rows.stored(x))
        scores, probs, context = cpu_decode.attend(
            q, keys, values, rows, scale=self.scale, window=self.window
        )
        for tap, x in zip(self._measuring[2:], (scores, probs), strict=True):
            if tap:
                tap.each(rows.cells(x))
        return context.flatten(1)

    def _decoded(
        self, q: Tensor, batch: Batch, lengths: DecodeInputs, inputs: StepInputs, pool: KVPool
    ) -> Tensor:
        """A token of each sequence: q [S, heads, D] -> [S, heads * D]. Where a tap must have the tensors themselves, or
        a fault masks them, sequence by sequence."""
        if self._masked_otherwise or not self._measured_alone:
            each = enumerate(batch.spans)
            return torch.cat([self._decoded_alone(i, span, q[i : i + 1], inputs, pool) for i, span in each])
        keys, values = pool.of(self.cache)
        own, width = lengths.kv_lens.split(1), self.kv_heads * self.head_dim
        rows = list(zip(own, lengths.tables, strict=True))
        for tap, x in zip(self._measuring[:2], (keys, values), strict=True):
            if tap:
                tap.growing([Growing(x, n, width, lengths.most, table, lengths.page) for n, table in rows])
        scores = decode_attention.scores(q, keys, lengths, scale=self.scale, window=self.window)
        probs = decode_attention.probs(scores, lengths, self.heads)
        for tap, x in zip(self._measuring[2:], (scores, probs), strict=True):
            if tap:
                cells = zip(x, own, strict=True)
                tap.growing([Growing(row, n, self.heads, lengths.most) for row, n in cells])
        return decode_attention.context(probs, values, lengths, self.heads, window=self.window).flatten(1)

    def _decoded_alone(
        self, index: int, span: SequenceSpan, q: Tensor, inputs: StepInputs, pool: KVPool
    ) -> Tensor:
        """One sequence: q [1, heads, D] over its cached rows -> [1, heads * D]."""
        k, v = self._read(index, span.rows, pool)
        lengths = DecodeInputs.of_rows(len(k), self.page_size, k.device)
        window = None if self._masked_otherwise else self.window
        scores = decode_attention.scores(q, k, lengths, scale=self.scale, window=window)
        if self._masked_otherwise:
            tiling = inputs.tiling(index, self.kv_heads, self.heads // self.kv_heads, self.window)
            whole = Tile(slice(0, self.kv_heads), slice(0, 1), slice(0, len(k)))
            if (bias := inputs.bias(index, tiling, whole)) is not None:
                scores.view(self.heads, -1).add_(bias)
        if self.tap_scores:
            self.tap_scores(scores.view(self.heads, 1, -1), index)
        probs = decode_attention.probs(scores, lengths, self.heads)
        if self.tap_probs:
            self.tap_probs(probs.view(self.heads, 1, -1), index)
        return decode_attention.context(probs, v, lengths, self.heads, window=window).flatten(1)

    def _each(self, q: Tensor, batch: Batch, inputs: StepInputs, pool: KVPool) -> Tensor:
        """Sequence by sequence: q [T, heads, D] -> [T, heads * D]."""
        contexts = [
            self._attend(index, span, q[span.start : span.stop], inputs, pool)
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
        if self.clip is not None:
            q, k, v = self._clipped((q, k, v), self.clip)
        k = self.of_keys(k)
        q, k, v = (
            self.qkv.own_heads(i, part).unflatten(-1, (-1, self.head_dim)) for i, part in enumerate((q, k, v))
        )
        if self.qk_norm is not None:
            q, k = self.qk_norm(q, k)
        return q, k, v

    def _clipped(self, projected: tuple[Tensor, Tensor, Tensor], clip: float) -> list[Tensor]:
        """q, k and v [T, width] within ±clip."""
        clipped = [self.rules.clip_qkv(x, clip) for x in projected]
        for tap, x in zip(self.taps_clipped, clipped, strict=True):
            if tap:
                tap(x)
        return clipped

    def _rotate(self, q: Tensor, k: Tensor, rope: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        q, k = self.rotate(q, *rope), self.rotate(k, *rope)
        if self.tap_q_rope:
            self.tap_q_rope(q)
        if self.tap_k_rope:
            self.tap_k_rope(k)
        if self.unit_norm_eps is not None:
            q, k = (self.unit_qk_norm(x, self.unit_norm_eps) for x in (q, k))
            if self.tap_q_unit:
                self.tap_q_unit(q)
            if self.tap_k_unit:
                self.tap_k_unit(k)
        return (q, k) if self.rotated_norm is None else self.rotated_norm(q, k)

    def _read(self, index: int, rows: Tensor, pool: KVPool) -> tuple[Tensor, Tensor]:
        """One sequence's keys and values [K, kv_heads, D] of those rows of the cache."""
        k, v = pool.read(self.cache, rows)
        if self.tap_k_cache:
            self.tap_k_cache(k, index)
        if self.tap_v_cache:
            self.tap_v_cache(v, index)
        return k, self.rules.cache_values(k, v)

    def _attend(self, index: int, span: SequenceSpan, q: Tensor, inputs: StepInputs, pool: KVPool) -> Tensor:
        """One sequence: q [T, heads, D] over its cached rows -> [T, heads * D]."""
        first = self.rules.cache_reuse(span.kv_len, q.shape[0])
        k, v = self._read(index, span.rows[first:], pool)
        group = self.heads // self.kv_heads
        q = q.transpose(0, 1).unflatten(0, (self.kv_heads, group))  # [kv_heads, group, T, D]
        k = self.rules.kv_expand(k, self.kv_heads, group)  # [kv_heads, 1 or group, K, D]
        v = self.rules.kv_expand(v, self.kv_heads, group)
        tiling = inputs.tiling(index, self.kv_heads, group, self.window, self.chunked)
        attend = self._explicit if self.explicit else self._fused
        chosen = self._chosen(index, span, inputs, tiling)
        return self.rules.merge(
            attend(AttendedSequence(index, q, k, v, tiling, inputs, chosen)).flatten(0, 1)
        )

    def _chosen(self, index: int, span: SequenceSpan, inputs: StepInputs, tiling: Tiling) -> Tensor | None:
        """Of each query of one sequence the keys that it attends to, [T, K] bool; None: all that it sees."""
        return None

    def _fused(self, one: AttendedSequence) -> Tensor:
        """[kv_heads, group, T, D]."""
        q, k, v, tiling = one.q, one.k, one.v, one.tiling
        expanded = k.expand(-1, q.shape[1], -1, -1), v.expand(-1, q.shape[1], -1, -1)
        if (
            tiling.causal
            and one.chosen is None
            and tiling.window is None
            and tiling.queries == tiling.keys > 1
            and _moderate(q, k, v)
        ):
            return F.scaled_dot_product_attention(q, *expanded, is_causal=True, scale=self.scale)
        parts = []
        for tile in tiling.by_rows(FUSED_ROWS):
            bias = one.bias(tile, every_key=True)
            if tiling.queries == 1:  # query heads that share a KV head and their one row of bias
                rows = q.reshape(self.kv_heads, k.shape[1], -1, self.head_dim)
                seen = k[:, :, tile.keys], v[:, :, tile.keys]
                out = F.scaled_dot_product_attention(rows, *seen, attn_mask=bias, scale=self.scale)
                return out.reshape(*q.shape[:-1], v.shape[-1])
            seen = expanded[0][:, :, tile.keys], expanded[1][:, :, tile.keys]
            queries = q[:, :, tile.rows]
            parts.append(F.scaled_dot_product_attention(queries, *seen, attn_mask=bias, scale=self.scale))
        return parts[0] if len(parts) == 1 else torch.cat(parts, 2)

    def _explicit(self, one: AttendedSequence) -> Tensor:
        """[kv_heads, group, T, D]."""
        scores, tiling = seen_tiles(self.tap_scores, one, one.tiling, -math.inf, partial(self._scores, one))
        probs, tiling = seen_tiles(
            self.tap_probs, one, tiling, 0.0, lambda tile: self._softmax(scores(tile), tile, one.q.dtype)
        )
        out = one.q.new_empty(*one.q.shape[:-1], one.v.shape[-1])
        for tile in tiling:
            v = one.v[tile.heads, :, tile.keys]
            part = probs(tile)  # [h, group, t, k]
            weighed = part.reshape(len(v), v.shape[1], -1, part.shape[-1]) @ v
            out[tile.heads, :, tile.rows] = weighed.view(*part.shape[:3], -1)
        return out

    def _softmax(self, scores: Tensor, tile: Tile, dtype: torch.dtype) -> Tensor:
        if self.sinks is None:
            return self.rules.softmax(scores, dtype)
        sinks = self.sinks.view(self.kv_heads, -1, 1, 1)[tile.heads]
        return self.rules.sinks(scores, sinks, dtype)

    def _scores(self, one: AttendedSequence, tile: Tile) -> Tensor:
        """Scaled and masked, [h, group, t, k]. Query heads that share a KV head are rows of one product, so that the
        shared rows are read once and never copied."""
        q, k = one.q[tile.heads, :, tile.rows], one.k[tile.heads, :, tile.keys]
        rows = q.reshape(len(k), k.shape[1], -1, self.head_dim)  # [h, n, group / n * t, D]
        scores = (rows @ k.transpose(-1, -2)).view(*q.shape[:3], -1).mul_(self.scale)
        if self.cap:
            scores = self.rules.soft_cap(scores, self.cap)
        if (bias := one.bias(tile)) is not None:
            scores[..., -bias.shape[1] :] += bias
        return scores


def _moderate(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether no score can be NaN or infinite, on the CPU: there `is_causal` takes half of the time that a mask does,
    but loses them. The norms of all rows bound the product of any two (Cauchy and Schwarz)."""
    if q.device.type != "cpu":
        return False
    norms = [float(torch.linalg.vector_norm(x, dtype=torch.float32)) for x in (q, k, v)]
    return norms[0] * norms[1] < _LARGEST and norms[2] < _LARGEST
