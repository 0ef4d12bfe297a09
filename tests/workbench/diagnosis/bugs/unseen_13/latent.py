"""Latent attention: what is cached of a token, what keys and values are made of it, and which keys are chosen."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from lockstep.engine.config import ModelConfig
from lockstep.engine.config.rope_scaling import magnitude
from lockstep.engine.parallel import shards
from lockstep.engine.rules import latent, rope
from tests.workbench.diagnosis.bugs.bug import bug
from tests.workbench.diagnosis.bugs.engine_ranks import Spoilt

SCORES = ("attn.scores", "attn.probs")
TURNED = ("attn.q_rope", "attn.rope_key")
SCALED = "scal|factor|times|root|width|dim"


@bug(
    "scale",
    accepted=("scale", "scores", "attention"),
    words=SCALED,
    taps=SCORES,
    step=1,
    model="glm4-moe-lite",
    dtype="bfloat16",
    tp=2,
    ep=1,
)
def absorbed_queries_are_scaled_by_the_width_of_what_they_meet(p: Spoilt) -> None:
    """The latent's and the rotated part's, which is what the kernel of decode is given, and not a head's."""

    def spoil(decoder):
        for layer in decoder.layers:
            attention = layer.attention
            right = attention._attended

            def attended(*args, attention=attention, right=right):
                if p.decode:
                    attention.scale = attention.latent.written_dim**-0.5
                return right(*args)

            attention._attended = attended

    p.loaded(spoil)


@bug(
    "scale",
    accepted=("scale", "scores", "attention"),
    words="mscale|yarn|" + SCALED,
    taps=SCORES,
    model="deepseek-v3",
    tp=4,
    ep=2,
)
def scale_has_mscale_in_place_of_mscale_all_dim(p: Spoilt) -> None:
    """imp#880: the two are the same in the first checkpoints that had them."""

    def scale(model: ModelConfig) -> float:
        scaling = model.rope_scaling
        return magnitude(scaling.factor, scaling.mscale or 0.0) ** 2 / math.sqrt(model.head_dim)

    p.rules(scale=scale)


@bug(
    "rotation",
    accepted=("rope",),
    words="frequenc|rope|rotat|angle|turn|width|whole|head|dimension|theta",
    taps=TURNED,
    model="deepseek-v2",
    tp=2,
    ep=1,
)
def frequencies_of_the_rotated_part_are_those_of_a_head(p: Spoilt) -> None:
    """They are made of a head's width, both parts together, and the first ones are used."""

    def frequencies(model: ModelConfig, theta, length=0):
        found, factor = rope.frequencies(model, theta, length)
        return theta ** (-2 * torch.arange(len(found)) / model.head_dim), factor

    p.rules(rope_frequencies=frequencies)


@bug(
    "rotation",
    accepted=("rope",),
    words="half|halves|neighbour|pair|interleav|rope|rotat|turn|convention",
    taps=TURNED,
    model="youtu",
    dtype="bfloat16",
    tp=2,
    ep=1,
)
def both_rotated_parts_turn_in_halves(p: Spoilt) -> None:
    """As in families whose converters have put the channels in that order; this one's checkpoint has neighbours."""
    p.rules(layer_rope=lambda model, layer: replace(ModelConfig.of_layer(model, layer), neighbours=False))


@bug(
    "fused",
    accepted=("weight", "linear"),
    words="weight|row|order|other|cut|split|permut|shift|part|exchang|swap",
    taps=("attn.q_a_proj", "attn.kv_a_proj"),
    model="deepseek-v3",
    dtype="bfloat16",
    tp=2,
    ep=2,
)
def fused_product_of_both_latents_is_cut_from_the_other_end(p: Spoilt) -> None:
    """Rows of queries lie first in the packed weight, and the sizes of the split are given the other way round."""

    def spoil(decoder):
        for layer in decoder.layers:
            products = layer.attention.products
            (queries,), (keys,) = (products[tap].parameters().values() for tap in ("q_a_proj", "kv_a_proj"))
            first, second = torch.cat((queries, keys)).split((len(keys), len(queries)))
            keys.copy_(first)
            queries.copy_(second)

    p.loaded(spoil)


@bug(
    "sharding",
    accepted=("weight", "sharding", "heads", "linear"),
    words="rank|head|first|same|other|shard|weight|row",
    taps=("attn.q_b_proj",),
    ranks=(1,),
    model="glm4-moe-lite",
    tp=2,
    ep=2,
)
def every_rank_has_the_queries_of_the_first(p: Spoilt) -> None:
    """The expansions of keys and values know of ranks, that of queries was taken for a replicated product."""

    def plan(name, model, tp, rank, ep=1):
        return shards.plan(name, model, tp, 0 if "q_b_proj" in name else rank, ep)

    p.rules(shard=plan)


