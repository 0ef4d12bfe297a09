"""Attention of layers that are not all alike: windows, chunks, sinks, caps, rotations, norms of queries and keys."""

from __future__ import annotations

from dataclasses import replace

import torch

from lockstep.engine.config import ModelConfig
from lockstep.engine.layers.norm import WholeQKNorm
from lockstep.engine.parallel import shards
from lockstep.engine.rules import defaults, per_layer, rope
from lockstep.engine.rules.norm import layer_norm, rms_norm
from tests.workbench.diagnosis.bugs.bug import CACHES, ROTATED, bug
from tests.workbench.diagnosis.bugs.engine_ranks import Spoilt

SCORES = ("attn.scores", "attn.probs")
NORMED = ("attn.q_norm", "attn.k_norm")
MASKED = ("mask", "scores", "attention")
WINDOWED = "window|mask|key|sees|seen|slid|distance|far|local|layer|attend"


@bug(
    "window",
    accepted=MASKED,
    words=WINDOWED + "|tile|block|quer",
    taps=SCORES,
    layers=(0,),
    model="exaone4",
    dtype="bfloat16",
    tp=2,
    ep=1,
)
def window_of_a_tile_of_queries_is_that_of_its_last(p: Spoilt) -> None:
    """Keys are skipped that are out of the window of the last of four queries: earlier ones still see them."""

    def of_tile(queries, rows, keys, window):
        seen = defaults.within_window(queries, rows, keys, window)
        if window is None:
            return seen
        at = torch.arange(rows.start, rows.stop) // 4 * 4 + 3
        last = queries[at.clamp(max=len(queries) - 1)]
        return seen & (keys > last[:, None] - window)

    p.rules(window=of_tile)


@bug(
    "window", accepted=MASKED, words=WINDOWED, taps=SCORES, layers=(1, 3), step=1, model="gemma3", tp=4, ep=1
)
def decode_makes_its_metadata_for_the_first_layer_alone(p: Spoilt) -> None:
    """The plan of the kernel has the window of that layer, and the full ones use it as well."""

    def spoil(decoder):
        for i in (1, 3):
            attention = decoder.layers[i].attention
            right = attention._attended

            def attended(*args, attention=attention, right=right):
                attention.window = 8 if p.decode else None
                return right(*args)

            attention._attended = attended

    p.loaded(spoil)


@bug(
    "window",
    accepted=MASKED,
    words="chunk|window|mask|key|boundar|one|off|shift|position|sees|seen|attend",
    taps=SCORES,
    layers=(0, 2),
    model="llama4",
    tp=2,
    ep=2,
)
def chunks_of_attention_begin_one_token_early(p: Spoilt) -> None:
    """The number of the chunk is that of the position after the token's."""

    def early(queries, rows, keys, chunk):
        same = (keys + 1) // chunk == ((queries[rows] + 1) // chunk)[:, None]
        return same & defaults.within_window(queries, rows, keys, None)

    p.rules(chunk=early)


@bug(
    "sinks",
    accepted=("softmax", "attention"),
    words="sink|softmax|sum|maximum|denominator|exp|normal|shift",
    taps=("attn.probs",),
    model="gpt-oss",
    dtype="bfloat16",
    ep=1,
)
def exponential_of_the_sink_is_added_without_the_maximum_taken_off(p: Spoilt) -> None:
    """The others are exponentials of differences to the row's maximum; the sink was left outside of the loop."""

    def unshifted(scores, sinks, dtype):
        powers = (scores.float() - scores.float().amax(-1, keepdim=True)).exp()
        return (powers / (powers.sum(-1, keepdim=True) + sinks.float().exp())).to(dtype)

    p.rules(sinks=unshifted)


@bug(
    "sinks",
    accepted=("softmax", "weight", "sharding", "heads"),
    words="sink|rank|shard|head|first|same|other|softmax",
    taps=("attn.probs",),
    ranks=(1, 2, 3),
    model="gpt-oss",
    tp=4,
    ep=1,
)
def every_rank_has_the_sinks_of_the_first(p: Spoilt) -> None:
    """A vector is narrowed to the rank's size and not from the rank's offset on."""

    def plan(name, model, tp, rank, ep=1):
        return shards.plan(name, model, tp, 0 if name.endswith("sinks") else rank, ep)

    p.rules(shard=plan)


