"""Attention of layers that are not all alike, and the norms, multipliers and activations around it."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
import torch.nn.functional as F

from lockstep.engine.config import ModelConfig
from lockstep.engine.config.rope_scaling import RopeScaling
from lockstep.engine.rules import defaults, rope
from lockstep.engine.rules.norm import rms_norm
from tests.workbench.diagnosis.bugs.bug import CACHES, QKV, ROTATED, bug
from tests.workbench.diagnosis.bugs.engine_ranks import Spoilt

SCORES = ("attn.scores", "attn.probs")
NORMED = ("attn.q_norm", "attn.k_norm")
MASKED = ("mask", "scores", "attention")
WINDOWED = "window|mask|key|sees|seen|slid|distance|far|local|layer|attend"
ANGLES = "frequenc|rope|rotat|angle|turn|scal|factor|position|pair"


@bug(
    "window",
    accepted=MASKED,
    words=WINDOWED,
    taps=SCORES,
    layers=(0,),
    model="cwm",
    dtype="bfloat16",
    tp=2,
    ep=1,
)
def every_layer_has_the_window(p: Spoilt) -> None:
    """vllm#49795: sliding_window is read and layer_types is not."""

    def spoil(decoder):
        decoder.layers[0].attention.window = 8

    p.loaded(spoil)


