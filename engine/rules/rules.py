"""The seams: every point at which the engine's behaviour can be replaced.

A seam is a field of the frozen `Rules` and holds a function; its default is the correct behaviour, so the
correct path contains no trace of any fault. `engine.faults` replaces seams with what real engines got wrong.
A fault is named by the seam that it replaces first: `--fault mask=additive` replaces `Rules.mask`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from lockstep.engine.batch import Batch
from lockstep.engine.checkpoint.block_types import BlockType
from lockstep.engine.checkpoint.gguf.names import RowOperation, operations
from lockstep.engine.checkpoint.load import own_tensor
from lockstep.engine.config import ModelConfig
from lockstep.engine.config.experts import ExpertsConfig
from lockstep.engine.config.families import Activation, Gating, NormForm
from lockstep.engine.config.indexer import IndexerConfig
from lockstep.engine.config.layer_shapes import LayerInputs
from lockstep.engine.config.query_scaling import QueryScaling
from lockstep.engine.kv.states import LayerState
from lockstep.engine.parallel import shards
from lockstep.engine.parallel.comm import Comm
from lockstep.engine.rules import activation, defaults, indexer, latent, mamba, per_layer, recurrence, routing
from lockstep.engine.rules.norm import layer_norm, rms_norm
from lockstep.engine.rules.rope import Rotate, cos_sin, frequencies, rotate_half_split


@dataclass(frozen=True, slots=True)
class Rules:
    """Every seam of the engine, in the order in which a run reaches them."""

    # while loading
    tensor_of: Callable[[str, ModelConfig], str] = own_tensor
    shard: shards.ShardPlan = shards.plan
    load_bias: Callable[[str], bool] = defaults.load_every
    dequantise: Callable[[str, Tensor, BlockType], Tensor] = defaults.dequantised
    row_order: Callable[[str, ModelConfig], tuple[RowOperation, ...]] = operations
    stored: Callable[[str, Tensor], Tensor] = defaults.as_stored
    lm_head: Callable[[ModelConfig], str | None] = defaults.head_tensor
    qkv_shard_dim: Callable[[ModelConfig, int, int], shards.QKVPlan] = shards.qkv_by_heads
    # in every step
    embedding: Callable[[Tensor, ModelConfig], Tensor] = defaults.looked_up
    positions: Callable[[int, int], range] = defaults.next_positions
    norm: Callable[[Tensor, Tensor, float, NormForm], Tensor] = rms_norm
    layer_norm: Callable[[Tensor | None, Tensor, Tensor, float, NormForm], Tensor] = layer_norm
    sum_squares: Callable[[Tensor, Comm], Tensor] = defaults.sum_over_ranks
    qkv_sizes: Callable[[Tensor, tuple[int, ...], ModelConfig, int], tuple[Tensor, ...]] = (
        defaults.split_packed
    )
    clip_qkv: Callable[[Tensor, float], Tensor] = defaults.clamped
    layer_rope: Callable[[ModelConfig, int], ModelConfig] = ModelConfig.of_layer
    rope_theta: Callable[[ModelConfig], float] = defaults.configured_theta
    rope_frequencies: Callable[[ModelConfig, float, int], tuple[Tensor, float]] = frequencies
    rope_positions: Callable[[Batch], Tensor] = defaults.own_positions
    rope_angles: Callable[[Tensor, Tensor, float, torch.dtype], tuple[Tensor, Tensor]] = cos_sin
    rope: Callable[[Tensor, Tensor, Tensor], Tensor] = rotate_half_split
    unit_qk_norm: Callable[[Tensor, float], Tensor] = defaults.unit_heads
    query_factor: Callable[[Tensor, QueryScaling], Tensor] = defaults.query_factor
    query_latent: Callable[[Tensor, Callable[[Tensor], Tensor]], Tensor] = latent.normed_queries
    written_latent: Callable[[Tensor, Comm], Tensor] = latent.whole_latent
    split_latent: Callable[[Tensor, Callable[[Tensor], Tensor], int], tuple[Tensor, Tensor]] = (
        latent.normed_latent
    )
    latent_keys: Callable[[Tensor, Tensor], Tensor] = latent.with_shared_part
    index_norm: Callable[[Tensor | None, Tensor, Tensor, float, NormForm], Tensor] = layer_norm
    index_keys: Callable[[Tensor, Rotate, Tensor, Tensor], Tensor] = indexer.rotated_keys
    index_sight: Callable[[Tensor, slice, Tensor], Tensor] = indexer.within_sight
    index_scores: Callable[[Tensor, Tensor, Tensor, IndexerConfig], Tensor] = indexer.scores
    key_choice: Callable[[Tensor, int], Tensor] = indexer.best_keys
    chosen_keys: Callable[[Tensor, int], Tensor] = indexer.chosen_alone
    cache_layer: Callable[[int], int] = defaults.own_cache
    shared_cache: Callable[[ModelConfig, int], int] = per_layer.source_of
    value_norm: Callable[[Tensor, Callable[[Tensor], Tensor], float], Tensor] = per_layer.unit_norm
    cache_heads: Callable[[Tensor, int], Tensor] = defaults.store_kv_heads
    cache_reuse: Callable[[int, int], int] = defaults.attend_all
    cache_values: Callable[[Tensor, Tensor], Tensor] = defaults.values_of
    kv_expand: Callable[[Tensor, int, int], Tensor] = defaults.share_kv_heads
    window: Callable[[Tensor, slice, Tensor, int | None], Tensor] = defaults.within_window
    chunk: Callable[[Tensor, slice, Tensor, int], Tensor] = defaults.within_chunk
    mask: Callable[[Tensor], Tensor] = defaults.additive_bias
    scale: Callable[[ModelConfig], float] = defaults.softmax_scale
    soft_cap: Callable[[Tensor, float], Tensor] = defaults.capped
    softmax: Callable[[Tensor, torch.dtype], Tensor] = defaults.softmax
    sinks: Callable[[Tensor, Tensor, torch.dtype], Tensor] = defaults.softmax_beside
    output_gate: Callable[[Tensor, Tensor], Tensor] = recurrence.times_sigmoid
    state_before: Callable[[LayerState | None, LayerState | None, LayerState, int], LayerState] = (
        recurrence.carried
    )
    short_conv: Callable[[Tensor, Tensor], Tensor] = recurrence.short_convolution
    plain_conv: Callable[[Tensor, Tensor], Tensor] = recurrence.convolution
    conv_in_gate: Callable[[Tensor, Tensor], Tensor] = recurrence.through_gate
    conv_out_gate: Callable[[Tensor, Tensor], Tensor] = recurrence.through_gate
    l2_norm: Callable[[Tensor], Tensor] = recurrence.l2_normalised
    beta: Callable[[Tensor], Tensor] = recurrence.update_rate
    decay: Callable[[Tensor, Tensor, Tensor], Tensor] = recurrence.log_decay
    key_heads: Callable[[Tensor, int], Tensor] = recurrence.shared_by_neighbours
    delta_rule: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]] = (
        recurrence.delta_rule
    )
    state_kept: Callable[[Tensor], Tensor] = recurrence.as_computed
    conv_kept: Callable[[Tensor, int], Tensor] = recurrence.newest_rows
    gated_norm: Callable[[Tensor, Tensor, Tensor, float], Tensor] = recurrence.gated_norm
    ssm_conv: Callable[[Tensor, Tensor, Tensor], Tensor] = mamba.biased_convolution
    ssm_step: Callable[[Tensor, Tensor, tuple[float, float]], Tensor] = mamba.step_size
    ssm_rate: Callable[[Tensor], Tensor] = mamba.negative_rate
    ssm_scan: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]] = mamba.scan
    ssm_skip: Callable[[Tensor, Tensor, Tensor], Tensor] = mamba.skip
    ssm_norm: Callable[[Tensor, Tensor, Tensor, Callable[[Tensor], Tensor]], Tensor] = mamba.gated
    ssm_norm_first: Callable[[Tensor, Tensor, Tensor, Callable[[Tensor], Tensor]], Tensor] = (
        mamba.normed_first
    )
    ssm_gate: Callable[[Tensor, Tensor], Tensor] = mamba.through_gate
    multiplied: Callable[[Tensor, float, str], Tensor] = defaults.times_number
    mixed: Callable[[Tensor, Tensor], Tensor] = defaults.add_residual
    merge: Callable[[Tensor], Tensor] = defaults.merge_heads
    reduce: Callable[[Tensor, Comm], Tensor] = defaults.sum_over_ranks
    row_bias: Callable[[Tensor, Tensor, Comm], Tensor] = defaults.bias_once
    residual: Callable[[Tensor, Tensor], Tensor] = defaults.add_residual
    residual_factor: Callable[[ModelConfig], float] = defaults.residual_multiplier
    layer_scalar: Callable[[Tensor, Tensor], Tensor] = per_layer.scaled
    layer_inputs: Callable[[Tensor, Tensor, Callable[[Tensor], Tensor], ModelConfig], Tensor] = (
        per_layer.summed
    )
    layer_input: Callable[[Tensor, LayerInputs], Tensor] = per_layer.own_part
    act: Callable[[Tensor, Tensor, Gating], Tensor] = defaults.act_and_mul
    act_alone: Callable[[Tensor, Activation], Tensor] = defaults.activated
    xielu: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor] = activation.xielu
    router_scores: Callable[[Tensor, ExpertsConfig], Tensor] = routing.scores
    choice: Callable[[Tensor, Tensor | None, ExpertsConfig], Tensor] = routing.best
    choice_weights: Callable[[Tensor, Tensor, Tensor | None, ExpertsConfig], Tensor] = routing.weights
    expert_gate_up: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] = routing.as_stacked
    expert_bias: Callable[[Tensor, Tensor, bool], Tensor] = routing.bias_once
    router_norm: Callable[[Tensor, float], Tensor] = defaults.unit_heads
    expert_scale: Callable[[Tensor, Tensor], Tensor] = routing.of_experts
    own_experts: Callable[[Tensor, shards.Span], Tensor] = routing.by_number
    expert_input: Callable[[Tensor, Tensor], Tensor] = routing.weighed_inputs
    combine: Callable[[Tensor, Tensor], Tensor] = routing.weighed_sum
    shared_expert: Callable[[Tensor, Tensor, Tensor | None, Comm], Tensor] = routing.with_shared
    head_input: Callable[[Tensor, Tensor], Tensor] = defaults.normed_rows
    logits: Callable[[Tensor, ModelConfig], Tensor] = defaults.divided_logits


CORRECT = Rules()
