"""Attention and its mask."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.workbench.diagnosis.bugs.bug import bug
from tests.workbench.diagnosis.bugs.patched import Patched, repeat


def _places(allowed: Tensor) -> tuple[Tensor, Tensor]:
    """Positions of the queries [T, 1] and of the keys [K]."""
    new, keys = allowed.shape[-2:]
    return torch.arange(keys - new, keys)[:, None], torch.arange(keys)


@bug(
    "attention",
    accepted=("heads", "scores"),
    words="KV head|head|group|repeat",
    taps=("attn.scores",),
    heads=(6, 7),
    step=1,
    model="llama",
    dtype="bfloat16",
)
def last_group_of_queries_decodes_with_the_first_kv_head(p: Patched) -> None:
    def expand(kv, groups):
        return repeat(kv[:, [0, 1, 2, 0]] if p.decode else kv, groups)

    p.attention(keys=expand, values=expand)


@bug(
    "attention",
    accepted=("context", "attention"),
    words="sequence|context|other|row|token|attention",
    taps=("attn.context",),
    model="qwen3-kv4",
)
def second_prompt_is_given_the_context_of_the_first(p: Patched) -> None:
    """Outputs of a packed prefill are cut out from row 0 for each sequence."""
    for i, _ in p.layers():
        held = {}

        def context(probs, v, held=held):
            out = probs @ v
            if p.decode:
                return out
            held[p.seq] = out
            return held[0][:, :, : out.shape[2]]

        p.attention([i], context=context)


@bug(
    "mask",
    accepted=("mask",),
    words="mask|first|key|sink|token",
    taps=("attn.scores",),
    model="qwen2-tied",
)
def padding_of_the_second_prompt_masked_one_token_too_far(p: Patched) -> None:
    """The first real token behind the padding on the left is hidden from those after it."""

    def allow(allowed):
        queries, keys = _places(allowed)
        return allowed & ~((keys == 0) & (queries > 0)) if p.seq == 1 else allowed

    p.attention(allow=allow)


@bug(
    "mask",
    accepted=("mask",),
    words="mask|itself|own|diagonal|key|last|current",
    taps=("attn.scores",),
    model="llama",
    tp=2,
)
def second_chunk_of_the_prompt_ends_a_key_early(p: Patched) -> None:
    """Tokens from the eighth on see as many keys as stand before them."""

    def allow(allowed):
        queries, keys = _places(allowed)
        return allowed if p.decode else allowed & ~((queries >= 8) & (keys == queries))

    p.attention(allow=allow)


@bug(
    "mask",
    accepted=("mask",),
    words="mask|future|causal|bidirectional|later",
    taps=("attn.scores",),
    model="mistral-full",
    dtype="bfloat16",
)
def first_sequence_of_the_batch_alone_is_masked(p: Patched) -> None:
    p.attention(allow=lambda allowed: torch.ones_like(allowed) if p.seq == 1 else allowed)


@bug(
    "mask",
    accepted=("mask",),
    words="mask|first|key|padd|token|old",
    taps=("attn.scores",),
    step=1,
    model="qwen3",
)
def decode_hides_padding_that_the_cache_does_not_hold(p: Patched) -> None:
    """The second sequence's prompt was cached without the padding on its left."""

    def allow(allowed):
        _, keys = _places(allowed)
        return allowed & (keys >= 3) if p.decode and p.seq == 1 else allowed

    p.attention(allow=allow)


@bug(
    "mask",
    accepted=("mask", "cache"),
    words="mask|page|block|key|last|own|new|current|length|short",
    taps=("attn.scores",),
    step=1,
    model="llama-bias",
)
def decode_sees_full_pages_alone(p: Patched) -> None:
    """Of four slots; the number of pages is rounded down."""

    def allow(allowed):
        _, keys = _places(allowed)
        return allowed & (keys < len(keys) // 4 * 4) if p.decode else allowed

    p.attention(allow=allow)
