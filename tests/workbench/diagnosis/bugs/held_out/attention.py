"""Held out: attention: heads, scores, masks, the softmax, what is merged."""

from __future__ import annotations

import math

import torch
from torch import nn

from tests.workbench.diagnosis.bugs.bug import bug
from tests.workbench.diagnosis.bugs.patched import Patched, masked


def _by_map(mapping):
    """Query head h reads KV head `mapping(h, kv_heads, groups)`."""

    def keys(kv, groups):
        heads = [mapping(h, kv.shape[1], groups) for h in range(kv.shape[1] * groups)]
        return kv[:, heads]

    return keys


@bug(
    "attention",
    accepted=("heads",),
    words="KV head|head 0|first",
    taps=("attn.scores",),
    layers=(1,),
    model="llama",
)
def all_heads_read_the_first_kv_head(p: Patched) -> None:
    first = _by_map(lambda h, n, g: 0)
    p.attention((1,), keys=first, values=first)


@bug(
    "attention",
    accepted=("heads",),
    words="KV head|off by one|next|shift",
    taps=("attn.scores",),
    layers=(2,),
    model="mistral-full",
)
def kv_heads_off_by_one(p: Patched) -> None:
    ahead = _by_map(lambda h, n, g: min((h + 1) // g, n - 1))
    p.attention((2,), keys=ahead, values=ahead)


@bug(
    "attention", accepted=("heads",), words="KV head|tile|V|value", taps=("attn.context",), model="qwen2-tied"
)
def v_alone_tiled(p: Patched) -> None:
    p.attention(values=_by_map(lambda h, n, g: h % n))


@bug(
    "attention",
    accepted=("heads",),
    words="head",
    taps=("attn.scores",),
    heads=(5,),
    layers=(1,),
    model="llama",
)
def one_head_reads_another_kv_head(p: Patched) -> None:
    other = _by_map(lambda h, n, g: 0 if h == 5 else h // g)
    p.attention((1,), keys=other, values=other)


@bug(
    "attention",
    accepted=("heads",),
    words="head|KV|rank",
    taps=("attn.scores",),
    ranks=(1,),
    model="llama",
    tp=2,
)
def kv_heads_tiled_on_one_rank(p: Patched) -> None:
    if p.rank == 1:
        tiled = _by_map(lambda h, n, g: h % n)
        p.attention(keys=tiled, values=tiled)


@bug("attention", accepted=("heads",), words="head", taps=("attn.scores",), step=1, model="qwen3-kv4")
def kv_heads_tiled_in_decode(p: Patched) -> None:
    tiled = _by_map(lambda h, n, g: h % n if p.decode else h // g)
    p.attention(keys=tiled, values=tiled)


@bug(
    "attention",
    accepted=("scores", "mask", "positions"),
    words="ALiBi|bias|distance|linear",
    taps=("attn.scores",),
    model="llama",
)
def distances_added_to_the_scores(p: Patched) -> None:
    slopes = torch.tensor([2.0 ** -(h + 1) for h in range(8)])[None, :, None, None]

    def scale(s, scaling):
        keys, queries = s.shape[-1], s.shape[-2]
        distance = torch.arange(keys - queries, keys)[:, None] - torch.arange(keys)
        return s * scaling - slopes * distance

    p.attention(scale=scale)


@bug(
    "attention",
    accepted=("scores", "softmax"),
    words="log|length|position|scal|temperature",
    taps=("attn.scores",),
    model="qwen3",
)
def scores_scaled_by_the_logarithm_of_the_length(p: Patched) -> None:
    def scale(s, scaling):
        keys, queries = s.shape[-1], s.shape[-2]
        at = torch.arange(keys - queries + 1, keys + 1).float()[:, None]
        return s * scaling * (at.log() / math.log(8)).clamp(min=1)

    p.attention(scale=scale)


@bug(
    "attention",
    accepted=("softmax",),
    words="sink|denominator|\\+ ?1|one more|sum",
    taps=("attn.probs",),
    model="llama",
)
def softmax_off_by_one(p: Patched) -> None:
    def softmax(s):
        top = s.amax(-1, keepdim=True).clamp(min=0)
        e = (s - top).exp()
        return e / (e.sum(-1, keepdim=True) + (-top).exp())

    p.attention(softmax=softmax)


@bug(
    "attention",
    accepted=("softmax", "precision"),
    words="round|precis|bfloat16|bf16",
    taps=("attn.probs",),
    model="llama",
)
def softmax_in_bfloat16(p: Patched) -> None:
    p.attention(softmax=lambda s: s.bfloat16().softmax(-1).float())


@bug(
    "attention",
    accepted=("softmax",),
    words="dropout|zero|scal|random",
    taps=("attn.probs",),
    layers=(0, 1, 2),
    model="qwen2-tied",
)
def dropout_left_on(p: Patched) -> None:
    p.attention(softmax=lambda s: nn.functional.dropout(s.softmax(-1), 0.2, training=True))


@bug(
    "attention",
    accepted=("scores", "scale"),
    words="scale|sqrt|factor",
    taps=("attn.scores",),
    layers=(1,),
    model="llama",
)
def scale_missing_in_one_layer(p: Patched) -> None:
    p.attention((1,), scale=lambda s, scaling: s)


@bug(
    "attention",
    accepted=("scores", "scale"),
    words="scale|sqrt|factor|twice",
    taps=("attn.scores",),
    step=1,
    model="qwen2-tied",
)
def scaled_twice_in_decode(p: Patched) -> None:
    p.attention(scale=lambda s, scaling: s * scaling * (scaling if p.decode else 1))


@bug(
    "attention",
    accepted=("scores", "scale"),
    words="scale|factor|layer",
    taps=("attn.scores",),
    layers=(1, 2),
    model="llama",
)
def scaled_by_the_layer_number_too(p: Patched) -> None:
    for i in (1, 2):
        p.attention((i,), scale=lambda s, scaling, i=i: s * scaling / (i + 1))


@bug(
    "attention", accepted=("mask",), words="future|ahead|one|next|mask", taps=("attn.scores",), model="llama"
)
def the_next_token_is_seen(p: Patched) -> None:
    p.attention(allow=lambda allowed: allowed | allowed.roll(1, -1) & (torch.arange(allowed.shape[-1]) > 0))


def _causal(allowed):
    keys, queries = allowed.shape[-1], allowed.shape[-2]
    return (torch.arange(keys - queries, keys)[:, None] >= torch.arange(keys)).expand_as(allowed)


@bug(
    "attention",
    accepted=("mask",),
    words="window",
    taps=("attn.scores",),
    layers=(1,),
    model="mistral-window",
)
def window_ignored_in_one_layer(p: Patched) -> None:
    p.attention((1,), allow=_causal)


@bug(
    "attention", accepted=("mask",), words="window", taps=("attn.scores",), layers=(0,), model="qwen2-window"
)
def window_in_the_wrong_layer(p: Patched) -> None:
    def allow(allowed):
        keys, queries = allowed.shape[-1], allowed.shape[-2]
        distance = torch.arange(keys - queries, keys)[:, None] - torch.arange(keys)
        return allowed & (distance < 8)

    p.attention((0,), allow=allow)


@bug(
    "attention",
    accepted=("mask",),
    words="top.left|align|key 0|first|mask|current",
    taps=("attn.scores",),
    step=1,
    model="llama",
)
def triangle_aligned_at_the_top_left(p: Patched) -> None:
    def allow(allowed):
        keys, queries = allowed.shape[-1], allowed.shape[-2]
        return (torch.arange(queries)[:, None] >= torch.arange(keys)).expand_as(allowed)

    p.attention(allow=allow)


@bug(
    "attention",
    accepted=("mask",),
    words="finite|leak|value|-10|weak|mask",
    taps=("attn.scores",),
    model="llama",
)
def mask_of_minus_ten(p: Patched) -> None:
    p.attention(mask=lambda s, allowed: s - 10.0 * (~allowed))


@bug(
    "attention",
    accepted=("mask", "softmax"),
    words="after the softmax|multipl|normalis|normaliz|sum|mask",
    taps=("attn.scores", "attn.probs"),
    layers=(1,),
    model="qwen2-tied",
)
def mask_multiplied_after_the_softmax(p: Patched) -> None:
    held = {}

    def mask(s, allowed):
        held["allowed"] = allowed
        return s

    p.attention((1,), mask=mask, softmax=lambda s: s.softmax(-1) * held["allowed"])


@bug(
    "attention",
    accepted=("mask", "heads"),
    words="head|mask|future|causal",
    taps=("attn.scores",),
    heads=(4, 5, 6, 7),
    model="llama",
)
def mask_lost_in_half_of_the_heads(p: Patched) -> None:
    def mask(s, allowed):
        right = masked(s, allowed)
        return torch.cat([right[:, :4], s[:, 4:]], 1)

    p.attention(mask=mask)


@bug(
    "attention",
    accepted=("mask", "heads"),
    words="head|mask|future|causal",
    taps=("attn.scores",),
    heads=(7,),
    layers=(1,),
    model="qwen3",
)
def mask_lost_in_the_last_head(p: Patched) -> None:
    def mask(s, allowed):
        right = masked(s, allowed)
        return torch.cat([right[:, :7], s[:, 7:]], 1)

    p.attention((1,), mask=mask)


@bug(
    "attention",
    accepted=("mask",),
    words="chunk|block|mask|window",
    taps=("attn.scores",),
    layers=(0, 1, 2),
    model="llama",
)
def attention_within_chunks(p: Patched) -> None:
    def allow(allowed):
        keys, queries = allowed.shape[-1], allowed.shape[-2]
        at = torch.arange(keys - queries, keys)[:, None]
        return allowed & (at // 4 == torch.arange(keys) // 4)

    p.attention(allow=allow)


@bug(
    "attention",
    accepted=("mask",),
    words="prefix|bidirection|future|first|mask|causal",
    taps=("attn.scores",),
    model="mistral-full",
)
def prefix_seen_from_both_sides(p: Patched) -> None:
    def allow(allowed):
        keys = torch.arange(allowed.shape[-1])
        queries = torch.arange(allowed.shape[-1] - allowed.shape[-2], allowed.shape[-1])[:, None]
        return allowed | ((keys < 4) & (queries < 4))

    p.attention(allow=allow)


@bug(
    "attention",
    accepted=("heads", "context", "attention"),
    words="order|permut|merge|head|revers",
    taps=("attn.context",),
    layers=(2,),
    model="qwen3",
)
def heads_merged_in_reverse(p: Patched) -> None:
    p.attention((2,), merge=lambda c: c.flip(1).transpose(1, 2).contiguous())


@bug(
    "attention",
    accepted=("cache", "context", "attention"),
    words="K|key",
    taps=("attn.v_cache", "attn.context"),
    model="llama",
)
def keys_used_as_values(p: Patched) -> None:
    p.cache(read=lambda k, v: (k, k))


@bug(
    "attention",
    accepted=("context", "attention", "cache", "context"),
    words="current|last|own|missing|without",
    taps=("attn.context",),
    step=1,
    layers=(1,),
    model="qwen2-tied",
)
def the_new_value_is_left_out_in_decode(p: Patched) -> None:
    def context(probs, v):
        if p.decode:
            v = v.clone()
            v[:, :, -1] = 0
        return probs @ v

    p.attention((1,), context=context)


@bug(
    "attention",
    accepted=("scale", "context", "attention", "heads"),
    words="head|factor|times|scal|zero",
    taps=("attn.context",),
    heads=(0,),
    layers=(2,),
    model="llama",
)
def one_head_s_context_is_zero(p: Patched) -> None:
    def merge(c):
        c = c.clone()
        c[:, 0] = 0
        return c.transpose(1, 2).contiguous()

    p.attention((2,), merge=merge)


@bug(
    "attention",
    accepted=("scores", "scale", "softmax"),
    words="temperature|scale|factor|1\\.0",
    taps=("attn.scores",),
    model="qwen2-deep",
    layers=(5,),
)
def scale_rounded_in_the_last_layer(p: Patched) -> None:
    p.attention((5,), scale=lambda s, scaling: s * 0.3535)
