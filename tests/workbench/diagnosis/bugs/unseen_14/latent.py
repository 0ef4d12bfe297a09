"""Latent attention: what is made of a token's latent, what of it is rotated, cached and scored."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F

from lockstep.engine.parallel import shards
from lockstep.engine.rules.rope import in_first_channels, rotate_half_split
from tests.workbench.diagnosis.bugs.bug import bug
from tests.workbench.diagnosis.bugs.engine_ranks import Spoilt


@bug(
    "layout",
    accepted=("weight", "linear", "sharding", "heads", "keys", "values"),
    words="weight|rows|order|head|layout|permut|key|value|split|cut",
    taps=("attn.kv_b_proj", "attn.keys", "attn.values"),
    model="deepseek-v2",
    tp=2,
    ep=2,
)
def rows_that_expand_latents_are_taken_as_all_keys_before_all_values(p: Spoilt) -> None:
    """kv_b_proj has each head's key and value in turn: [heads, plain + value]."""

    def spoil(decoder):
        for layer in decoder.layers:
            attention, latent = layer.attention, layer.attention.latent
            (matrix,) = attention.products["kv_b_proj"].weight.parts().values()
            keys, values = matrix.split(
                (attention.heads * latent.plain_dim, attention.heads * latent.value_dim)
            )
            by_head = [part.unflatten(0, (attention.heads, -1)) for part in (keys, values)]
            matrix.copy_(torch.cat(by_head, 1).flatten(0, 1))

    p.loaded(spoil)


@bug(
    "rotation",
    accepted=("rope", "heads", "positions", "input"),
    words="rotat|rope|first|last|channel|part|order|angle",
    taps=("attn.q_rope",),
    model="mistral4",
    tp=2,
    ep=1,
)
def queries_are_rotated_in_their_first_channels(p: Spoilt) -> None:
    """As models with a partial rotation are; those that keys share lie behind the others."""
    p.rules(layer_rope=lambda model, layer: replace(model.of_layer(layer), rotary_last=False))


@bug(
    "norm",
    accepted=("norm", "input", "scale"),
    words="norm|row|part|whole|scal|channel|mean|square|rotat",
    taps=("attn.kv_a_norm",),
    model="glm4-moe-lite",
    dtype="bfloat16",
    ep=1,
)
def norm_of_latents_counts_the_channels_that_are_rotated(p: Spoilt) -> None:
    """The fused kernel takes the root mean square of all that kv_a_proj_with_mqa gives."""

    def split(written, norm, kv_rank):
        wide = written.float()
        own, whole = (x.square().mean(-1, keepdim=True) + 1e-6 for x in (wide[:, :kv_rank], wide))
        latent = norm(written[:, :kv_rank]).float() * (own / whole).sqrt()
        return latent.to(written.dtype), written[:, kv_rank:]

    p.rules(split_latent=split)


@bug(
    "scale",
    accepted=("scale", "scores", "attention", "softmax"),
    words="scal|times|small|root|width|score|factor",
    taps=("attn.scores",),
    step=1,
    model="youtu",
    tp=2,
    ep=1,
)
def absorbed_scores_are_scaled_by_the_width_of_what_is_cached(p: Spoilt) -> None:
    """ferrox#225: in decode queries and cached rows have kv_rank + rope channels, of which the root was
    taken.
    """

    def spoil(decoder):
        for layer in decoder.layers:
            attention = layer.attention
            right, factor = attention._scores, (attention.head_dim / attention.latent.written_dim) ** 0.5

            def scores(one, tile, right=right, factor=factor):
                return right(one, tile) * (factor if p.decode else 1.0)

            attention._scores = scores

    p.loaded(spoil)


@bug(
    "scale",
    accepted=("scale", "scores", "attention", "softmax"),
    words="scal|times|small|mscale|yarn|score|factor",
    taps=("attn.scores",),
    model="deepseek-v2-lite",
    dtype="bfloat16",
    tp=2,
    ep=2,
)
def magnitude_of_yarn_is_multiplied_by_scores_once(p: Spoilt) -> None:
    """transformers#47435, imp#880: mscale_all_dim is of queries and of keys, its square belongs to the
    scores.
    """
    p.rules(scale=lambda model: (model.scale * model.head_dim**-0.5) ** 0.5)


@bug(
    "sharding",
    accepted=("sharding", "weight", "heads", "linear"),
    words="shard|rank|weight|head|same|first|other|part",
    taps=("attn.kv_b_proj", "attn.keys", "attn.values"),
    ranks=(1, 2, 3),
    model="deepseek-v3",
    tp=4,
    ep=2,
)
def heads_that_expand_latents_are_replicated_as_one_cached_head_is(p: Spoilt) -> None:
    """There is one row of the cache for all heads, so that kv_b_proj was cut as for one KV head: alike on
    all ranks.
    """

    def plan(name, model, tp, rank, ep=1):
        return shards.plan(name, model, tp, 0 if name.endswith(".kv_b_proj.weight") else rank, ep)

    p.rules(shard=plan)


@bug(
    "padding",
    accepted=("context", "heads", "attention"),
    words="head|order|pad|channel|context|merge|other|zero|shift",
    taps=("attn.context",),
    model="deepseek-v2",
    tp=2,
    ep=1,
)
def padding_of_values_is_cut_off_behind_all_heads(p: Spoilt) -> None:
    """Values are padded to the width of keys for the kernel; each head's zeros stay, the last heads are
    lost.
    """

    def merge(heads):
        plain, rope = p.model.latent.plain_dim, p.model.latent.rope_dim
        padded = F.pad(heads, (0, plain + rope - heads.shape[-1]))
        return padded.transpose(0, 1).flatten(1)[:, : heads.shape[0] * heads.shape[-1]]

    p.rules(merge=merge)


@bug(
    "bias",
    accepted=("bias",),
    words="bias|constant|offset|missing|without",
    taps=("attn.kv_a_proj",),
    model="glm-moe-dsa",
    tp=2,
    ep=2,
)
def fused_product_of_both_latents_has_the_bias_of_queries_alone(p: Spoilt) -> None:
    """fused_qkv_a_proj: the second shard of its bias has another name in the checkpoint, and stays zero."""

    def spoil(decoder):
        for layer in decoder.layers:
            layer.attention.products["kv_a_proj"].bias.zero_()

    p.loaded(spoil)


@bug(
    "indexer",
    accepted=("rope", "positions", "heads"),
    words="rotat|rope|neighbour|halves|half|pair|interleav|angle",
    taps=("attn.index_q_rope", "attn.index_k_rope"),
    model="deepseek-v32",
    tp=2,
    ep=2,
)
def indexer_rotates_neighbours_as_attention_does(p: Spoilt) -> None:
    """mlx-lm#512, DeepSeek-V3.2-Exp's own inference code at first: the indexer rotates halves."""

    def spoil(runner):
        for layer in runner.decoder.layers:
            layer.attention.indexer.rotate = in_first_channels(rotate_half_split, neighbours=True)

    p.running(spoil)
