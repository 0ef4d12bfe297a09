"""Latent attention: what is cached of a token, what keys and values are made of it, and which keys are chosen."""

from __future__ import annotations

from dataclasses import replace

import torch

from lockstep.engine.config import ModelConfig
from lockstep.engine.rules import defaults, indexer, latent
from lockstep.engine.rules.norm import rms_norm
from tests.workbench.diagnosis.bugs.bug import bug
from tests.workbench.diagnosis.bugs.engine_ranks import Spoilt

SCORES = ("attn.scores", "attn.probs")


@bug(
    "weights",
    accepted=("weight", "scale", "precision", "keys"),
    words="scal|weight|row|block|last|times|factor|part|channel|head",
    taps=("attn.kv_b_proj",),
    layers=(1,),
    model="deepseek-v3",
    dtype="bfloat16",
    tp=2,
    ep=1,
)
def last_block_of_the_expansion_has_no_scale(p: Spoilt) -> None:
    """Its rows are no whole number of blocks of 64: the scales of those that are left over are not read."""

    def spoil(decoder):
        (weight,) = decoder.layers[1].attention.products["kv_b_proj"].parameters().values()
        weight[len(weight) // 64 * 64 :] *= 1.6

    p.loaded(spoil)


@bug(
    "queries",
    accepted=("weight", "heads", "rope", "linear"),
    words="head|order|permut|layout|row|part|rope|other|weight|interleav",
    taps=("attn.q_b_proj",),
    layers=(2,),
    model="glm4-moe-lite",
    tp=2,
    ep=1,
)
def rows_of_queries_are_all_plain_parts_and_then_all_rotated_ones(p: Spoilt) -> None:
    """One layer of the converted file is laid out for a kernel that takes both parts by themselves."""

    def spoil(decoder):
        attention = decoder.layers[2].attention
        (weight,) = attention.products["q_b_proj"].parameters().values()
        heads = weight.unflatten(0, (attention.heads, -1))
        plain = attention.latent.plain_dim
        weight.copy_(torch.cat((heads[:, :plain].flatten(0, 1), heads[:, plain:].flatten(0, 1))))

    p.loaded(spoil)


@bug(
    "rotation",
    accepted=("rope",),
    words="first|last|front|part|channel|rope|rotat|other|dimension",
    taps=("attn.q_rope",),
    layers=(2,),
    model="deepseek-v2",
    dtype="bfloat16",
    tp=2,
    ep=2,
)
def queries_of_one_layer_turn_their_first_channels(p: Spoilt) -> None:
    """As heads with a partial rotation do; the rotated part of a latent head is its last."""
    p.rules(
        (2,), layer_rope=lambda model, layer: replace(ModelConfig.of_layer(model, layer), rotary_last=False)
    )


@bug(
    "scale",
    accepted=("scale", "scores", "attention"),
    words="mscale|yarn|scal|factor|times|root",
    taps=SCORES,
    step=1,
    model="deepseek-v2-lite",
    tp=2,
    ep=1,
)
def decode_scales_without_what_yarn_adds(p: Spoilt) -> None:
    """Its kernel takes the head's width and makes the scale of it."""

    def spoil(decoder):
        for layer in decoder.layers:
            attention = layer.attention
            right = attention._attended

            def attended(*args, attention=attention, right=right):
                if p.decode:
                    attention.scale = attention.head_dim**-0.5
                return right(*args)

            attention._attended = attended

    p.loaded(spoil)


@bug(
    "values",
    accepted=("values", "keys", "weight", "heads"),
    words="key|value|other|half|swap|exchang|order|part|row|channel|weight",
    taps=("attn.values",),
    layers=(1,),
    step=1,
    model="youtu",
    dtype="bfloat16",
    ep=1,
)
def decode_expands_the_context_by_the_half_of_the_keys(p: Spoilt) -> None:
    """Of the absorbed weights one layer has the first view twice."""
    held = {}

    def keys(own, shared):
        held["own"] = own
        return latent.with_shared_part(own, shared)

    def spoil(decoder):
        attention = decoder.layers[1].attention
        right = attention._seen

        def seen(tap, x, index):
            if p.decode and tap is attention.tap_values:
                x.copy_(held["own"][..., : x.shape[-1]])
            right(tap, x, index)

        attention._seen = seen

    p.rules((1,), latent_keys=keys)
    p.loaded(spoil)


@bug(
    "cache",
    accepted=("cache", "input"),
    words="cache|row|zero|last|new|written|stale|missing|position|token",
    taps=("attn.latent_cache",),
    step=1,
    model="mistral4",
    tp=2,
    ep=2,
)
def latent_of_the_decoded_token_is_not_there_yet(p: Spoilt) -> None:
    """The write of the latents is on another stream than that of the rotated parts."""

    def spoil(decoder):
        for layer in decoder.layers:
            attention = layer.attention
            right = attention._without_index

            def early(cached, right=right):
                rows, key = right(cached)
                if p.decode:
                    rows = rows.clone()
                    rows[-1] = 0
                return rows, key

            attention._without_index = early

    p.loaded(spoil)


@bug(
    "order",
    accepted=("norm", "rope", "input", "sharding", "positions"),
    words="rank|row|token|order|half|shift|other|gather|exchang|swap|position",
    taps=("attn.kv_a_norm", "attn.rope_key"),
    ranks=(1,),
    model="deepseek-v3",
    tp=2,
    ep=2,
)
def second_rank_joins_the_latents_of_the_tokens_beginning_with_its_own(p: Spoilt) -> None:
    """Each rank makes those of half of the prompts' tokens, and they are gathered."""

    def joined(written, comm):
        if p.decode:
            return written
        half = (len(written) + 1) // 2
        return torch.cat((written[half:], written[:half]))

    if p.rank == 1:
        p.rules(written_latent=joined)


@bug(
    "queries",
    accepted=("query_scaling", "scale"),
    words="beta|factor|scal|temperature|times|log|0\\.5|0\\.1|position",
    taps=("attn.q_scaled",),
    model="mistral4",
    dtype="bfloat16",
    tp=2,
    ep=1,
)
def temperature_has_the_beta_of_another_family(p: Spoilt) -> None:
    """0.1, which is Llama 4's and written into the kernel."""
    p.rules(
        query_factor=lambda positions, scaling: defaults.query_factor(positions, replace(scaling, beta=0.1))
    )


@bug(
    "indexer",
    accepted=("norm",),
    words="mean|centre|center|layer ?norm|rms|subtract|norm",
    taps=("attn.index_k_norm",),
    model="deepseek-v32",
    dtype="bfloat16",
    tp=2,
    ep=1,
)
def index_keys_go_through_an_rms_norm(p: Spoilt) -> None:
    """All other norms of the model are such; this one takes the mean off and has a bias."""
    p.rules(index_norm=lambda bias, x, weight, eps, form: rms_norm(x, weight, eps, "wide") + bias)


@bug(
    "indexer",
    accepted=("index_scores", "mask", "key_choice"),
    words="mask|causal|future|later|sees|seen|sight|key|triang|infin",
    taps=("attn.index_scores", "attn.index_chosen"),
    model="deepseek-v32",
    tp=2,
    ep=2,
)
def indexer_may_choose_the_token_behind_the_query(p: Spoilt) -> None:
    """The end of its loop over keys is one behind the query, and counted in; attention itself sees what lies before."""

    def behind(q_positions, rows, kv_positions):
        return kv_positions[None, :] <= q_positions[rows, None] + 1

    p.rules(index_sight=behind)


@bug(
    "indexer",
    accepted=("index_scores", "scale", "input"),
    words="weight|head|sum|scor|scal|mean|equal|without",
    taps=("attn.index_scores",),
    layers=(0, 2),
    step=1,
    model="glm-moe-dsa",
    ep=1,
)
def heads_of_the_indexer_count_the_same_in_decode(p: Spoilt) -> None:
    """The kernel for one query sums over the heads and leaves their weights to a scale that is never made."""

    def equal(q, k, weights, config):
        return indexer.scores(q, k, torch.ones_like(weights), config)

    p.rules(index_scores=p.later(indexer.scores, equal))


@bug(
    "indexer",
    accepted=("shared_choice", "key_choice", "input", "cache"),
    words="sequence|other|first|chos|choice|key|layer|row|batch|stale",
    taps=("attn.shared_chosen",),
    layers=(1,),
    step=1,
    model="glm-moe-dsa",
    tp=2,
    ep=2,
)
def sequences_of_decode_share_the_choice_of_the_first(p: Spoilt) -> None:
    """The layer without an indexer reads row 0 of the buffer for all of the batch."""

    def spoil(decoder):
        attention = decoder.layers[1].attention
        right = attention._chosen

        def chosen(index, span, inputs, tiling):
            if p.decode:
                inputs.chosen[index] = inputs.chosen[0].clone()
            return right(index, span, inputs, tiling)

        attention._chosen = chosen

    p.loaded(spoil)
