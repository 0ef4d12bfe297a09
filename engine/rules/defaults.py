"""The correct behaviour at the seams of `Rules`, as plain functions.

Layers depend on rules, never the reverse. Rotary embedding and normalisation have modules of their own
(`engine.rules.rope`, `engine.rules.norm`); how parameters are split is in `engine.parallel.shards`.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from lockstep.engine.batch import Batch
from lockstep.engine.checkpoint.block_types import BlockType
from lockstep.engine.checkpoint.gguf.source import decode
from lockstep.engine.config import ModelConfig
from lockstep.engine.config.families import Activation, ClampedSwiGLU, Gating
from lockstep.engine.config.query_scaling import QueryScaling
from lockstep.engine.parallel.comm import Comm
from lockstep.engine.rules.activation import silu_times


def load_every(name: str) -> bool:
    """Which checkpoint tensors are read: all of them."""
    return True


def dequantised(name: str, raw: Tensor, type: BlockType) -> Tensor:
    """The values of the blocks of a GGUF tensor, [..., bytes] -> [..., elements]."""
    return decode(raw, type)


def as_stored(name: str, tensor: Tensor) -> Tensor:
    """What is done to a tensor between file and layer: nothing."""
    return tensor


def head_tensor(model: ModelConfig) -> str | None:
    """The checkpoint tensor that the output head is filled from (None: left at its initial values)."""
    return "model.embed_tokens.weight" if model.tie_embeddings else "lm_head.weight"


def looked_up(rows: Tensor, model: ModelConfig) -> Tensor:
    """What goes on from the embedding [T, hidden]: its rows, times the model's multiplier in the rows' own dtype."""
    if model.embedding_multiplier == 1:
        return rows
    return rows * float(torch.tensor(model.embedding_multiplier, dtype=rows.dtype))


def own_positions(batch: Batch) -> Tensor:
    """The positions [T] by which q and k are rotated: those at which the tokens stand."""
    return batch.positions


def values_of(keys: Tensor, values: Tensor) -> Tensor:
    """What the probabilities weigh, of cached rows [K, heads, D]: the values."""
    return values


def softmax(scores: Tensor, dtype: torch.dtype) -> Tensor:
    """[..., K] -> [..., K], in float32 whatever the model's `dtype`."""
    return scores.float().softmax(-1).to(dtype)


def softmax_beside(scores: Tensor, sinks: Tensor, dtype: torch.dtype) -> Tensor:
    """The same of scores [h, group, t, K] with exp of each head's sink [h, group, 1, 1] as one term more in the sum, of
    which nothing is weighed (arXiv:2309.17453)."""
    beside = sinks.float().expand(*scores.shape[:-1], 1)
    return torch.cat((scores.float(), beside), -1).softmax(-1)[..., :-1].to(dtype)


def merge_heads(heads: Tensor) -> Tensor:
    """The heads' outputs [heads, T, D] side by side, [T, heads * D]."""
    return heads.transpose(0, 1).flatten(1)


def normed_rows(stream: Tensor, normed: Tensor) -> Tensor:
    """What the output head reads [T, hidden]: the residual stream after the final norm."""
    return normed


def configured_theta(model: ModelConfig) -> float:
    """The base of the rotary angles."""
    return model.rope_theta


def next_positions(cached: int, new: int) -> range:
    """Positions of `new` tokens of a sequence of which `cached` tokens were already run."""
    return range(cached, cached + new)


def sum_over_ranks(partial: Tensor, comm: Comm) -> Tensor:
    """Finish a row-parallel product [T, out]: the sum of the ranks' partials, in place."""
    return comm.all_reduce(partial)


def bias_once(total: Tensor, bias: Tensor, comm: Comm) -> Tensor:
    """A row-parallel layer's bias, added to the sum: once, however many ranks there are."""
    return total + bias


def add_residual(residual: Tensor, update: Tensor) -> Tensor:
    """[T, hidden] + [T, hidden]."""
    return residual + update


def split_packed(packed: Tensor, sizes: tuple[int, ...], model: ModelConfig, tp: int) -> tuple[Tensor, ...]:
    """Cut this rank's fused output [T, q + k + v] by its own `sizes` into q, k and v."""
    parts: tuple[Tensor, ...] = torch.split_with_sizes(packed, sizes, -1)
    return parts


def store_kv_heads(kv: Tensor, num_heads: int) -> Tensor:
    """What is written to the cache of a projection [T, kv_heads, D]: itself, never the repeated heads."""
    return kv


