"""Attention: the scale, the heads, the scores, the softmax, the context."""

from __future__ import annotations

import math

import torch

from tests.workbench.diagnosis.bugs.bug import bug
from tests.workbench.diagnosis.bugs.patched import Patched, softmax


@bug(
    "attention",
    accepted=("scores", "scale"),
    words="scale|sqrt|factor|times",
    taps=("attn.scores",),
    model="llama-yarn",
)
def yarn_factor_squared_into_the_scale_too(p: Patched) -> None:
    """One family has the factor in its tables, another squared in its scale: both are done."""
    factor = 0.1 * math.log(8) + 1
    p.attention(scale=lambda s, scaling: s * scaling * factor**2)


@bug(
    "attention",
    accepted=("context", "attention", "softmax"),
    words="split|part|weight|merge|join|sum|context",
    taps=("attn.context",),
    model="llama",
)
def prefix_and_suffix_merged_by_transposed_weights(p: Patched) -> None:
    """Weights of [heads, tokens] written, read as [tokens, heads]."""

    def context(probs, v):
        if probs.shape[2] == 1:
            return probs @ v
        near = probs[..., :4].sum(-1, keepdim=True)
        far = 1 - near
        first = probs[..., :4] @ v[:, :, :4] / near
        second = probs[..., 4:] @ v[:, :, 4:] / far.clamp(min=1e-9)
        wrong = near.transpose(1, 2).reshape(near.shape)
        return wrong * first + (1 - wrong) * second

    p.attention(context=context)


@bug(
    "attention",
    accepted=("heads", "context", "attention"),
    words="head|order|group|permut",
    taps=("attn.context",),
    step=1,
    model="qwen3-kv4",
)
def packed_groups_unpacked_in_the_other_order(p: Patched) -> None:
    """Decode takes the queries of a group as rows, and writes group by KV head back as KV head by group."""

    def context(probs, v):
        out = probs @ v
        return out.unflatten(1, (4, 2)).transpose(1, 2).flatten(1, 2) if p.decode else out

    p.attention(context=context)


@bug(
    "attention",
    accepted=("softmax", "mask"),
    words="mask|zero|highest|top|keys|left out|only|few",
    taps=("attn.probs",),
    step=1,
    model="llama-mha",
    tp=2,
)
def sparse_attention_left_on_in_decode(p: Patched) -> None:
    """Only the four highest scores of each head take part."""

    def sparse(s):
        if not p.decode:
            return softmax(s)
        least = s.topk(4, dim=-1).values[..., -1:]
        return softmax(s.masked_fill(s < least, -math.inf))

    p.attention(softmax=sparse)


@bug(
    "attention",
    accepted=("scores", "attention", "input", "positions"),
    words="quer|row|token|shift|one",
    taps=("attn.scores",),
    model="llama",
    tp=2,
)
def queries_of_the_second_sequence_read_one_row_late(p: Patched) -> None:
    """The packed batch's offsets of the queries are one too large behind the first sequence."""

    def product(q, k):
        if p.seq == 1 and q.shape[2] > 1:
            q = torch.cat([q[:, :, 1:], q[:, :, -1:]], 2)
        return q @ k.transpose(2, 3)

    p.attention(product=product)


@bug(
    "attention",
    accepted=("scores", "scale", "sharding"),
    words="scale|sqrt|factor|times|twice|head_dim",
    taps=("attn.scores",),
    ranks=(1,),
    model="mistral-full",
    dtype="bfloat16",
    tp=2,
)
def rank_1_scales_its_scores_twice(p: Patched) -> None:
    """Its queries come scaled from a wrapper, and its kernel does it again."""
    if p.rank == 1:
        p.attention(scale=lambda s, scaling: s * scaling * scaling)
