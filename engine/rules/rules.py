"""The seams: every point at which the engine can be told to behave differently.

`Rules` is frozen and its defaults are the correct behaviour, so the correct path holds no trace of any
fault. A seam is a function; `engine.faults` makes patches of `Rules` that replace
seams with what real engines got wrong. The user's names for them (`mask=additive`) live there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from engine.config import ModelConfig
from engine.parallel import shards
from engine.parallel.comm import Comm
from engine.rules import defaults, rope
from engine.rules.norm import rms_norm


@dataclass(frozen=True, slots=True)
class Rules:
    """Every seam of the engine, in the order in which a run meets them."""

    # while loading
    shard: Callable[[str, ModelConfig, int, int], shards.Shard] = shards.plan
    load_bias: Callable[[str], bool] = defaults.load_every
    stored: Callable[[str, Tensor], Tensor] = defaults.as_stored
    lm_head: Callable[[ModelConfig], str | None] = defaults.head_tensor
    qkv_plan: Callable[[ModelConfig, int, int], shards.QKVPlan] = shards.qkv_plan
    # in every step
    positions: Callable[[int, int], range] = defaults.next_positions
    norm: Callable[[Tensor, Tensor, float], Tensor] = rms_norm
    qkv_sizes: Callable[[Tensor, tuple[int, ...], ModelConfig, int], tuple[Tensor, ...]] = (
        defaults.split_packed
    )
    rope_frequencies: Callable[[ModelConfig], tuple[Tensor, float]] = rope.frequencies
    rope: Callable[[Tensor, Tensor, Tensor], Tensor] = rope.rotate_half_split
    cache_layer: Callable[[int], int] = defaults.own_cache
    cache_heads: Callable[[Tensor, int], Tensor] = defaults.store_kv_heads
    cache_reuse: Callable[[int, int], int] = defaults.attend_all
    expand_kv: Callable[[Tensor, int, int], Tensor] = defaults.expand_kv
    visible: Callable[[Tensor, Tensor, int | None], Tensor] = defaults.visible
    mask: Callable[[Tensor], Tensor] = defaults.additive_bias
    scale: Callable[[ModelConfig], float] = defaults.softmax_scale
    reduce: Callable[[Tensor, Comm], Tensor] = defaults.sum_over_ranks
    row_bias: Callable[[Tensor, Tensor, Comm], Tensor] = defaults.bias_once
    residual: Callable[[Tensor, Tensor], Tensor] = defaults.add_residual
    act: Callable[[Tensor, Tensor], Tensor] = defaults.silu_and_mul


CORRECT = Rules()
