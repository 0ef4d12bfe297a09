"""Windows, sinks, caps and temperatures, of models whose layers attend differently."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lockstep.engine.model import Decoder
from lockstep.engine.rules import defaults
from tests.workbench.diagnosis.bugs.bug import bug
from tests.workbench.diagnosis.bugs.engine_ranks import Spoilt

SCORES = ("attn.scores",)
PROBS = ("attn.probs",)


# -- windows -------------------------------------------------------------------------------------------------


@bug(
    "window",
    accepted=("mask", "scores"),
    words="future|ahead|causal|mask|forward|behind|later|next|sides|see",
    taps=SCORES,
    model="gemma3",
    ep=1,
)
def windows_reach_forward_as_far_as_back(p: Spoilt) -> None:
    """use_bidirectional_attention of the family's encoder gives sliding layers a window of both sides."""

    def window(q_positions: Tensor, rows: slice, kv_positions: Tensor, width: int | None) -> Tensor:
        if width is None:
            return defaults.within_window(q_positions, rows, kv_positions, width)
        return (q_positions[rows, None] - kv_positions[None, :]).abs() < width

    p.rules(window=window)


@bug(
    "window",
    accepted=("mask", "scores", "positions"),
    words="window|mask|sequence|length|position|longest|few",
    taps=SCORES,
    step=1,
    model="cohere2",
    ep=1,
)
def windows_of_decode_are_counted_from_the_end_of_the_longest_sequence(p: Spoilt) -> None:
    """The kernel for sliding layers is given max_seq_len, and takes it for each sequence's own."""

    def window(q_positions: Tensor, rows: slice, kv_positions: Tensor, width: int | None) -> Tensor:
        right = defaults.within_window(q_positions, rows, kv_positions, width)
        if width is None or not p.decode:
            return right
        longest = max(span.kv_len for span in p.batch.spans)
        first = min(longest - width, int(q_positions[-1]))
        return right & (kv_positions >= first)

    p.rules(window=window)


# -- sinks ---------------------------------------------------------------------------------------------------


@bug(
    "sinks",
    accepted=("softmax", "weight"),
    words="sink",
    taps=PROBS,
    layers=(1,),
    model="gpt-oss",
    dtype="bfloat16",
    tp=2,
    ep=1,
)
def layers_without_a_window_are_given_no_sinks(p: Spoilt) -> None:
    """The backend of full layers takes sinks as one of its **kwargs, and drops them (vllm #52156)."""
    p.rules((1,), sinks=lambda scores, sinks, dtype: defaults.softmax(scores, dtype))


@bug(
    "sinks",
    accepted=("softmax", "mask"),
    words="sink|shift|column|first|slice",
    taps=PROBS,
    model="gpt-oss",
    dtype="bfloat16",
    ep=2,
    tp=2,
)
def sinks_are_put_in_front_of_the_scores_and_cut_off_behind(p: Spoilt) -> None:
    """`cat((sinks, scores))`, and `[..., :-1]` as in the code that has them behind."""

    def softmax(scores: Tensor, sinks: Tensor, dtype: torch.dtype) -> Tensor:
        beside = sinks.float().expand(*scores.shape[:-1], 1)
        return torch.cat((beside, scores.float()), -1).softmax(-1)[..., :-1].to(dtype)

    p.rules(sinks=softmax)


# -- caps and temperatures -----------------------------------------------------------------------------------


@bug(
    "soft cap",
    accepted=("scores", "scale", "clip"),
    words="cap|tanh|divid|scal|satur",
    taps=SCORES,
    model="gemma2",
    tp=2,
    ep=1,
)
def cap_multiplies_what_it_has_not_divided(p: Spoilt) -> None:
    """The caller is to hand over scale / cap, and hands over the scale."""
    p.rules(soft_cap=lambda x, cap: cap * x.tanh())


@bug(
    "soft cap",
    accepted=("scores", "scale", "clip"),
    words="cap|tanh|scal|factor|logarithm|1\\.44|two|times",
    taps=SCORES,
    model="vaultgemma",
    ep=1,
)
def cap_is_that_of_scores_for_powers_of_two(p: Spoilt) -> None:
    """Scores carry log2(e) for exp2, which is to be undone before the tanh (as sgl-kernel-xpu #491 does)."""
    p.rules(soft_cap=lambda x, cap: defaults.capped(x, cap * math.log2(math.e)))


@bug(
    "soft cap",
    accepted=("scores", "scale", "clip"),
    words="cap|tanh|scal|factor|query_pre_attn|width|times",
    taps=SCORES,
    step=1,
    model="gemma2",
    dtype="bfloat16",
    tp=2,
    ep=1,
)
def backend_of_decode_takes_neither_the_cap_nor_the_scale_of_the_model(p: Spoilt) -> None:
    """Two at once: it is planned with defaults, head_dim ** -0.5 and no cap (sglang #33915)."""
    factor = p.model.head_dim**-0.5 / p.model.scale
    p.rules(soft_cap=p.later(defaults.capped, lambda x, cap: x * factor))


@bug(
    "temperature",
    accepted=("scores", "scale", "query_scaling"),
    words="temperature|scal|factor|position|quer|times|multipl",
    taps=SCORES,
    model="llama4",
    ep=1,
)
def temperature_is_that_of_layers_that_rotate_too(p: Spoilt) -> None:
    """attn_temperature_tuning is meant for layers without positions; `if self.nope` was lost in a refactoring."""

    def spoil(decoder: Decoder) -> None:
        scaling = next(one for layer in decoder.layers if (one := layer.attention.query_scaling) is not None)
        for layer in decoder.layers:
            layer.attention.query_scaling = scaling

    p.loaded(spoil)