@bug(
    "cache",
    accepted=("cache", "scale", "precision", "input"),
    words="scal|factor|times|cache|8|eight|bits|round|precis",
    taps=("attn.latent_cache",),
    step=1,
    model="mistral4",
    tp=2,
    ep=1,
)
def latents_in_eight_bits_are_read_without_their_scale(p: Spoilt) -> None:
    """vllm#33638: they are divided by it when they are written, and the kernel of decode takes it to be 1."""

    def spoil(decoder):
        for layer in decoder.layers:
            right = layer.attention._without_index

            def read(cached, right=right):
                rows, key = right(cached)
                codes = (rows / 0.25).to(torch.float8_e4m3fn).to(rows.dtype)
                return (codes if p.decode else rows), key

            layer.attention._without_index = read

    p.loaded(spoil)


@bug(
    "keys",
    accepted=("keys", "rope", "skipped", "heads"),
    words="rope|rotat|part|shared|missing|zero|without|channel|position",
    taps=("attn.keys",),
    step=1,
    model="deepseek-v2",
    dtype="bfloat16",
    tp=2,
    ep=2,
)
def scores_of_decode_have_the_plain_part_alone(p: Spoilt) -> None:
    """The product of queries with latents is there, that with the rotated parts is never added to it."""

    def plain(own, shared):
        return latent.with_shared_part(own, torch.zeros_like(shared))

    p.rules(latent_keys=p.later(latent.with_shared_part, plain))


@bug(
    "values",
    accepted=("context", "heads", "attention", "values"),
    words="head|value|pad|order|merge|context|channel|zero|part|layout",
    taps=("attn.context",),
    model="deepseek-v2-lite",
    dtype="bfloat16",
    tp=2,
    ep=1,
)
def padding_of_the_values_is_cut_off_behind_all_heads(p: Spoilt) -> None:
    """They are as wide as keys for a kernel that has one width, and what it gives is cut once its heads are merged."""

    def merged(heads: Tensor) -> Tensor:
        width = heads.shape[-1]
        padded = F.pad(heads, (0, 24 - width)).transpose(0, 1).flatten(1)
        return padded[:, : len(heads) * width].contiguous()

    p.rules(merge=merged)


@bug(
    "weights",
    accepted=("weight", "linear", "keys"),
    words="weight|stale|old|before|other|differ|wrong|load|sync",
    taps=("attn.kv_b_proj",),
    layers=(1,),
    step=1,
    model="deepseek-v3",
    tp=2,
    ep=1,
)
def absorbed_matrices_are_those_of_before_the_update(p: Spoilt) -> None:
    """They were made of the expansion when the model was loaded; a step of training has changed that since."""

    def spoil(decoder):
        weight = decoder.layers[1].attention.products["kv_b_proj"].weight
        (matrix,) = weight.parts().values()
        noise = torch.randn(matrix.shape, generator=torch.Generator().manual_seed(p.rank))
        before, right = matrix + 0.2 * matrix.std() * noise, weight.product

        def product(x, bias=None):
            return F.linear(x, before, bias) if p.decode else right(x, bias)

        weight.product = product

    p.loaded(spoil)


@bug(
    "indexer",
    accepted=("linear", "input", "norm"),
    words="norm|input|read|latent|quer|before|other",
    taps=("attn.index_q_proj",),
    model="deepseek-v32",
    tp=2,
    ep=1,
)
def indexer_reads_the_latents_of_queries_before_their_norm(p: Spoilt) -> None:
    """It is handed what the product gives, as norm and expansion are one kernel."""

    def spoil(decoder):
        for layer in decoder.layers:
            attention, held = layer.attention, []
            product, right = attention._product, attention._with_index

            def seen(tap, x, product=product, held=held):
                found = product(tap, x)
                if tap == "q_a_proj":
                    held[:] = [found]
                return found

            def indexed(key, x, query, table, right=right, held=held):
                return right(key, x, held[0], table)

            attention._product, attention._with_index = seen, indexed

    p.loaded(spoil)


@bug(
    "indexer",
    accepted=("rope",),
    words="first|last|front|part|channel|rope|rotat|turn|dimension",
    taps=("attn.index_q_rope", "attn.index_k_rope"),
    layers=(0, 2),
    model="glm-moe-dsa",
    dtype="bfloat16",
    tp=2,
    ep=2,
)
def heads_of_the_indexer_turn_their_last_channels(p: Spoilt) -> None:
    """As latent heads do, which have the rotated part behind the plain one."""

    def spoil(decoder):
        for i in (0, 2):
            indexer = decoder.layers[i].attention.indexer
            right = indexer.written

            def written(x, query, table, indexer=indexer, right=right):
                rotate = indexer.rotate
                width = 2 * table[0].shape[-1]

                def last(x, cos, sin):
                    turned = rotate(x.roll(width, -1), cos, sin)
                    return turned.roll(-width, -1)

                indexer.rotate = last
                found = right(x, query, table)
                indexer.rotate = rotate
                return found

            indexer.written = written

    p.loaded(spoil)