@bug(
    "cap",
    accepted=("mask", "scores", "attention"),
    words="cap|mask|future|causal|later|after|order|key|sees|seen|tanh|infin",
    taps=SCORES,
    model="vaultgemma",
    dtype="bfloat16",
    tp=2,
    ep=1,
)
def scores_are_capped_behind_the_mask(p: Spoilt) -> None:
    """What is masked ends at minus the cap, and counts a little."""

    def spoil(decoder):
        for layer in decoder.layers:
            attention = layer.attention
            right = attention._scores

            def scores(one, tile, right=right, attention=attention):
                cap = attention.cap
                return right(one, tile).clamp(min=-cap)

            attention._scores = scores

    p.loaded(spoil)


@bug(
    "scale",
    accepted=("scale", "scores", "attention"),
    words="scal|factor|times|root|head_dim|width|dim|24|16",
    taps=SCORES,
    model="gemma2",
    tp=2,
    ep=1,
)
def scale_is_that_of_the_head_and_not_of_query_pre_attn_scalar(p: Spoilt) -> None:
    """Both are the same in all sizes of Gemma 2 but one."""
    p.rules(scale=lambda model: model.head_dim**-0.5)


@bug(
    "rotation",
    accepted=("rope", "positions", "scale"),
    words="linear|factor|scal|frequenc|rope|rotat|angle|position|local|slid|global|8",
    taps=ROTATED,
    layers=(0, 2),
    model="gemma3",
    dtype="bfloat16",
    ep=1,
)
def angles_of_the_local_layers_are_divided_as_those_of_the_others(p: Spoilt) -> None:
    """rope_scaling has one value in older configurations; their own theta the layers have."""

    def frequencies(model: ModelConfig, theta, length=0):
        found, factor = rope.frequencies(model, theta, length)
        return (found / 8 if model.rope_scaling.kind == "none" else found), factor

    p.rules(rope_frequencies=frequencies)


@bug(
    "rotation",
    accepted=("rope", "scale"),
    words="truncat|yarn|frequenc|rope|rotat|angle|floor|ceil|round|whole|scal|band|ramp",
    taps=ROTATED,
    model="gpt-oss",
    tp=2,
    ep=2,
)
def bounds_of_the_yarn_ramp_are_whole_numbers(p: Spoilt) -> None:
    """`truncate: false` is not read, and the default is true."""

    def truncated(model: ModelConfig, theta, length=0):
        scaling = replace(model.rope_scaling, truncate=True)
        return rope.frequencies(replace(model, rope_scaling=scaling), theta, length)

    p.rules(rope_frequencies=truncated)


@bug(
    "rotation",
    accepted=("rope",),
    words="share|part|pair|partial|rope|rotat|turn|frequenc|dimension|channel|angle|proportion",
    taps=ROTATED,
    layers=(1, 3, 5),
    model="gemma4",
    dtype="bfloat16",
    tp=2,
    ep=1,
)
def all_pairs_of_the_global_heads_are_turned(p: Spoilt) -> None:
    """partial_rotary_factor of the proportional rotation is not read; most pairs should stand still."""

    def whole(model: ModelConfig, theta, length=0):
        scaling = replace(model.rope_scaling, share=1.0)
        return rope.frequencies(replace(model, rope_scaling=scaling), theta, length)

    p.rules(rope_frequencies=whole)


@bug(
    "norm",
    accepted=("norm", "heads"),
    words="norm|head|each|width|whole|all|mean|square|root|own|group",
    taps=NORMED,
    layers=(1,),
    model="flex-olmo",
    tp=2,
    ep=2,
)
def one_layer_norms_each_head_where_it_norms_them_all(p: Spoilt) -> None:
    """Its weight is as wide as all heads, and each takes its part."""

    class ByHead(WholeQKNorm):
        def __call__(self, q, k):
            found = [
                rms_norm(x, torch.ones(x.shape[-1]), norm.eps, norm.form) * norm.weight.view(x.shape[1:])
                for x, norm in ((q, self.q), (k, self.k))
            ]
            for norm, x in zip((self.q, self.k), found, strict=True):
                if norm.tap:
                    norm.tap(x)
            return tuple(found)

    def spoil(decoder):
        norm = decoder.layers[1].attention.qk_norm
        norm.__class__ = ByHead

    p.loaded(spoil)


