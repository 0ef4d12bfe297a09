"""Attention and its mask."""

from __future__ import annotations

import torch

from tests.workbench.diagnosis.bugs.bug import bug
from tests.workbench.diagnosis.bugs.patched import Patched


def _places(allowed):
    """Positions of the queries [T, 1] and of the keys [K]."""
    new, keys = allowed.shape[-2:]
    return torch.arange(keys - new, keys)[:, None], torch.arange(keys)


@bug(
    "attention",
    accepted=("scores", "scale"),
    words="scale|factor|sqrt|width|head_dim|times",
    taps=("attn.scores",),
    model="llama",
    dtype="bfloat16",
)
def scaled_by_the_root_of_the_whole_width(p: Patched) -> None:
    """karpathy/ng-video-lecture#6."""
    p.attention(scale=lambda s, scaling: s * 64**-0.5)


@bug(
    "attention",
    accepted=("scores", "scale"),
    words="scale|factor|sqrt|head_dim|times",
    taps=("attn.scores",),
    step=1,
    model="qwen3",
    dtype="bfloat16",
)
def fallback_of_decode_does_not_scale(p: Patched) -> None:
    """mlc-llm#3426."""
    p.attention(scale=lambda s, scaling: s if p.decode else s * scaling)


@bug(
    "attention",
    accepted=("softmax", "mask"),
    words="normalis|normaliz|sum|denominator|padd|page|extra|less than|sink|zero|slot",
    taps=("attn.probs",),
    step=1,
    model="mistral-full",
)
def empty_slots_of_the_last_page_take_part_in_the_softmax(p: Patched) -> None:
    """Pages of sixteen slots; the keys of the empty ones are zeros, and so are their scores."""

    def softmax(scores):
        if not p.decode:
            return scores.softmax(-1)
        empty = -scores.shape[-1] % 16
        return torch.nn.functional.pad(scores, (0, empty)).softmax(-1)[..., : scores.shape[-1]]

    p.attention(softmax=softmax)


@bug(
    "mask",
    accepted=("mask",),
    words="window",
    taps=("attn.scores",),
    layers=(0,),
    model="qwen2-window",
)
def window_also_in_the_layers_before_max_window_layers(p: Patched) -> None:
    def allow(allowed):
        queries, keys = _places(allowed)
        return allowed & (queries - keys < 8)

    p.attention((0,), allow=allow)


@bug(
    "mask",
    accepted=("mask", "cache"),
    words="mask|itself|own|diagonal|current|new|last|length|short|key",
    taps=("attn.scores",),
    step=1,
    model="llama",
    dtype="bfloat16",
    tp=4,
)
def length_of_decode_leaves_out_the_new_token(p: Patched) -> None:
    def allow(allowed):
        _, keys = _places(allowed)
        return allowed & (keys < len(keys) - 1) if p.decode else allowed

    p.attention(allow=allow)


@bug(
    "mask",
    accepted=("mask",),
    words="mask|chunk|key|first|align|triang|token|window|recent|causal",
    taps=("attn.scores",),
    model="llama-mha",
)
def mask_of_the_second_chunk_has_no_columns_for_the_first(p: Patched) -> None:
    """candle#3236: chunks of eight; its triangle lies over the first keys, as many as there are new tokens."""

    def allow(allowed):
        queries, keys = _places(allowed)
        return allowed if p.decode else allowed & ((queries < 8) | (keys <= queries - 8))

    p.attention(allow=allow)


@bug(
    "mask",
    accepted=("mask",),
    words="mask|future|causal|bidirectional|later",
    taps=("attn.scores",),
    model="qwen2-untied",
    dtype="bfloat16",
)
def boolean_mask_added_to_the_scores_as_a_number(p: Patched) -> None:
    p.attention(mask=lambda s, allowed: s + allowed.to(s.dtype))
