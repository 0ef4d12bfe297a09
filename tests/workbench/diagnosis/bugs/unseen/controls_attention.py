"""Harmless changes of attention, rotation, mask and cache that a correct engine may have."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.workbench.diagnosis.bugs.bug import control
from tests.workbench.diagnosis.bugs.patched import Patched, softmax


@control("attention", model="llama")
def root_of_the_scale_on_both_sides(p: Patched) -> None:
    root = 8**-0.25
    p.attention(
        product=lambda q, k: (q * root) @ (k * root).transpose(2, 3), scale=lambda scores, scaling: scores
    )


@control("attention", model="mistral-full")
def attention_by_online_softmax(p: Patched) -> None:
    """In blocks of 4 keys, with the sums rescaled whenever the maximum grows."""
    held: dict[str, Tensor] = {}

    def keep(scores: Tensor) -> Tensor:
        held["scores"] = scores
        return softmax(scores)

    def context(probs: Tensor, v: Tensor) -> Tensor:
        scores = held["scores"]
        top = torch.full_like(scores[..., :1], torch.finfo(scores.dtype).min)
        total, out = torch.zeros_like(top), torch.zeros_like(probs @ v)
        for block, rows in zip(scores.split(4, -1), v.split(4, 2), strict=True):
            higher = torch.maximum(top, block.amax(-1, keepdim=True))
            shares, rescale = (block - higher).exp(), (top - higher).exp()
            total, out, top = (
                total * rescale + shares.sum(-1, keepdim=True),
                out * rescale + shares @ rows,
                higher,
            )
        return out / total

    p.attention(softmax=keep, context=context)


@control("attention", model="qwen3")
def maximum_taken_off_the_scores_already(p: Patched) -> None:
    p.attention(scale=lambda scores, scaling: scores * scaling - (scores * scaling).amax(-1, keepdim=True))


@control("attention", model="qwen2-tied")
def exponential_of_two_with_its_logarithm(p: Patched) -> None:
    def base_two(scores: Tensor) -> Tensor:
        scaled = scores * 1.4426950408889634
        shares = (scaled - scaled.amax(-1, keepdim=True)).exp2()
        return shares / shares.sum(-1, keepdim=True)

    p.attention(softmax=base_two)


@control("heads", model="qwen3")
def queries_of_a_group_in_one_product(p: Patched) -> None:
    """[kv_heads, groups * T, D] against each KV head once, nothing expanded."""

    def product(q: Tensor, k: Tensor) -> Tensor:
        grouped = q.unflatten(1, (k.shape[1], -1)).flatten(2, 3)
        return (grouped @ k.transpose(2, 3)).unflatten(2, (-1, q.shape[2])).flatten(1, 2)

    def context(probs: Tensor, v: Tensor) -> Tensor:
        grouped = probs.unflatten(1, (v.shape[1], -1)).flatten(2, 3)
        return (grouped @ v).unflatten(2, (-1, probs.shape[2])).flatten(1, 2)

    p.attention(keys=lambda k, groups: k, values=lambda v, groups: v, product=product, context=context)


@control("heads", model="llama")
def query_heads_of_a_group_in_another_order(p: Patched) -> None:
    """The two query heads of each KV head change places, in q's rows and o's columns."""
    rows = torch.arange(64).view(4, 2, 8).flip(1).flatten()
    for _, layer in p.layers():
        p.weight(layer.self_attn.q_proj, lambda weight: weight[rows])
        p.weight(layer.self_attn.o_proj, lambda weight: weight[:, rows])


@control("mask", model="qwen2-tied")
def masked_with_minus_ten_thousand(p: Patched) -> None:
    p.attention(mask=lambda scores, allowed: scores + (~allowed).to(scores.dtype) * -1e4)


@control("rope", model="llama")
def pairs_turned_as_complex_numbers(p: Patched) -> None:
    def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        half = x.shape[-1] // 2
        pairs = torch.complex(*(one.contiguous() for one in x.chunk(2, -1)))
        pairs = pairs * torch.complex(
            cos[:, None, :, :half].contiguous(), sin[:, None, :, :half].contiguous()
        )
        return torch.cat((pairs.real, pairs.imag), -1)

    p.rotate(lambda apply, q, k, cos, sin: (turned(q, cos, sin), turned(k, cos, sin)))


@control("rope", model="qwen3")
def angles_computed_in_float64(p: Patched) -> None:
    def table(rotary: Any, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        inverse = 1e6 ** -(torch.arange(0, 16, 2, dtype=torch.float64) / 16)
        angles = positions[..., None].double() * torch.cat((inverse, inverse))
        return angles.cos().to(x.dtype), angles.sin().to(x.dtype)

    p.angles(table)


@control("cache", model="llama")
def keys_cached_scaled_and_read_back(p: Patched) -> None:
    """A scale that is a power of two, put on when a row is written and taken off where it is read."""
    p.cache(written=lambda k, v: (k / 8, v / 8), read=lambda k, v: (k * 8, v * 8))
