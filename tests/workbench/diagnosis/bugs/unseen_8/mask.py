"""Who sees whom: triangle, window, chunks."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tests.workbench.diagnosis.bugs.bug import bug
from tests.workbench.diagnosis.bugs.patched import Patched, masked


def _places(allowed: Tensor) -> tuple[Tensor, Tensor]:
    """Positions of the queries [T, 1] and of the keys [K]."""
    new, keys = allowed.shape[-2:]
    return torch.arange(keys - new, keys)[:, None], torch.arange(keys)


@bug(
    "mask",
    accepted=("mask",),
    words="mask|causal|triangle|top.left|first (key|token)|align|key",
    taps=("attn.scores",),
    ranks=(1,),
    step=1,
    model="qwen3-kv4",
    tp=2,
)
def rank_1_aligns_its_triangle_at_the_top_left_in_decode(p: Patched) -> None:
    """pytorch#108108, on the one worker that has no flash attention."""

    def allow(allowed):
        return allowed & (torch.arange(allowed.shape[-1]) == 0) if p.decode else allowed

    if p.rank == 1:
        p.attention(allow=allow)


@bug(
    "mask",
    accepted=("mask",),
    words="mask|chunk|causal|future|later|key",
    taps=("attn.scores",),
    model="mistral-full",
    dtype="bfloat16",
)
def mask_of_the_second_chunk_laid_over_the_first_keys(p: Patched) -> None:
    """candle#3236: chunks of eight tokens, and a mask of the size of the chunk alone."""

    def allow(allowed):
        if p.decode or p.new <= 8:
            return allowed
        queries, keys = _places(allowed)
        chunk = (keys >= p.new - 8) | (keys <= queries - 8)
        return torch.where(queries < 8, allowed, chunk)

    p.attention(allow=allow)


@bug(
    "mask",
    accepted=("mask", "overflow", "scores"),
    words="nan|inf|mask|zero",
    taps=("attn.scores",),
    step=1,
    model="llama",
    dtype="bfloat16",
)
def mask_of_the_decode_graph_is_zero_times_infinity(p: Patched) -> None:
    def mask(scores, allowed):
        return scores + (~allowed).to(scores.dtype) * -math.inf if p.decode else masked(scores, allowed)

    p.attention(mask=mask)


@bug(
    "mask",
    accepted=("mask",),
    words="window|mask|key|sliding",
    taps=("attn.scores",),
    layers=(2,),
    model="qwen2-window",
)
def window_of_one_layer_keeps_a_key_too_many(p: Patched) -> None:
    """transformers#39408: both bounds of (W, W) are inclusive."""

    def allow(allowed):
        queries, keys = _places(allowed)
        return allowed | (keys == queries - 8)

    p.attention((2,), allow=allow)


@bug(
    "mask",
    accepted=("mask", "cache"),
    words="mask|key|old|past|prompt|length|first|cache",
    taps=("attn.scores",),
    step=2,
    model="qwen2-kv8",
    dtype="bfloat16",
    tp=4,
)
def rollback_of_a_draft_forgets_the_whole_cache(p: Patched) -> None:
    """aprender#2014: the length is set to zero in place of to what was accepted; the tokens after it are seen."""

    def allow(allowed):
        _, keys = _places(allowed)
        return allowed & (keys > len(keys) - p.step) if p.step >= 2 else allowed

    p.attention(allow=allow)