@bug(
    "norm",
    accepted=("norm", "weight", "sharding"),
    words="norm|weight|rank|shard|first|same|other|head",
    taps=("attn.q_norm",),
    ranks=(1, 2, 3),
    model="olmoe",
    dtype="bfloat16",
    tp=4,
    ep=2,
)
def every_rank_has_the_query_norm_of_the_first(p: Spoilt) -> None:
    """sglang#20967: the weight of a norm over all heads is cut from its beginning."""

    def plan(name, model, tp, rank, ep=1):
        return shards.plan(name, model, tp, 0 if "q_norm" in name else rank, ep)

    p.rules(shard=plan)


@bug(
    "norm",
    accepted=("norm",),
    words="mean|centre|center|layer ?norm|rms|subtract|norm",
    taps=NORMED,
    model="phi-normed",
    dtype="bfloat16",
    tp=2,
    ep=1,
)
def heads_are_normed_without_their_mean_taken_off(p: Spoilt) -> None:
    """All norms of queries and keys go through the one kernel of RMSNorm; the bias is added behind it."""

    def norm(bias, x, weight, eps, form):
        if x.dim() < 3:
            return layer_norm(bias, x, weight, eps, form)
        normed = rms_norm(x, weight, eps, "wide")
        return normed if bias is None else normed + bias

    p.rules(layer_norm=norm)


@bug(
    "clip",
    accepted=("clip", "skipped"),
    words="clip|clamp|limit|missing|skip|without|bound",
    taps=("attn.q_clip", "attn.k_clip", "attn.v_clip"),
    step=1,
    model="olmo",
    tp=2,
    ep=1,
)
def decode_does_not_clip_queries_keys_and_values(p: Spoilt) -> None:
    """Product, split and rotation are one kernel there, which has no such argument."""
    p.rules(clip_qkv=p.later(defaults.clamped, lambda x, limit: x.clone()))


@bug(
    "multiplier",
    accepted=("multiplier", "scale", "skipped"),
    words="multipl|factor|scal|times|missing|without|skip|0\\.4",
    taps=("attn.k_scaled",),
    layers=(1,),
    model="falcon-h1",
    dtype="bfloat16",
    tp=2,
    ep=1,
)
def keys_of_the_last_layer_are_not_multiplied(p: Spoilt) -> None:
    """key_multiplier is folded into the weights of k by the converter, which stops a layer early."""

    def without(x, factor, tap):
        return x.clone() if tap == "attn.k_scaled" else x * factor

    p.rules((1,), multiplied=without)


@bug(
    "queries",
    accepted=("query_scaling", "scale", "positions"),
    words="floor|round|whole|scal|temperature|factor|position|log|quer",
    taps=("attn.q_scaled",),
    layers=(1, 3),
    model="llama4",
    dtype="bfloat16",
    tp=2,
    ep=1,
)
def temperature_of_queries_grows_with_every_position(p: Spoilt) -> None:
    """The quotient under the logarithm is not rounded down to whole steps."""

    def smooth(positions, scaling):
        return 1 + scaling.beta * ((positions + scaling.offset) / scaling.length).float().log1p()

    p.rules(query_factor=smooth)


@bug(
    "shared",
    accepted=("cache", "layer", "layers", "input"),
    words="layer|cache|shared|source|other|first|last|key|value",
    taps=CACHES,
    layers=(4,),
    model="gemma4",
    tp=2,
    ep=1,
)
def layer_without_keys_borrows_those_of_the_first_of_its_type(p: Spoilt) -> None:
    """And not those of the last one before the shared ones."""

    def first(model, layer):
        return 0 if layer == 4 else per_layer.source_of(model, layer)

    p.rules(shared_cache=first)


@bug(
    "norm",
    accepted=("unit_norm", "norm", "skipped"),
    words="norm|missing|skip|without|not",
    taps=("attn.v_norm",),
    step=1,
    model="gemma4-dense",
    tp=2,
    ep=1,
)
def values_of_decode_are_not_normed(p: Spoilt) -> None:
    """The kernel that norms, turns and writes a token has norms of queries and keys alone."""
    p.rules(value_norm=p.later(per_layer.unit_norm, lambda values, k_norm, eps: values.clone()))
