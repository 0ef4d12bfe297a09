"""Latent attention: what is cached of a token, and the keys and values that are made of it."""

from __future__ import annotations

import torch

from lockstep.engine.parallel import shards
from lockstep.engine.rules import defaults, latent
from lockstep.engine.rules.rope import rotate_half_split
from tests.workbench.diagnosis.bugs.bug import bug
from tests.workbench.diagnosis.bugs.engine_ranks import Spoilt


def _expansion(decoder, layer):
    """The weight [heads * (plain + values), latent] of one layer."""
    (weight,) = decoder.layers[layer].attention.products["kv_b_proj"].parameters().values()
    return weight


@bug(
    "latent",
    accepted=("norm",),
    words="norm|twice|again|latent",
    taps=("attn.kv_a_norm",),
    step=1,
    model="deepseek-v3",
    dtype="bfloat16",
    ep=1,
)
def decode_norms_the_latent_when_it_is_written_and_when_it_is_made(p: Spoilt) -> None:
    def twice(written, norm, kv_rank):
        return norm(norm(written[:, :kv_rank])), written[:, kv_rank:]

    p.rules(split_latent=p.later(latent.normed_latent, twice))


@bug(
    "latent",
    accepted=("norm", "input", "weight", "rope"),
    words="latent|rotat|rope|part|first|order|channel|split|other|input|norm",
    taps=("attn.kv_a_norm", "attn.rope_key"),
    layers=(1,),
    model="glm4-moe-lite",
    dtype="bfloat16",
    tp=2,
    ep=2,
)
def rotated_part_is_taken_from_the_front(p: Spoilt) -> None:
    def front(written, norm, kv_rank):
        rope = written.shape[-1] - kv_rank
        return norm(written[:, rope:]), written[:, :rope].contiguous()

    p.rules((1,), split_latent=front)


@bug(
    "latent",
    accepted=("norm", "weight"),
    words="norm|weight|layer|other|query|latent",
    taps=("attn.q_a_norm",),
    layers=(2,),
    model="deepseek-v3",
    tp=2,
    ep=1,
)
def last_layer_norms_its_query_latent_by_the_weight_before(p: Spoilt) -> None:
    def spoil(decoder):
        before, last = (decoder.layers[i].attention.norms["q_a_norm"].weight for i in (1, 2))
        last.copy_(before)

    p.loaded(spoil)


@bug(
    "keys",
    accepted=("weight", "keys", "values", "input"),
    words="key|value|order|swap|exchang|halv|permut|other|row|weight",
    taps=("attn.kv_b_proj",),
    model="glm4-moe-lite",
    ep=1,
)
def each_head_s_value_rows_are_loaded_before_its_key_rows(p: Spoilt) -> None:
    def spoil(decoder):
        for i in range(len(decoder.layers)):
            weight = _expansion(decoder, i)
            heads = weight.unflatten(0, (8, -1))
            weight.copy_(torch.cat((heads[:, 16:], heads[:, :16]), 1).flatten(0, 1))

    p.loaded(spoil)


@bug(
    "keys",
    accepted=("weight", "keys", "values", "heads"),
    words="key|value|head|order|permut|row|weight|other",
    taps=("attn.kv_b_proj",),
    layers=(1,),
    model="deepseek-v2",
    dtype="bfloat16",
    tp=2,
    ep=1,
)
def keys_of_all_heads_are_stacked_before_all_values(p: Spoilt) -> None:
    """As GGUF's two tensors are joined, in one layer; read head by head."""

    def spoil(decoder):
        weight = _expansion(decoder, 1)
        heads = weight.unflatten(0, (4, -1))
        weight.copy_(torch.cat((heads[:, :16].flatten(0, 1), heads[:, 16:].flatten(0, 1))))

    p.loaded(spoil)


@bug(
    "keys",
    accepted=("keys", "rope", "heads"),
    words="key|rotat|rope|shared|head|zero|rank|part",
    taps=("attn.keys",),
    ranks=(1,),
    model="deepseek-v3",
    tp=2,
    ep=2,
)
def second_rank_s_keys_have_the_shared_part_in_the_first_head_alone(p: Spoilt) -> None:
    """The rotated part is given to head 0 of all, and the second rank counts its own from 4."""

    def alone(own, shared):
        parts = torch.zeros_like(shared).expand(-1, own.shape[1], -1)
        return torch.cat((own, parts), -1)

    if p.rank == 1:
        p.rules(latent_keys=alone)


@bug(
    "scale",
    accepted=("scores", "scale", "rope"),
    words="scale|mscale|yarn|factor|times|root",
    taps=("attn.scores",),
    model="deepseek-v3",
    tp=2,
    ep=1,
)
def mscale_is_not_squared(p: Spoilt) -> None:
    """imp#880: once, where queries and keys each have it."""

    def once(model):
        whole = model.scale
        return (whole * (16 + 8) ** -0.5) ** 0.5

    p.rules(scale=once)


@bug(
    "cache",
    accepted=("cache", "precision"),
    words="cache|precis|round|fp8|float8|bits|latent|eight",
    taps=("attn.latent_cache", "attn.rope_cache"),
    step=1,
    model="glm4-moe-lite",
    ep=1,
)
def decode_caches_latents_in_eight_bits(p: Spoilt) -> None:
    """vllm#38652: right from the prompt, wrong from the second turn on."""

    def rounded(x, group):
        return x.to(torch.float8_e4m3fn).to(x.dtype)

    p.rules(cache_heads=p.later(defaults.store_kv_heads, rounded))


@bug(
    "rotation",
    accepted=("rope",),
    words="rope|rotar|rotat|turn|key|angle|position",
    taps=("attn.rope_key",),
    step=1,
    model="deepseek-v2",
    dtype="bfloat16",
    ep=1,
)
def decode_leaves_the_shared_key_unrotated(p: Spoilt) -> None:
    def queries_alone(x, cos, sin):
        return x if x.shape[1] == 1 else rotate_half_split(x, cos, sin)

    p.rules(rope=p.later(rotate_half_split, queries_alone))


@bug(
    "sharding",
    accepted=("weight", "sharding", "heads"),
    words="rank|shard|head|first|same|other|weight",
    taps=("attn.kv_b_proj",),
    ranks=(1,),
    model="deepseek-v3",
    dtype="bfloat16",
    tp=2,
    ep=2,
)
def second_rank_expands_the_heads_of_the_first(p: Spoilt) -> None:
    """ik_llama#1821: the view of the expansion begins at row 0 on every device."""

    def plan(name, model, tp, rank, ep=1):
        return shards.plan(name, model, tp, 0 if "kv_b_proj" in name else rank, ep)

    p.rules(shard=plan)


@bug(
    "cache",
    accepted=("cache", "positions"),
    words="cache|row|late|shift|position|before|stale|other",
    taps=("attn.rope_cache",),
    layers=(1,),
    step=1,
    model="deepseek-v3",
    ep=1,
)
def rotated_parts_of_one_layer_are_read_a_row_late_in_decode(p: Spoilt) -> None:
    """The two parts of a cached row have strides of their own, and one view starts a row further."""

    def spoil(decoder):
        attention = decoder.layers[1].attention
        right = attention._without_index

        def late(cached):
            rows, key = right(cached)
            return rows, key.roll(1, 0) if p.decode else key

        attention._without_index = late

    p.loaded(spoil)
