"""Attention that differs from layer to layer: windows, sinks, caps, rotation of some layers, norms of all heads."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
import torch.nn.functional as F

from lockstep.engine.config import ModelConfig
from lockstep.engine.rules import defaults, recurrence
from lockstep.engine.rules.rope import cos_sin
from tests.workbench.diagnosis.bugs.bug import bug
from tests.workbench.diagnosis.bugs.engine_ranks import Spoilt

SCORES = ("attn.scores", "attn.probs")
ROTATED = ("attn.q_rope", "attn.k_rope")


@bug(
    "window",
    accepted=("mask", "scores"),
    words="window|key|mask|one|more|off|far",
    taps=SCORES,
    layers=(0, 2),
    step=1,
    model="gemma3",
    ep=1,
)
def window_of_decode_counts_the_new_token_beside_it(p: Spoilt) -> None:
    """The kernel takes the number of keys before the query."""

    def wider(q_positions, rows, kv_positions, window):
        return defaults.within_window(q_positions, rows, kv_positions, None if window is None else window + 1)

    p.rules(window=p.later(defaults.within_window, wider))


@bug(
    "window",
    accepted=("mask", "scores"),
    words="window|layer|mask|full|key|other|all",
    taps=SCORES,
    model="gpt-oss",
    dtype="bfloat16",
    tp=2,
    ep=1,
)
def windows_are_those_of_the_layers_without(p: Spoilt) -> None:
    """The pattern is taken to begin with a full layer."""

    def other(q_positions, rows, kv_positions, window):
        return defaults.within_window(q_positions, rows, kv_positions, 8 if window is None else None)

    p.rules(window=other)


@bug(
    "window",
    accepted=("mask", "scores"),
    words="window|mask|full|key|all|layer|without|no ",
    taps=SCORES,
    layers=(2,),
    model="olmo3",
    dtype="bfloat16",
    ep=1,
)
def last_layer_of_a_pattern_loses_its_window(p: Spoilt) -> None:
    """vllm#49795, for one layer: its type is not looked up."""

    def spoil(decoder):
        decoder.layers[2].attention.window = None

    p.loaded(spoil)


@bug(
    "window",
    accepted=("mask", "scores"),
    words="chunk|window|mask|key|before|slid",
    taps=SCORES,
    layers=(0, 2),
    model="llama4",
    dtype="bfloat16",
    ep=1,
)
def chunks_of_attention_slide(p: Spoilt) -> None:
    """A window of the chunk's size in place of the chunk."""
    p.rules(chunk=defaults.within_window)


@bug(
    "rotation",
    accepted=("rope",),
    words="theta|base|frequenc|rope|rotar|angle|layer|scal",
    taps=ROTATED,
    layers=(3,),
    model="gemma3",
    dtype="bfloat16",
    ep=1,
)
def last_full_layer_turns_as_the_sliding_ones_do(p: Spoilt) -> None:
    p.rules(layer_rope=lambda model, layer: ModelConfig.of_layer(model, 2 if layer == 3 else layer))


@bug(
    "rotation",
    accepted=("rope", "positions"),
    words="position|window|rope|rotar|angle|slot|modulo|8",
    taps=ROTATED,
    layers=(0, 2),
    step=1,
    model="gemma3",
    tp=2,
    ep=1,
)
def sliding_layers_turn_by_the_slot_in_their_ring(p: Spoilt) -> None:
    """Their cache is a ring of eight slots; the angle is that of the slot. The other layers' factor of 8 is a sign of
    them."""

    def angles(positions, inv_freq, factor, dtype):
        return cos_sin(positions % 8 if inv_freq[0] == 1 else positions, inv_freq, factor, dtype)

    p.rules(rope_angles=p.later(cos_sin, angles))


@bug(
    "rotation",
    accepted=("rope",),
    words="rope|rotar|turn|angle|layer|no rope|NoPE|unrotated",
    taps=ROTATED,
    layers=(1,),
    model="smollm3",
    tp=2,
    ep=1,
)
def layer_without_positions_is_rotated(p: Spoilt) -> None:
    p.rules(layer_rope=lambda model, layer: ModelConfig.of_layer(model, 0 if layer == 1 else layer))


@bug(
    "rotation",
    accepted=("rope",),
    words="rope|rotar|channel|last|first|part|half|dimension",
    taps=ROTATED,
    model="glm4-moe",
    dtype="bfloat16",
    ep=1,
)
def part_of_the_head_that_is_turned_is_the_last(p: Spoilt) -> None:
    """vllm#41185: of each head a half is turned, the wrong one."""
    p.rules(layer_rope=lambda model, layer: replace(ModelConfig.of_layer(model, layer), rotary_last=True))


@bug(
    "rotation",
    accepted=("rope",),
    words="rope|rotar|pair|neighbour|interleav|half|adjacent",
    taps=ROTATED,
    layers=(2,),
    model="minimax-m2",
    ep=1,
)
def one_layer_turns_neighbours(p: Spoilt) -> None:
    def other(model, layer):
        own = ModelConfig.of_layer(model, layer)
        return replace(own, neighbours=not own.neighbours) if layer == 2 else own

    p.rules(layer_rope=other)