def own_cache(layer: int) -> int:
    """Which layer of the cache a layer writes to and reads: its own."""
    return layer


def attend_all(kv_len: int, new: int) -> int:
    """First cached row that attention reads: 0, for a decode step sees everything before it."""
    return 0


def within_window(q_positions: Tensor, rows: slice, kv_positions: Tensor, window: int | None) -> Tensor:
    """Which keys each of the queries `rows` may see, [rows, K] bool: none after it, none `window` or more before it.
    `q_positions` [T] are those of all queries of the pass."""
    distance = q_positions[rows, None] - kv_positions[None, :]
    seen = distance >= 0
    return seen if window is None else seen & (distance < window)


def within_chunk(q_positions: Tensor, rows: slice, kv_positions: Tensor, chunk: int) -> Tensor:
    """The same where attention is in chunks: none after it, none of another chunk of so many positions."""
    chunks = kv_positions // chunk == (q_positions[rows] // chunk)[:, None]
    return chunks & within_window(q_positions, rows, kv_positions, None)


def query_factor(positions: Tensor, scaling: QueryScaling) -> Tensor:
    """What queries at those positions [T] are multiplied by, [T] float32."""
    steps = ((positions + scaling.offset) / scaling.length).floor()
    return 1 + scaling.beta * steps.float().log1p()


def unit_heads(x: Tensor, eps: float) -> Tensor:
    """Each head of queries or keys [T, heads, D], or row [T, H], over its root mean square, in float32 within."""
    return F.rms_norm(x.float(), x.shape[-1:], None, eps).to(x.dtype)


def additive_bias(allowed: Tensor) -> Tensor:
    """[rows, K] bool -> float32: 0 where allowed, -inf elsewhere. Filled, never multiplied: 0 * -inf is NaN."""
    return torch.zeros(allowed.shape, device=allowed.device).masked_fill(~allowed, -math.inf)


def softmax_scale(model: ModelConfig) -> float:
    """What scores are multiplied by."""
    return model.scale


def clamped(x: Tensor, limit: float) -> Tensor:
    """x within ±limit."""
    return x.clamp(-limit, limit)


def times_number(x: Tensor, factor: float, tap: str) -> Tensor:
    """x times the number of that tap."""
    return x * factor


def capped(x: Tensor, cap: float) -> Tensor:
    """cap * tanh(x / cap): never beyond the cap (Gemma 2, arXiv:2408.00118)."""
    return (x / cap).tanh_().mul_(cap)


def residual_multiplier(model: ModelConfig) -> float:
    """What is multiplied by what a block adds to the stream."""
    return model.residual_multiplier


def divided_logits(logits: Tensor, model: ModelConfig) -> Tensor:
    """What the logits come to after the product [S, V / tp]."""
    if model.logit_divisor != 1:
        logits = logits / model.logit_divisor
    return capped(logits, model.logit_cap) if model.logit_cap else logits


def share_kv_heads(kv: Tensor, kv_heads: int, group: int) -> Tensor:
    """What query heads [kv_heads, group] read of cached rows [K, kv_heads, D]: [kv_heads, n, K, D].

    Query head h reads KV head h // group, so a group shares its head: n = 1 and a view. Where each query head
    is given one of its own, n = group.
    """
    return kv.transpose(0, 1).unsqueeze(1)


def act_and_mul(gate: Tensor, up: Tensor, activation: Gating) -> Tensor:
    """SwiGLU, GEGLU (Shazeer 2020, arXiv:2002.05202): activation(gate) * up, each [T, intermediate]; or clamped."""
    if activation == "silu":
        return silu_times(gate, up)
    if isinstance(activation, ClampedSwiGLU):
        up = up.clamp(-activation.limit, activation.limit) + 1
    return gated(gate, activation) * up


def gated(gate: Tensor, activation: Gating) -> Tensor:
    """What up is multiplied by."""
    if isinstance(activation, ClampedSwiGLU):
        gate = gate.clamp(max=activation.limit)
        return gate * (gate * activation.slope).sigmoid()
    return activated(gate, activation)


def activated(x: Tensor, activation: Activation) -> Tensor:
    """The activation alone."""
    if activation == "silu":
        return F.silu(x)
    if activation == "relu2":
        return F.relu(x).square()
    return F.gelu(x, approximate="tanh" if activation == "gelu_tanh" else "none")