@bug(
    "window",
    accepted=("cache", "input", "positions", "mask"),
    words="cache|row|ring|overwrit|window|key|slot|old|new|position|token|wrong|stale",
    taps=CACHES,
    model="mistral-window",
    dtype="bfloat16",
    tp=2,
    ep=1,
)
def ring_of_a_window_is_full_before_the_prompt_has_read_it(p: Spoilt) -> None:
    """It has as many rows as the window, and a prompt that is longer is written whole before it attends."""

    def spoil(runner):
        right = runner.pool.read

        def read(layer, slots):
            keys, values = right(layer, slots)
            rows = torch.arange(len(slots))
            newest = rows + 8 * ((len(slots) - 1 - rows) // 8)
            return keys[newest], values[newest]

        runner.pool.read = read

    p.running(spoil)


@bug(
    "window",
    accepted=MASKED,
    words="chunk|" + WINDOWED,
    taps=SCORES,
    layers=(0, 2),
    step=1,
    model="llama4",
    tp=2,
    ep=2,
)
def kernel_of_decode_knows_no_chunks(p: Spoilt) -> None:
    """One token needs no mask, as long as attention is causal and no more."""

    def all_before(queries, rows, keys, chunk):
        return defaults.within_window(queries, rows, keys, None)

    p.rules(chunk=p.later(defaults.within_chunk, all_before))


@bug(
    "sinks",
    accepted=("softmax", "attention", "scale"),
    words="sink|softmax|sum|denominator|exp|scal|factor|log",
    taps=("attn.probs",),
    model="gpt-oss",
    tp=2,
    ep=1,
)
def sinks_are_powers_of_two(p: Spoilt) -> None:
    """Scores are multiplied by log2(e) before the kernel takes powers of two; the sinks beside them are not."""

    def binary(scores, sinks, dtype):
        return defaults.softmax_beside(scores, sinks.float() * math.log(2), dtype)

    p.rules(sinks=binary)


@bug(
    "cap",
    accepted=("scores", "clip", "activation", "skipped", "scale", "attention"),
    words="cap|tanh|missing|without|skip|clip|limit|bound",
    taps=SCORES,
    step=1,
    model="gemma2",
    tp=4,
    ep=1,
)
def kernel_of_decode_is_given_no_cap(p: Spoilt) -> None:
    """logits_soft_cap is an argument of both wrappers, whose default is none."""
    p.rules(soft_cap=p.later(defaults.capped, lambda x, cap: x))


@bug(
    "rotation",
    accepted=("rope", "skipped", "positions", "layer"),
    words="rope|rotat|turn|position|not|without|missing|layer",
    taps=ROTATED,
    model="smollm3",
    tp=2,
    ep=1,
)
def flags_of_the_layers_that_rotate_are_taken_for_those_that_do_not(p: Spoilt) -> None:
    """no_rope_layers has 1 where a layer does rotate."""
    p.rules(layer_rope=lambda model, layer: ModelConfig.of_layer(model, (1, 0, 1)[layer]))


@bug(
    "rotation",
    accepted=("rope",),
    words="part|whole|channel|dimension|width|half|" + ANGLES,
    taps=ROTATED,
    model="minimax-m2",
    dtype="bfloat16",
    tp=2,
    ep=2,
)
def whole_heads_are_turned(p: Spoilt) -> None:
    """The part is stated by rotary_dim, and only partial_rotary_factor is looked for."""
    p.rules(layer_rope=lambda model, layer: replace(ModelConfig.of_layer(model, layer), rotary=None))


@bug(
    "rotation",
    accepted=("rope", "positions", "scale"),
    words="linear|8|global|" + ANGLES,
    taps=ROTATED,
    layers=(1, 3),
    model="gemma3",
    tp=2,
    ep=1,
)
def scaling_of_the_global_layers_is_read_and_not_used(p: Spoilt) -> None:
    """mlx-vlm#1709: the bases of both types are told apart, and that is all."""

    def plain(model: ModelConfig, theta, length=0):
        return rope.frequencies(replace(model, rope_scaling=RopeScaling()), theta, length)

    p.rules(rope_frequencies=plain)


@bug(
    "rotation",
    accepted=("rope", "scale"),
    words="yarn|original|context|length|band|ramp|" + ANGLES,
    taps=ROTATED,
    layers=(3,),
    model="olmo3",
    tp=2,
    ep=1,
)
def ramp_of_yarn_is_that_of_the_stretched_context(p: Spoilt) -> None:
    """original_max_position_embeddings is not found where it stands, and max_position_embeddings takes its place."""

    def stretched(model: ModelConfig, theta, length=0):
        scaling = replace(model.rope_scaling, original_max_position=model.max_position)
        return rope.frequencies(replace(model, rope_scaling=scaling), theta, length)

    p.rules(rope_frequencies=stretched)


@bug(
    "rotation",
    accepted=("rope", "scale"),
    words="long|short|" + ANGLES,
    taps=ROTATED,
    model="phimoe",
    dtype="bfloat16",
    tp=2,
    ep=2,
)
def long_factors_divide_the_frequencies_of_short_prompts(p: Spoilt) -> None:
    """The engine is started for long contexts, and chooses once for all."""

    def long(model: ModelConfig, theta, length=0):
        scaling = replace(model.rope_scaling, factors=(1.0, 2.0, 5.0, 9.0))
        return rope.frequencies(replace(model, rope_scaling=scaling), theta, length)

    p.rules(rope_frequencies=long)


@bug(
    "norm",
    accepted=("norm", "weight"),
    words="norm|weight|other|exchang|swap|quer|key",
    taps=NORMED,
    model="qwen3-moe",
    dtype="bfloat16",
    tp=2,
    ep=2,
)
def norms_of_queries_and_keys_have_each_other_s_weights(p: Spoilt) -> None:
    """The converter names them in the order of the stacked product, which is not that of the file."""

    def spoil(decoder):
        for layer in decoder.layers:
            norm = layer.attention.qk_norm
            norm.q.weight, norm.k.weight = norm.k.weight, norm.q.weight

    p.loaded(spoil)


@bug(
    "norm",
    accepted=("rope", "norm", "input"),
    words="norm|before|behind|order|rope|rotat|turn",
    taps=ROTATED,
    model="hunyuan",
    dtype="bfloat16",
    tp=2,
    ep=1,
)
def heads_are_normed_before_they_are_turned(p: Spoilt) -> None:
    """As in all other families that norm them; with weights of each channel the order counts."""

    def spoil(decoder):
        for layer in decoder.layers:
            attention = layer.attention
            right, norms = attention._rotate, attention.rotated_norm

            def rotate(q, k, table, attention=attention, right=right, norms=norms):
                attention.rotated_norm = None
                turned = right(norms.q.normalised(q), norms.k.normalised(k), table)
                for norm, x in zip((norms.q, norms.k), turned, strict=True):
                    if norm.tap:
                        norm.tap(x)
                return turned

            attention._rotate = rotate

    p.loaded(spoil)


@bug(
    "norm",
    accepted=("linear", "input", "norm"),
    words="norm|input|read|before|stream|behind|order",
    taps=QKV,
    model="olmo2",
    tp=2,
    ep=1,
)
def norms_stand_before_the_blocks_that_they_stand_behind(p: Spoilt) -> None:
    """The decoder layer is Llama's, whose norms the two of the file are loaded into."""

    def spoil(decoder):
        for layer in decoder.layers:
            for before, behind in (("attn_norm", "post_attn_norm"), ("mlp_norm", "post_mlp_norm")):
                norm = getattr(layer, behind)

                def unnormed(y, norm=norm):
                    if norm.tap:
                        norm.tap(y)
                    return y

                setattr(layer, before, norm.normalised)
                setattr(layer, behind, unnormed)

    p.loaded(spoil)


@bug(
    "norm",
    accepted=("norm", "weight"),
    words="norm|weight|one|1|add|twice|offset|larger",
    taps=("attn_norm",),
    model="gemma3",
    dtype="bfloat16",
    ep=1,
)
def one_is_added_to_weights_that_have_it(p: Spoilt) -> None:
    """sglang#38363: files of the converter have 1 + w, and the layer adds it again."""
    p.rules(norm=lambda x, weight, eps, form: rms_norm(x, weight + 1, eps, form))


@bug(
    "scale",
    accepted=("scale", "scores", "attention"),
    words="scal|factor|times|root|divid|width|0\\.25|4",
    taps=SCORES,
    model="gemma4-dense",
    tp=2,
    ep=1,
)
def scores_of_normed_heads_are_divided_by_the_root_of_their_width(p: Spoilt) -> None:
    """The scale is 1, for queries and keys have weighted norms of their own."""
    p.rules(scale=lambda model: model.head_dim**-0.5)


@bug(
    "multiplier",
    accepted=("embedding", "scale", "multiplier", "skipped"),
    words="multipl|factor|scal|times|missing|without|6",
    taps=("embed",),
    model="granite",
    dtype="bfloat16",
    tp=2,
    ep=1,
)
def stream_begins_without_the_multiplier_of_the_embedding(p: Spoilt) -> None:
    """It is a Llama but for four numbers, of which three are read."""
    p.rules(embedding=lambda rows, model: rows.clone())


@bug(
    "activation",
    accepted=("activation",),
    words="activat|xielu|alpha|beta|below|negative|softplus|function",
    taps=("mlp.act",),
    model="apertus",
    tp=2,
    ep=1,
)
def beta_is_not_added_to_the_slope_below_zero(p: Spoilt) -> None:
    """Both alphas are the softplus of their parameter; the second one has beta in it."""

    def act(x, alpha_p, alpha_n, beta, eps):
        above = F.softplus(alpha_p) * x.square()
        below = (torch.minimum(x, eps).expm1() - x) * F.softplus(alpha_n)
        return torch.where(x > 0, above, below) + beta * x

    p.rules(xielu=act)


@bug(
    "parallel",
    accepted=("linear", "input", "norm"),
    words="input|read|norm|attention|stream|parallel|beside|before|behind|residual",
    taps=("mlp.gate", "mlp.up"),
    layers=(0, 1),
    model="cohere",
    dtype="bfloat16",
    tp=2,
    ep=1,
)
def mlp_stands_behind_attention_where_it_stands_beside_it(p: Spoilt) -> None:
    """The one norm of the layer is applied to the stream with attention's term in it."""

    def spoil(decoder):
        for layer in decoder.layers:
            layer.model = replace(layer.model, parallel=False)
            layer.mlp_norm = layer.attn_norm.normalised

    p.loaded(spoil)


@bug(
    "fused",
    accepted=("weight", "linear", "heads", "sharding"),
    words="weight|row|head|half|halves|interleav|order|gate|other|permut|layout|cut|split",
    taps=("attn.q_proj",),
    layers=(1,),
    model="qwen3-next",
    ep=1,
)
def queries_are_the_first_half_of_the_rows_and_gates_the_second(p: Spoilt) -> None:
    """q_proj has the rows of each head's queries and gate one behind the other."""

    def spoil(decoder):
        attention = decoder.layers[1].attention
        queries = next(x for name, x in attention.qkv.parameters().items() if "q_proj" in name)
        (gates,) = attention.gate.parameters().values()
        heads = [x.unflatten(0, (attention.heads, -1)) for x in (queries, gates)]
        first, second = torch.stack(heads, 1).flatten(0, 2).chunk(2)
        queries.copy_(first)
        gates.copy_(second)

    p.loaded(spoil)


@bug(
    "fused",
    accepted=("weight", "linear", "sharding"),
    words="weight|row|swap|exchang|order|other|key|value|k_proj|v_proj|split|cut",
    taps=("attn.k_proj", "attn.v_proj"),
    model="phi3",
    dtype="bfloat16",
    tp=2,
    ep=1,
)
def fused_rows_are_cut_into_queries_values_and_keys(p: Spoilt) -> None:
    """Keys and values are equally many, so that nothing fails."""

    def spoil(decoder):
        for layer in decoder.layers:
            _, keys, values = layer.attention.qkv.parameters().values()
            first = keys.clone()
            keys.copy_(values)
            values.copy_(first)

    p.loaded(spoil)