@bug(
    "sinks",
    accepted=("softmax",),
    words="sink|softmax|sum|denominator|twice|normal|one",
    taps=("attn.probs",),
    step=1,
    model="gpt-oss",
    ep=1,
)
def each_of_two_splits_of_decode_counts_the_sink(p: Spoilt) -> None:
    def twice(scores, sinks, dtype):
        return defaults.softmax_beside(scores, sinks + math.log(2), dtype)

    p.rules(sinks=p.later(defaults.softmax_beside, twice))


@bug(
    "sinks",
    accepted=("softmax", "sharding"),
    words="sink|softmax|sum|denominator|normal|one|rank",
    taps=("attn.probs",),
    ranks=(1,),
    model="gpt-oss",
    dtype="bfloat16",
    tp=2,
    ep=2,
)
def second_rank_has_no_sinks(p: Spoilt) -> None:
    if p.rank == 1:
        p.rules(sinks=lambda scores, sinks, dtype: defaults.softmax(scores, dtype))


@bug(
    "sinks",
    accepted=("softmax",),
    words="sink|softmax|scale|sum|denominator|normal|one",
    taps=("attn.probs",),
    layers=(1,),
    model="gpt-oss",
    tp=2,
    ep=1,
)
def sinks_of_a_full_layer_are_scaled_like_its_scores(p: Spoilt) -> None:
    def scaled(scores, sinks, dtype):
        return defaults.softmax_beside(scores, sinks / 4, dtype)

    p.rules((1,), sinks=scaled)


@bug(
    "cap",
    accepted=("scores", "scale"),
    words="cap|scale|tanh|order|before|scores",
    taps=SCORES,
    model="gemma2",
    dtype="bfloat16",
    ep=1,
)
def scores_are_capped_before_they_are_scaled(p: Spoilt) -> None:
    scale = 24**-0.5
    p.rules(soft_cap=lambda x, cap: defaults.capped(x / scale, cap) * scale)


@bug(
    "cap",
    accepted=("head", "scale", "activation"),
    words="cap|tanh|logit|rank|last|head",
    taps=("logits",),
    ranks=(1,),
    model="gemma2",
    tp=2,
    ep=1,
)
def second_rank_s_part_of_the_vocabulary_is_not_capped(p: Spoilt) -> None:
    if p.rank == 1:
        p.rules(logits=lambda logits, model: logits)


@bug(
    "norm",
    accepted=("norm", "reduce", "sharding"),
    words="norm|rank|shard|mean|square|sum|width|local|all",
    taps=("attn.q_norm", "attn.k_norm"),
    ranks=(1,),
    model="minimax-m2",
    dtype="bfloat16",
    tp=2,
    ep=2,
)
def second_rank_norms_its_heads_by_its_own_squares(p: Spoilt) -> None:
    """exllamav3#141: it takes part in the sum, and reads the buffer of what it gave."""

    def own(squares, comm):
        mine = squares.clone()
        whole = defaults.sum_over_ranks(squares, comm)
        return mine * p.tp if p.rank == 1 else whole

    p.rules(sum_squares=own)


@bug(
    "norm",
    accepted=("norm", "scale", "reduce"),
    words="norm|mean|square|width|rank|factor|times|scale|root|sum",
    taps=("attn.q_norm", "attn.k_norm"),
    step=1,
    model="olmoe",
    tp=2,
    ep=1,
)
def decode_divides_the_squares_of_all_ranks_by_its_own_width(p: Spoilt) -> None:
    def narrow(squares, comm):
        return defaults.sum_over_ranks(squares, comm) * p.tp

    p.rules(sum_squares=p.later(defaults.sum_over_ranks, narrow))


@bug(
    "gate",
    accepted=("gate", "activation"),
    words="gate|silu|sigmoid|activat",
    taps=("attn.gated",),
    layers=(1,),
    model="qwen3-next",
    tp=2,
    ep=2,
)
def output_gate_of_attention_is_a_silu(p: Spoilt) -> None:
    p.rules(output_gate=lambda context, gate: context * F.silu(gate))


@bug(
    "queries",
    accepted=("query_scaling", "scale", "positions"),
    words="position|scal|temperature|factor|quer|sequence|log",
    taps=("attn.q_scaled",),
    layers=(1, 3),
    step=1,
    model="llama4",
    ep=1,
)
def temperature_of_decode_is_that_of_the_first_position(p: Spoilt) -> None:
    """The kernel for one token counts positions within the pass."""

    def first(positions, scaling):
        return defaults.query_factor(torch.zeros_like(positions), scaling)

    p.rules(query_factor=p.later(defaults.query_factor, first))


@bug(
    "gate",
    accepted=("gate", "input"),
    words="gate|head|token|before|shift|row|other",
    taps=("attn.gated",),
    layers=(1,),
    model="qwen3.5",
    dtype="bfloat16",
    ep=1,
)
def output_gate_lies_a_head_further(p: Spoilt) -> None:
    """Queries and gates come in turn, head by head, out of one product."""

    def next_head(context, gate):
        return recurrence.times_sigmoid(context, gate.roll(-16, -1))

    p.rules(output_gate=next_head)
