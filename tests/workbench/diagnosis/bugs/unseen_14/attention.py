"""Rotation, cache, mask, scores and softmax of attention, as ports and rewrites of kernels get them wrong."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from lockstep.engine.config import ModelConfig
from lockstep.engine.layers.attention import Attention
from lockstep.engine.model import Decoder
from lockstep.engine.rules import defaults, rope
from lockstep.engine.run.runner import Runner
from tests.workbench.diagnosis.bugs.bug import CACHES, ROTATED, bug
from tests.workbench.diagnosis.bugs.engine_ranks import Spoilt
from tests.workbench.diagnosis.bugs.patched import Patched

SCORES = ("attn.scores",)
PROBS = ("attn.probs",)
MASKED = ("attn.scores", "attn.probs")
CONTEXT = ("attn.context",)
ANGLES = "frequenc|rope|rotat|angle|turn|scal|factor|position|pair|theta"


def _attentions(decoder: Decoder) -> list[Attention]:
    found = [layer.attention for layer in decoder.layers]
    return [one for one in found if isinstance(one, Attention)]


@bug(
    "sinks",
    accepted=("softmax", "scale", "attention", "weight"),
    words="sink|softmax|sum|share|denominator|beside|scal|prob|normal|base|log",
    taps=PROBS,
    model="gpt-oss",
    tp=2,
    ep=2,
)
def sinks_are_powers_of_two_as_the_scores_are(p: Spoilt) -> None:
    """The kernel has exp2 and scores times log2(e); the sinks, handed over later, were not multiplied by
    it.
    """

    def softmax(scores: Tensor, sinks: Tensor, dtype):
        return defaults.softmax_beside(scores, sinks * math.log(2), dtype)

    p.rules(sinks=softmax)


@bug(
    "context",
    accepted=("context", "attention", "skipped", "values"),
    words="zero|empty|nothing|context|never|missing|without|lost|not|value",
    taps=CONTEXT,
    step=1,
    model="mistral-window",
    tp=2,
    ep=1,
)
def output_of_decode_is_not_copied_where_there_is_a_window(p: Spoilt) -> None:
    """vllm-ascend#6558: this path's result has a tensor of its own, and the layer's, made of zeros, goes
    on.
    """

    def spoil(decoder: Decoder) -> None:
        for one in _attentions(decoder):
            one._each = lambda *args, right=one._each: right(*args) * (0.0 if p.decode else 1.0)

    p.loaded(spoil)


@bug(
    "soft cap",
    accepted=("scores", "scale", "clip", "attention"),
    words="cap|tanh|scal|before|order|limit|clip|score",
    taps=SCORES,
    model="vaultgemma",
    dtype="bfloat16",
    ep=1,
)
def products_are_capped_before_they_are_scaled(p: Spoilt) -> None:
    """The scale is left to the kernel, which applies it as its last step."""
    scale = p.model.scale
    p.rules(scale=lambda model: 1.0, soft_cap=lambda scores, cap: defaults.capped(scores, cap) * scale)


@bug(
    "window",
    accepted=("mask", "scores", "attention", "cache"),
    words="window|mask|key|sees|seen|slid|distance|far|one more|attend|limit",
    taps=MASKED,
    layers=(1,),
    step=1,
    model="ministral",
    tp=2,
    ep=1,
)
def decode_counts_the_window_without_the_new_token(p: Spoilt) -> None:
    """As many rows as the window are taken from what was cached before, and the token's own is added."""

    def wider(queries: Tensor, rows: slice, keys: Tensor, window: int | None) -> Tensor:
        return defaults.within_window(queries, rows, keys, window and window + 1)

    p.rules(window=p.later(defaults.within_window, wider))


@bug(
    "block table",
    accepted=("cache", "input", "state"),
    words="cache|row|slot|block|table|sequence|other|wrong|stale|belong|key|token|position",
    taps=CACHES,
    step=1,
    model="qwen2-untied",
    tp=2,
    ep=1,
)
def block_table_of_the_first_sequence_serves_the_batch(p: Spoilt) -> None:
    """sparkinfer#289: decode asks for block_table(0), whichever sequence the row belongs to."""

    def spoil(decoder: Decoder) -> None:
        for one in _attentions(decoder):

            def read(index: int, rows: Tensor, pool: Any, right=one._read) -> tuple[Tensor, Tensor]:
                own = p.batch.spans[0].rows[: len(rows)] if p.decode else rows
                return right(index, own, pool)

            one._read = read

    p.loaded(spoil)


