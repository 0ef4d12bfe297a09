"""Who may see whom: chunks, windows, padding, lengths that are out of date."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tests.workbench.diagnosis.bugs.bug import bug
from tests.workbench.diagnosis.bugs.patched import Patched, masked

SCORES = ("attn.scores", "attn.probs")


def _places(p: Patched, allowed: Tensor) -> tuple[Tensor, Tensor]:
    """Positions of the queries [T, 1] and of the keys [K]."""
    return torch.arange(p.past, p.past + p.new)[:, None], torch.arange(allowed.shape[-1])


@bug("mask", accepted=("mask",), words="mask|chunk|key|earlier|see", taps=SCORES, model="llama")
def second_chunk_sees_only_itself(p: Patched) -> None:
    """The prompt is read in chunks of 8, each with a square mask of its own."""

    def allow(allowed: Tensor) -> Tensor:
        queries, keys = _places(p, allowed)
        return allowed if p.decode else allowed & (queries // 8 == keys // 8)

    p.attention(allow=allow)


@bug("mask", accepted=("mask",), words="window|mask|key", taps=SCORES, step=1, model="mistral-window")
def window_loses_the_block_at_its_edge(p: Patched) -> None:
    """Pages of 4 positions: decode reads whole pages, and the window is rounded down to them."""

    def allow(allowed: Tensor) -> Tensor:
        queries, keys = _places(p, allowed)
        first = -(-(queries - 7).clamp(min=0) // 4) * 4
        return allowed & (keys >= first) if p.decode else allowed

    p.attention(allow=allow)


@bug(
    "mask",
    accepted=("mask", "softmax"),
    words="sum|padd|mask|normal|denominator|sink|key",
    taps=("attn.probs",),
    model="qwen2-tied",
)
def empty_keys_of_the_bucket_take_their_share(p: Patched) -> None:
    """Keys are padded with zeros to a multiple of 16, which score 0 and which nothing masks."""

    def softmax(scores: Tensor) -> Tensor:
        top = scores.amax(-1, keepdim=True).clamp(min=0)
        shares = (scores - top).exp()
        return shares / (shares.sum(-1, keepdim=True) + -scores.shape[-1] % 16 * (-top).exp())

    p.attention(softmax=softmax)


@bug("mask", accepted=("mask",), words="window|mask", taps=SCORES, model="qwen2-window")
def max_window_layers_read_the_other_way_round(p: Patched) -> None:
    """Windows in the layers before the number instead of in those from it on."""

    def allow(allowed: Tensor, windowed: bool) -> Tensor:
        queries, keys = _places(p, allowed)
        return ((keys <= queries) & (keys > queries - (8 if windowed else 1000)))[None, None]

    for i, _ in p.layers():
        p.attention((i,), allow=lambda allowed, windowed=i == 0: allow(allowed, windowed))


@bug(
    "mask",
    accepted=("mask", "cache"),
    words="mask|length|key|new|last|own",
    taps=SCORES,
    step=2,
    model="qwen3",
)
def length_captured_with_the_first_decode_step(p: Patched) -> None:
    """A recorded graph keeps the number of keys of its first replay."""

    def allow(allowed: Tensor) -> Tensor:
        _, keys = _places(p, allowed)
        return allowed & (keys <= p.model.prompt_lengths[p.seq]) if p.decode else allowed

    p.attention(allow=allow)


@bug("mask", accepted=("mask",), words="mask|causal|future|later", taps=SCORES, heads=(7,), model="llama")
def last_head_falls_out_of_the_masked_tile(p: Patched) -> None:
    def mask(scores: Tensor, allowed: Tensor) -> Tensor:
        return torch.cat((masked(scores[:, :7], allowed), scores[:, 7:]), 1)

    p.attention(mask=mask)


@bug(
    "mask",
    accepted=("mask", "cache"),
    words="mask|own|last|new|key|length",
    taps=SCORES,
    step=1,
    model="qwen2-tied",
)
def decode_attends_before_its_own_key_is_counted(p: Patched) -> None:
    def allow(allowed: Tensor) -> Tensor:
        _, keys = _places(p, allowed)
        return allowed & (keys < p.past) if p.decode else allowed

    p.attention(allow=allow)


@bug("mask", accepted=("mask",), words="mask", taps=SCORES, layers=(2,), model="llama")
def mask_multiplied_into_the_scores_of_one_layer(p: Patched) -> None:
    p.attention((2,), mask=lambda scores, allowed: scores * allowed)


@bug("mask", accepted=("mask",), words="mask|own|itself|diagonal|key", taps=SCORES, model="qwen3")
def triangle_without_its_diagonal(p: Patched) -> None:
    """The first token sees nothing, and its softmax is 0 / 0."""

    def mask(scores: Tensor, allowed: Tensor) -> Tensor:
        queries, keys = _places(p, allowed)
        return scores.masked_fill(~(allowed & (keys < queries)), -math.inf)

    p.attention(mask=mask)
