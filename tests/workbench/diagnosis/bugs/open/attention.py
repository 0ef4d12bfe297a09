"""Attention: heads, scores, masks, the softmax, what is merged."""

from __future__ import annotations

import math

import torch

from tests.workbench.diagnosis.bugs.bug import bug
from tests.workbench.diagnosis.bugs.patched import Patched


def _by_map(mapping):
    """Query head h reads KV head `mapping(h, kv_heads, groups)`."""

    def keys(kv, groups):
        heads = [mapping(h, kv.shape[1], groups) for h in range(kv.shape[1] * groups)]
        return kv[:, heads]

    return keys


@bug(
    "attention",
    accepted=("heads",),
    words="tile|h % |repeat|interleav|order|KV head",
    taps=("attn.scores",),
    model="llama",
)
def kv_heads_tiled(p: Patched) -> None:
    tiled = _by_map(lambda h, n, g: h % n)
    p.attention(keys=tiled, values=tiled)


@bug(
    "attention",
    accepted=("heads",),
    words="KV head|revers|order",
    taps=("attn.scores",),
    model="qwen2-untied",
)
def kv_heads_reversed(p: Patched) -> None:
    backward = _by_map(lambda h, n, g: n - 1 - h // g)
    p.attention(keys=backward, values=backward)


@bug(
    "attention",
    accepted=("heads",),
    words="KV head|twice|group|repeat",
    taps=("attn.scores",),
    model="qwen2-tied",
)
def kv_heads_divided_twice(p: Patched) -> None:
    twice = _by_map(lambda h, n, g: h // g**2)
    p.attention(keys=twice, values=twice)


@bug(
    "attention", accepted=("scores", "softmax"), words="cap|tanh", taps=("attn.scores",), model="llama-sharp"
)
def scores_capped(p: Patched) -> None:
    p.attention(scale=lambda s, scaling: 20 * torch.tanh(s * scaling / 20))


@bug(
    "attention",
    accepted=("scores", "softmax"),
    words="cap|tanh",
    taps=("attn.scores",),
    layers=(1,),
    model="qwen3",
)
def scores_capped_in_one_layer(p: Patched) -> None:
    p.attention((1,), scale=lambda s, scaling: 50 * torch.tanh(s * scaling / 50))


@bug(
    "attention",
    accepted=("softmax",),
    words="axis|dim|heads|queries|keys",
    taps=("attn.probs",),
    layers=(1,),
    model="qwen2-tied",
)
def softmax_over_the_heads(p: Patched) -> None:
    p.attention((1,), softmax=lambda s: s.softmax(1))


@bug(
    "attention",
    accepted=("softmax",),
    words="base|exp2|2\\^|power|temperature|log|scale",
    taps=("attn.probs",),
    model="mistral-full",
)
def softmax_to_the_base_two(p: Patched) -> None:
    p.attention(softmax=lambda s: (s * math.log(2)).softmax(-1))


@bug(
    "attention",
    accepted=("softmax",),
    words="normalis|normaliz|sum|denominator|divid",
    taps=("attn.probs",),
    layers=(2,),
    model="llama",
)
def softmax_never_divided(p: Patched) -> None:
    p.attention((2,), softmax=lambda s: (s - s.amax(-1, keepdim=True)).exp())


@bug(
    "attention",
    accepted=("scores", "scale"),
    words="scale|sqrt|factor|head_dim",
    taps=("attn.scores",),
    model="qwen3",
)
def scaled_by_the_dimension_itself(p: Patched) -> None:
    p.attention(scale=lambda s, scaling: s / 16)


@bug(
    "attention",
    accepted=("scores", "scale", "heads"),
    words="scale|factor|head",
    taps=("attn.scores",),
    heads=(6,),
    model="qwen2-tied",
)
def one_head_not_scaled(p: Patched) -> None:
    def scale(s, scaling):
        s = s * scaling
        s[:, 6] /= scaling
        return s

    p.attention(scale=scale)


@bug(
    "attention",
    accepted=("mask",),
    words="mask|future|causal",
    taps=("attn.scores",),
    layers=(2,),
    model="llama",
)
def no_mask_in_the_last_layer(p: Patched) -> None:
    p.attention((2,), allow=lambda allowed: allowed | True)


@bug(
    "attention",
    accepted=("mask",),
    words="itself|own|diagonal|current|strict|mask",
    taps=("attn.scores",),
    model="qwen2-tied",
)
def a_token_does_not_see_itself(p: Patched) -> None:
    def allow(allowed):
        keys, queries = allowed.shape[-1], allowed.shape[-2]
        own = torch.arange(keys) == torch.arange(keys - queries, keys)[:, None]
        first = (torch.arange(keys - queries, keys) == 0)[:, None]
        return allowed & (~own | first)

    p.attention(allow=allow)


@bug(
    "attention",
    accepted=("mask",),
    words="window",
    taps=("attn.scores",),
    layers=(1, 2),
    model="qwen2-window",
)
def window_one_too_narrow(p: Patched) -> None:
    def allow(allowed):
        keys, queries = allowed.shape[-1], allowed.shape[-2]
        distance = torch.arange(keys - queries, keys)[:, None] - torch.arange(keys)
        return allowed & (distance < 7)

    p.attention((1, 2), allow=allow)


def _causal(allowed):
    keys, queries = allowed.shape[-1], allowed.shape[-2]
    return (torch.arange(keys - queries, keys)[:, None] >= torch.arange(keys)).expand_as(allowed)


@bug("attention", accepted=("mask",), words="window", taps=("attn.scores",), step=1, model="mistral-window")
def window_ignored_in_decode(p: Patched) -> None:
    p.attention(allow=lambda allowed: _causal(allowed) if p.decode else allowed)


@bug(
    "attention",
    accepted=("mask",),
    words="first|mask|key 0|lost|position 0",
    taps=("attn.scores",),
    model="qwen3",
)
def first_token_masked(p: Patched) -> None:
    def allow(allowed):
        allowed = allowed.clone()
        allowed[..., 1:, 0] = False
        if p.decode:
            allowed[..., 0] = False
        return allowed

    p.attention(allow=allow)


@bug(
    "attention",
    accepted=("heads", "context", "attention"),
    words="order|permut|transpos|merge|layout|head",
    taps=("attn.context",),
    model="llama",
)
def heads_merged_without_transposing(p: Patched) -> None:
    p.attention(merge=lambda c: c.reshape(1, c.shape[2], c.shape[1], c.shape[3]))


@bug(
    "attention",
    accepted=("heads", "context", "attention"),
    words="order|permut|transpos|merge|layout|head|interleav",
    taps=("attn.context",),
    layers=(1,),
    model="qwen2-tied",
)
def heads_merged_dimension_first(p: Patched) -> None:
    p.attention((1,), merge=lambda c: c.permute(0, 2, 3, 1).reshape(1, c.shape[2], c.shape[1], c.shape[3]))