@bug(
    "partial rotation",
    accepted=("rope",),
    words=ANGLES + "|channel|half|part|partial|whole",
    taps=ROTATED,
    model="phi3-window",
    tp=2,
    ep=1,
)
def partner_of_a_channel_is_half_a_head_away_though_a_part_is_rotated(p: Spoilt) -> None:
    """cascadia#69: the frequencies are padded with zeros, and the whole head goes through one rotate_half."""

    def spoil(runner: Runner) -> None:
        for one in _attentions(runner.decoder):

            def turned(x: Tensor, cos: Tensor, sin: Tensor, half: int = one.head_dim // 2) -> Tensor:
                rest = (0, half - cos.shape[-1])
                return rope.rotate_half_split(x, F.pad(cos, rest, value=1.0), F.pad(sin, rest))

            one.rotate = turned

    p.running(spoil)


@bug(
    "pairs",
    accepted=("rope",),
    words="pair|neighbour|interleav|half|rotat|rope|convention|split",
    taps=ROTATED,
    model="ernie4-5",
    dtype="bfloat16",
    tp=2,
    ep=1,
)
def default_of_the_rotary_helper_is_taken_for_ernie(p: Spoilt) -> None:
    """is_neox_style is True unless a model says otherwise, and the port of this one does not."""

    def spoil(runner: Runner) -> None:
        for one in _attentions(runner.decoder):
            one.rotate = rope.rotate_half_split

    p.running(spoil)


@bug(
    "norms of heads",
    accepted=("norm", "rope", "input"),
    words="norm|order|before|after|rotat|rope|weight|input",
    taps=(*ROTATED, "attn.q_rope_norm", "attn.k_rope_norm"),
    model="hunyuan",
    ep=1,
)
def heads_are_normed_before_they_are_rotated(p: Spoilt) -> None:
    """vllm-metal#660: one order for every family that has norms of heads."""

    def spoil(decoder: Decoder) -> None:
        for one in _attentions(decoder):

            def rotated(q: Tensor, k: Tensor, table: tuple[Tensor, Tensor], one=one) -> tuple[Tensor, Tensor]:
                norms = one.rotated_norm
                assert norms is not None
                q, k = (one.rotate(norm.normalised(x), *table) for norm, x in ((norms.q, q), (norms.k, k)))
                for tap, x in (
                    (one.tap_q_rope, q),
                    (one.tap_k_rope, k),
                    (norms.q.tap, q),
                    (norms.k.tap, k),
                ):
                    if tap:
                        tap(x)
                return q, k

            one._rotate = rotated

    p.loaded(spoil)


@bug(
    "write back",
    accepted=("cache", "rope", "input", "positions"),
    words="rotat|rope|turn|cache|before|written|unrotated|position|key",
    taps=("attn.k_cache",),
    model="qwen3",
    tp=2,
    ep=1,
)
def rotated_keys_are_in_a_copy_and_the_others_are_cached(p: Spoilt) -> None:
    """ktransformers#1959: the rotation works in place, on what a reshape has made anew."""

    def spoil(decoder: Decoder) -> None:
        for one in _attentions(decoder):

            def written(x: Tensor, table: tuple[Tensor, Tensor], one=one) -> Any:
                q, k, v = one._project(x)
                q, _ = one._rotate(q, k, table)
                return q, (k, v)

            one._written = written

    p.loaded(spoil)


@bug(
    "unrotated layers",
    accepted=("rope", "positions"),
    words=ANGLES + "|layer|not|never|without",
    taps=ROTATED,
    model="smollm3",
    dtype="bfloat16",
    tp=2,
    ep=1,
)
def flags_of_unrotated_layers_are_read_the_other_way_round(p: Spoilt) -> None:
    """transformers#43756: no_rope_layers is 1 where there is a rotation."""
    p.rules(layer_rope=lambda model, layer: model.of_layer(0 if layer == 1 else 1))


@bug(
    "long rotation",
    accepted=("rope", "scale"),
    words=ANGLES + "|long|short|length|sequence",
    taps=ROTATED,
    model="phimoe",
    tp=2,
    ep=2,
)
def long_factors_are_chosen_by_the_configured_context(p: Spoilt) -> None:
    """mlxcel#1358, mlx-lm#660: short_factor is never used where more positions are possible than the
    first ones.
    """

    def long(model: ModelConfig, theta: float, length: int) -> tuple[Tensor, float]:
        scaling = replace(model.rope_scaling, long_factors=(1.0, 2.0, 5.0, 9.0))  # those of the config
        return rope.frequencies(replace(model, rope_scaling=scaling), theta, model.max_position)

    p.rules(rope_frequencies=long)


@bug(
    "scaled rotation",
    accepted=("rope", "scale"),
    words=ANGLES + "|linear|divid|slow|8|layer",
    taps=ROTATED,
    layers=(0, 2),
    model="gemma3",
    tp=2,
    ep=1,
)
def linear_scaling_slows_the_layers_with_windows_too(p: Spoilt) -> None:
    """ferrox#39: the base is by layer, and the divisors of the frequencies are the model's."""

    def scaled(model: ModelConfig, theta: float, length: int) -> tuple[Tensor, float]:
        found, factor = rope.frequencies(model, theta, length)
        return (found if model.rope_scaling.kind == "linear" else found / 8.0), factor

    p.rules(rope_frequencies=scaled)


@bug(
    "scale",
    accepted=("scale", "scores", "attention", "softmax"),
    words="scal|factor|times|twice|magnitud|1\\.4|1\\.2|score|larg",
    taps=SCORES,
    model="llama-yarn",
)
def magnitude_of_yarn_is_in_the_scale_of_scores_as_well(p: Patched) -> None:
    """DeepSeek's attention has its square there and tables without it; the port of Llama has both."""
    square = (0.1 * math.log(8) + 1) ** 2
    p.attention(scale=lambda scores, scaling: scores * scaling * square)


@bug(
    "padding",
    accepted=("positions", "rope", "cache"),
    words=ANGLES + "|padd|shift|offset|ahead|later|7|step|decode|sequence",
    taps=ROTATED,
    step=1,
    model="qwen2-window",
)
def shorter_prompt_goes_on_at_the_position_behind_its_padding(p: Patched) -> None:
    """The mask gives positions in the prefill; decode counts columns of the padded batch."""
    p.positions(lambda positions: positions + (7 if p.decode and p.seq == 1 else 0))


@bug(
    "scale",
    accepted=("scale", "scores", "attention"),
    words="scal|factor|times|multipl|score|larg|0\\.3|1\\.1|sqrt|root",
    taps=SCORES,
    model="granite",
)
def attention_multiplier_is_of_what_attention_gives(p: Patched) -> None:
    """As CTranslate2#1882 was advised: scores have the root of the width, and o_proj's output the
    multiplier.
    """
    p.attention(scale=lambda scores, scaling: scores * 8**-0.5)
    for i, _ in p.layers():
        p.output(p.attn(i).o_proj, lambda y: y * 0.3)


@bug(
    "heads",
    accepted=("cache", "heads", "mask"),
    words="zero|written|missing|head|last|cache|row|empty|lost|key",
    taps=CACHES,
    heads=(3,),
    step=1,
    model="cwm",
    ep=1,
)
def last_head_of_a_new_token_is_not_written(p: Spoilt) -> None:
    """The grid of the kernel that writes single tokens is rounded down; the slot stays as it was
    allocated.
    """

    def spoil(runner: Runner) -> None:
        right = runner.pool.write

        def write(layer: int, batch: Any, keys: Tensor, values: Tensor) -> None:
            if p.decode:
                keys, values = keys.clone(), values.clone()
                keys[:, -1], values[:, -1] = 0.0, 0.0
            right(layer, batch, keys, values)

        runner.pool.write = write

    p.running(spoil)
