"""Attention kernels: padded heads, windows cut by tiles, split keys, chunks, grouped queries."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tests.workbench.diagnosis.bugs.bug import bug
from tests.workbench.diagnosis.bugs.patched import Patched


def _places(allowed: Tensor) -> tuple[Tensor, Tensor]:
    """The positions of queries [T, 1] and of keys [K]."""
    queries, keys = allowed.shape[-2:]
    return torch.arange(keys - queries, keys)[:, None], torch.arange(keys)


@bug(
    "attention",
    accepted=("scores", "scale"),
    words="scale|sqrt|factor|head_dim|temperature",
    taps=("attn.scores",),
    model="llama",
    dtype="bfloat16",
    tp=2,
)
def scale_of_the_head_dim_the_kernel_pads_to(p: Patched) -> None:
    p.attention(scale=lambda scores, _: scores * 16**-0.5)


@bug(
    "mask",
    accepted=("mask",),
    words="window|block|tile|too (many|wide)|wider",
    taps=("attn.scores",),
    model="mistral-window",
)
def window_keeps_the_whole_tile_at_its_edge(p: Patched) -> None:
    """Tiles of four keys that lie partly in the window are not masked inside."""

    def allow(allowed: Tensor) -> Tensor:
        query, key = _places(allowed)
        return allowed if p.decode else ((query >= key) & (query - (key | 3) < 8)).expand_as(allowed)

    p.attention(allow=allow)


@bug(
    "mask",
    accepted=("mask",),
    words="window|sink|first|key 0|position 0|begin",
    taps=("attn.scores",),
    model="mistral-window",
)
def first_tokens_kept_beyond_the_window(p: Patched) -> None:
    """Attention sinks as in StreamingLLM, which this model was not trained with."""

    def allow(allowed: Tensor) -> Tensor:
        query, key = _places(allowed)
        return allowed if p.decode else allowed | ((query >= key) & (key < 2))

    p.attention(allow=allow)


@bug(
    "mask",
    accepted=("mask",),
    words="mask|future|causal|chunk|later|ahead",
    taps=("attn.scores",),
    model="llama",
    tp=2,
)
def second_chunk_of_the_prompt_sees_its_own_future(p: Patched) -> None:
    """The length of the keys is that of the sequence, not of what comes before the chunk's row."""

    def allow(allowed: Tensor) -> Tensor:
        return allowed if p.decode else allowed | (_places(allowed)[0] >= 8)

    p.attention(allow=allow)


@bug(
    "attention",
    accepted=("context", "attention", "softmax"),
    words="split|block|part|merg|join|weigh|log|base|combin|context|value",
    taps=("attn.context",),
    step=1,
    model="qwen3",
)
def splits_joined_by_a_base_two_logarithm_taken_for_natural(p: Patched) -> None:
    """The shared prefix of eight keys and the rest, each with log2 of its sum of exponentials."""

    def context(probs: Tensor, v: Tensor) -> Tensor:
        if not p.decode or probs.shape[-1] <= 8:
            return probs @ v
        parts = [(probs[..., :8], v[:, :, :8]), (probs[..., 8:], v[:, :, 8:])]
        sums = [part.sum(-1, keepdim=True) for part, _ in parts]
        weights = [total ** math.log2(math.e) for total in sums]
        joined = [
            w * ((part / total) @ rows) for w, total, (part, rows) in zip(weights, sums, parts, strict=True)
        ]
        return (joined[0] + joined[1]) / (weights[0] + weights[1])

    p.attention(context=context)


@bug(
    "heads",
    accepted=("heads",),
    words="KV head|group|repeat|order|h //|divi",
    taps=("attn.scores",),
    model="llama",
    dtype="bfloat16",
)
def groups_counted_from_a_padded_number_of_heads(p: Patched) -> None:
    """Eight query heads were padded to twelve: three to a KV head in place of two."""

    def heads(kv: Tensor, groups: int) -> Tensor:
        return kv[:, [h // 3 for h in range(kv.shape[1] * groups)]]

    p.attention(keys=heads, values=heads)


@bug(
    "heads",
    accepted=("heads", "scores"),
    words="head|group|same|repeat|copy",
    taps=("attn.scores",),
    heads=(1, 3, 5, 7),
    model="mistral-full",
)
def second_query_of_each_group_takes_the_first_one_s_scores(p: Patched) -> None:
    p.attention(product=lambda q, k: (q @ k.transpose(2, 3))[:, [0, 0, 2, 2, 4, 4, 6, 6]])


@bug(
    "attention",
    accepted=("context", "attention"),
    words="zero|row|token|tile|last|never|missing",
    taps=("attn.context",),
    layers=(1,),
    model="qwen2-tied",
)
def last_tile_of_queries_never_stored(p: Patched) -> None:
    def merge(context: Tensor) -> Tensor:
        rows = context.transpose(1, 2).contiguous()
        if not p.decode:
            rows[:, rows.shape[1] // 4 * 4 :] = 0
        return rows

    p.attention((1,), merge=merge)
