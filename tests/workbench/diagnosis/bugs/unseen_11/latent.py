"""Latent attention: what is made of a token, what is cached of it, and what keys and values are made of that."""

from __future__ import annotations

import math

import torch

from lockstep.engine.config import ModelConfig
from lockstep.engine.rules import defaults, latent, rope
from tests.workbench.diagnosis.bugs.bug import ROTATED, bug
from tests.workbench.diagnosis.bugs.engine_ranks import Spoilt

TURNED = (*ROTATED, "attn.rope_key")
SCORES = ("attn.scores", "attn.probs")


@bug(
    "queries",
    accepted=("norm", "skipped"),
    words="norm|missing|skip|without|not",
    taps=("attn.q_a_norm",),
    model="youtu",
    dtype="bfloat16",
    ep=1,
)
def latents_of_queries_are_not_normed(p: Spoilt) -> None:
    p.rules(query_latent=lambda x, norm: x)


@bug(
    "latent",
    accepted=("norm", "input"),
    words="norm|root|mean|square|width|rope|key|part|channel|whole|all|scal|split",
    taps=("attn.kv_a_norm",),
    model="mistral4",
    tp=2,
    ep=1,
)
def root_of_the_latent_is_taken_of_the_shared_key_as_well(p: Spoilt) -> None:
    """The norm is applied before the split; its weight is padded with ones, so that the key is whole."""

    def split(written, norm, kv_rank):
        own = written[:, :kv_rank].float().square().mean(-1, keepdim=True)
        whole = written.float().square().mean(-1, keepdim=True)
        normed, key = latent.normed_latent(written, norm, kv_rank)
        return (normed * (own / whole).sqrt()).to(written.dtype), key

    p.rules(split_latent=split)


@bug(
    "bias",
    accepted=("bias", "linear", "weight"),
    words="bias|missing|without|load|zero",
    taps=("attn.kv_a_proj",),
    model="glm4-moe-lite",
    tp=2,
    ep=2,
)
def bias_of_the_latent_is_not_loaded(p: Spoilt) -> None:
    """DeepSeek's own products have none."""

    def spoil(decoder):
        for layer in decoder.layers:
            layer.attention.products["kv_a_proj"].bias.zero_()

    p.loaded(spoil)


@bug(
    "scale",
    accepted=("scale", "scores", "attention"),
    words="scal|factor|times|root|head_dim|width|dim",
    taps=SCORES,
    model="deepseek-v2",
    dtype="bfloat16",
    tp=2,
    ep=1,
)
def scale_is_that_of_the_part_without_positions(p: Spoilt) -> None:
    """qk_nope_head_dim in place of both parts' sum."""
    p.rules(scale=lambda model: 16**-0.5)


@bug(
    "rotation",
    accepted=("rope", "scale"),
    words="factor|scal|yarn|mscale|times|magnitude|length|cos|sin|small|larg",
    taps=TURNED,
    model="deepseek-v3",
    dtype="bfloat16",
    ep=1,
)
def rotation_is_scaled_though_mscale_all_dim_says_by_what(p: Spoilt) -> None:
    """The plain factor of YaRN, 0.1 ln s + 1, in place of the quotient of both."""

    def scaled(model: ModelConfig, theta, length=0):
        return rope.frequencies(model, theta, length)[0], 0.1 * math.log(8) + 1

    p.rules(rope_frequencies=scaled)


@bug(
    "rotation",
    accepted=("rope",),
    words="pair|half|halves|neighbour|interleav|convention|rotat|rope|order|permut|layout",
    taps=("attn.rope_key",),
    layers=(1,),
    model="deepseek-v2",
    ep=1,
)
def shared_key_of_one_layer_turns_in_halves(p: Spoilt) -> None:
    """The fused kernel that writes the cache has the other convention than that of the queries."""

    def halves(x, cos, sin):
        if x.shape[1] > 1:
            return rope.rotate_half_split(x, cos, sin)
        own = x.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)
        turned = rope.rotate_half_split(own, cos, sin)
        return turned.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)

    p.rules((1,), rope=halves)


@bug(
    "heads",
    accepted=("context", "heads", "weight", "attention"),
    words="order|head|transpos|permut|layout|channel|merge|stride",
    taps=("attn.context",),
    model="deepseek-v2-lite",
    tp=2,
    ep=1,
)
def values_of_the_heads_are_merged_channel_by_channel(p: Spoilt) -> None:
    """The result of the batched product is [heads, D, T] here."""
    p.rules(merge=lambda heads: heads.permute(1, 2, 0).flatten(1))


@bug(
    "latent",
    accepted=("norm", "skipped"),
    words="norm|missing|skip|without|not",
    taps=("attn.kv_a_norm",),
    layers=(1,),
    step=1,
    model="glm4-moe-lite",
    dtype="bfloat16",
    ep=1,
)
def decode_of_one_layer_caches_the_latent_as_it_is(p: Spoilt) -> None:
    """The kernel that writes the cache norms no more, and one layer has no norm of its own before it."""

    def unnormed(written, norm, kv_rank):
        return written[:, :kv_rank], written[:, kv_rank:]

    p.rules((1,), split_latent=p.later(latent.normed_latent, unnormed))


@bug(
    "keys",
    accepted=("reduce", "sharding", "rope", "scale"),
    words="twice|reduc|rank|times|sum|double|2|scal",
    taps=("attn.rope_key",),
    model="youtu",
    tp=2,
    ep=1,
)
def shared_key_is_summed_over_the_ranks_that_have_it_whole(p: Spoilt) -> None:
    """Its product is replicated, and its class was made for one that is not."""

    def split(written, norm, kv_rank):
        normed, key = latent.normed_latent(written, norm, kv_rank)
        return normed, p.comm.all_reduce(key.clone())

    p.rules(split_latent=split)


@bug(
    "rotation",
    accepted=("positions", "rope"),
    words="position|token|one|before|earl|late|offset|shift|off|1",
    taps=TURNED,
    step=1,
    model="mistral4",
    dtype="bfloat16",
    ep=1,
)
def decode_turns_by_the_position_of_the_token_before(p: Spoilt) -> None:
    """The length of the cache before the step less one; the scaling of queries goes by the right one."""
    p.rules(rope_positions=p.later(defaults.own_positions, lambda batch: batch.positions - 1))


@bug(
    "heads",
    accepted=("keys", "heads", "weight", "sharding"),
    words="head|order|other|next|shift|permut|neighbour|exchang",
    taps=("attn.keys",),
    step=1,
    model="deepseek-v3",
    tp=2,
    ep=2,
)
def absorbed_keys_of_decode_are_those_of_the_next_head(p: Spoilt) -> None:
    def shifted(own, shared):
        return latent.with_shared_part(own.roll(-1, 1), shared)

    p.rules(latent_keys=p.later(latent.with_shared_part, shifted))


@bug(
    "keys",
    accepted=("keys", "rope", "heads", "weight"),
    words="order|part|front|behind|first|other|exchang|swap|channel|concat|permut|layout|rope",
    taps=("attn.keys",),
    layers=(2,),
    model="deepseek-v2-lite",
    ep=1,
)
def keys_of_one_layer_begin_with_the_shared_part(p: Spoilt) -> None:
    """Queries end with it."""
    p.rules((2,), latent_keys=lambda own, shared: torch.cat((shared.expand(-1, own.shape[1], -1), own), -1))
