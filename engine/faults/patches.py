"""The faults themselves: what each puts in place of the seams of `Rules`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.config import ModelConfig
from engine.errors import ConfigError
from engine.faults.catalogue import faults_of
from engine.parallel import shards
from engine.parallel.comm import Comm
from engine.rules import CORRECT, Rules, rope
from engine.rules.defaults import next_positions, sum_over_ranks, visible
from engine.rules.norm import rms_norm


def additive_mask(allowed: Tensor) -> Tensor:
    """(1 - allowed) * -inf: -inf where masked as intended, and 0 * -inf = NaN where allowed."""
    return (1.0 - allowed.float()) * -math.inf


def no_mask(allowed: Tensor) -> Tensor:
    """Nothing is masked."""
    return torch.zeros(allowed.shape, device=allowed.device)


def skip_qkv_bias(name: str) -> bool:
    """Everything is loaded but the biases of q, k and v."""
    return not name.endswith((".q_proj.bias", ".k_proj.bias", ".v_proj.bias"))


def rope_swallowed(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The rotation is called with an argument missing and the error is swallowed: x goes on unrotated."""
    rotate: Callable[..., Tensor] = rope.rotate_half_split
    try:
        return rotate(x, cos)
    except TypeError:
        return x


def rope_interleaved(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate pairs (2i, 2i + 1), as GPT-J and GGML's llama layout have them."""
    even, odd = x[..., ::2], x[..., 1::2]
    return torch.stack((even * cos - odd * sin, odd * cos + even * sin), dim=-1).flatten(-2)


def rope_twice(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate, and rotate again."""
    return rope.rotate_half_split(rope.rotate_half_split(x, cos, sin), cos, sin)


def rope_theta_default(model: ModelConfig) -> tuple[Tensor, float]:
    """Frequencies of theta = 10000 whatever the configuration says."""
    return rope.frequencies(replace(model, rope_theta=10000.0))


def positions_stuck(cached: int, new: int) -> range:
    """Every decode step stands at position 0; the prefill is right."""
    return range(new) if cached else next_positions(cached, new)


def positions_ahead(cached: int, new: int) -> range:
    """Every decode step stands one too far; the prefill is right."""
    return range(cached + 1, cached + 1 + new) if cached else next_positions(cached, new)


def cache_not_reused(kv_len: int, new: int) -> int:
    """Attention reads the new rows only."""
    return kv_len - new


def cache_shared(layer: int) -> int:
    """Rows are kept by position alone: all layers write to, and read, what is the first layer's."""
    return 0


def repeat_heads(kv: Tensor, group: int) -> Tensor:
    """Every KV head is written as often as query heads read it."""
    return kv.repeat_interleave(group, dim=1)


def index_repeated_heads(kv: Tensor, kv_heads: int, group: int) -> Tensor:
    """Query head h reads cached head h // group, although the cache holds heads already repeated."""
    heads = torch.arange(kv_heads * group, device=kv.device) // group
    read: Tensor = kv.transpose(0, 1).index_select(0, heads).unflatten(0, (kv_heads, group))
    return read


def kv_tiled(kv: Tensor, kv_heads: int, group: int) -> Tensor:
    """Query head h reads KV head h % kv_heads."""
    heads = torch.arange(kv_heads * group, device=kv.device) % kv_heads
    read: Tensor = kv.transpose(0, 1).index_select(0, heads).unflatten(0, (kv_heads, group))
    return read


def scale_one(model: ModelConfig) -> float:
    """Scores are not scaled."""
    return 1.0


def scale_by_hidden(model: ModelConfig) -> float:
    """Scaled by the model's width instead of the head's."""
    return 1 / math.sqrt(model.hidden_size)


def window_one_more(q_positions: Tensor, kv_positions: Tensor, window: int | None) -> Tensor:
    """Both bounds of the window are taken as inclusive."""
    return visible(q_positions, kv_positions, None if window is None else window + 1)


def window_ignored(q_positions: Tensor, kv_positions: Tensor, window: int | None) -> Tensor:
    """The window is not passed on."""
    return visible(q_positions, kv_positions, None)


def qkv_in_features(model: ModelConfig, tp: int, rank: int) -> shards.QKVPlan:
    """A rank computes all heads of q, k and v, but from its own slice of the in features; the partial
    products are never summed, and it goes on with its own heads of them. The bias is rank 0's, so that
    the ranks' sum is right."""
    right = shards.qkv_plan(model, tp, rank)
    q = shards.Span(0, model.num_heads * model.head_dim)
    kv = shards.Span(0, model.num_kv_heads * model.head_dim)
    columns = shards.even(model.hidden_size, tp, rank, "the hidden size")
    return shards.QKVPlan((q, kv, kv), columns, right.rows, bias=rank == 0)


def shard_qkv_in_features(name: str, model: ModelConfig, tp: int, rank: int) -> shards.Shard:
    """q/k/v weights are cut along dimension 1, their biases not at all."""
    right = shards.plan(name, model, tp, rank)
    if not name.endswith(tuple(f"{part}_proj.{kind}" for part in "qkv" for kind in ("weight", "bias"))):
        return right
    if name.endswith("bias"):
        return shards.Shard(right.shape, None, shards.Span(0, right.shape[0]), tp)
    return shards.Shard(right.shape, 1, shards.even(model.hidden_size, tp, rank))


def qkv_sizes_mixed(
    packed: Tensor, sizes: tuple[int, ...], model: ModelConfig, tp: int
) -> tuple[Tensor, ...]:
    """Offsets of k and v are counted in *global* heads, in a pack of local size (wrapping around)."""
    starts = (0, model.num_heads * model.head_dim, (model.num_heads + model.num_kv_heads) * model.head_dim)
    width = packed.shape[-1]
    return tuple(
        packed[:, (torch.arange(size, device=packed.device) + start) % width]
        for start, size in zip(starts, sizes, strict=True)
    )


def reduce_missing(partial: Tensor, comm: Comm) -> Tensor:
    """Each rank keeps its own partial."""
    return partial


def reduce_twice(partial: Tensor, comm: Comm) -> Tensor:
    """The sum is summed over the ranks again."""
    return sum_over_ranks(sum_over_ranks(partial, comm), comm)


def row_bias_every_rank(total: Tensor, bias: Tensor, comm: Comm) -> Tensor:
    """The bias was in every rank's partial: it counts tp times."""
    return total + comm.size * bias


def norm_eps(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Ten times the usual epsilon."""
    return rms_norm(x, weight, 1e-5)


def norm_plus_one(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The weight is taken as an offset from one, as Gemma's is."""
    return rms_norm(x, 1 + weight, eps)


def act_swapped(gate: Tensor, up: Tensor) -> Tensor:
    """The activation is on the wrong factor."""
    return F.silu(up) * gate


def act_gelu(gate: Tensor, up: Tensor) -> Tensor:
    """Another model's activation."""
    return F.gelu(gate, approximate="tanh") * up


def head_missing(model: ModelConfig) -> str | None:
    """No tensor fills the head."""
    return None


#: Fault.patch -> the seams it replaces.
PATCHES: Mapping[str, Mapping[str, Any]] = {
    "additive_mask": {"mask": additive_mask},
    "no_mask": {"mask": no_mask},
    "skip_qkv_bias": {"load_bias": skip_qkv_bias},
    "rope_swallowed": {"rope": rope_swallowed},
    "rope_interleaved": {"rope": rope_interleaved},
    "rope_twice": {"rope": rope_twice},
    "rope_theta_default": {"rope_frequencies": rope_theta_default},
    "positions_stuck": {"positions": positions_stuck},
    "positions_ahead": {"positions": positions_ahead},
    "cache_not_reused": {"cache_reuse": cache_not_reused},
    "cache_shared": {"cache_layer": cache_shared},
    "cache_repeated_heads": {"cache_heads": repeat_heads, "expand_kv": index_repeated_heads},
    "kv_tiled": {"expand_kv": kv_tiled},
    "scale_one": {"scale": scale_one},
    "scale_by_hidden": {"scale": scale_by_hidden},
    "window_one_more": {"visible": window_one_more},
    "window_ignored": {"visible": window_ignored},
    "qkv_in_features": {"qkv_plan": qkv_in_features, "shard": shard_qkv_in_features},
    "qkv_sizes_mixed": {"qkv_sizes": qkv_sizes_mixed},
    "reduce_missing": {"reduce": reduce_missing},
    "reduce_twice": {"reduce": reduce_twice},
    "row_bias_every_rank": {"row_bias": row_bias_every_rank},
    "norm_eps": {"norm": norm_eps},
    "norm_plus_one": {"norm": norm_plus_one},
    "act_swapped": {"act": act_swapped},
    "act_gelu": {"act": act_gelu},
    "head_missing": {"lm_head": head_missing},
}


def resolve(rules: Mapping[str, str]) -> Rules:
    """Rule names and values -> the seams of a run. ConfigError for what the catalogue does not know."""
    seams: dict[str, Any] = {}
    by_seam: dict[str, str] = {}
    for fault in faults_of(rules):
        for seam, replacement in PATCHES[fault.patch].items():
            if seam in seams:
                raise ConfigError(
                    f"rules {by_seam[seam]} and {fault.rule} act on the same seam: use one of them"
                )
            seams[seam], by_seam[seam] = replacement, fault.rule
    return replace(CORRECT, **seams)
