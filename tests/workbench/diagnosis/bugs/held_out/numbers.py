"""Held out: naN, overflow, low precision."""

from __future__ import annotations

import math

import torch
from torch import nn

from tests.workbench.diagnosis.bugs.bug import bug
from tests.workbench.diagnosis.bugs.patched import Patched


@bug(
    "numbers",
    accepted=("mask", "overflow"),
    words="NaN|0 ?[*·×x] ?inf|inf",
    taps=("attn.scores",),
    layers=(1,),
    model="llama",
)
def mask_of_zero_times_infinity(p: Patched) -> None:
    p.attention((1,), mask=lambda s, allowed: s + (~allowed).float() * -math.inf)


@bug(
    "numbers",
    accepted=("mask", "softmax", "overflow"),
    words="NaN|masked|row|no key|all|itself|diagonal",
    taps=("attn.scores", "attn.probs"),
    model="qwen2-tied",
)
def first_row_wholly_masked(p: Patched) -> None:
    def mask(s, allowed):
        keys, queries = s.shape[-1], s.shape[-2]
        own = torch.arange(keys) == torch.arange(keys - queries, keys)[:, None]
        return s.masked_fill(~(allowed & ~own), -math.inf)

    p.attention(mask=mask, softmax=lambda s: s.softmax(-1))


@bug(
    "numbers",
    accepted=("overflow", "softmax"),
    words="overflow|maximum|inf|float16|range|NaN",
    taps=("attn.probs",),
    model="llama-sharp",
    dtype="float16",
)
def softmax_without_its_maximum_in_half(p: Patched) -> None:
    def softmax(s):
        e = s.exp()
        return e / e.sum(-1, keepdim=True)

    p.attention(softmax=softmax)


@bug(
    "numbers",
    accepted=("overflow", "scores"),
    words="overflow|inf|float16|range|NaN",
    taps=("attn.scores",),
    layers=(1,),
    model="llama-sharp",
    dtype="float16",
)
def product_overflows_before_it_is_scaled(p: Patched) -> None:
    p.attention(
        (1,),
        product=lambda q, k: (q * 128) @ (k * 128).transpose(2, 3),
        scale=lambda s, scaling: s * scaling / 128**2,
    )


@bug(
    "numbers",
    accepted=("precision", "scores"),
    words="round|precis|bfloat16|bf16",
    taps=("attn.scores",),
    layers=(2,),
    model="qwen3",
)
def scores_in_bfloat16(p: Patched) -> None:
    p.attention((2,), product=lambda q, k: (q.bfloat16() @ k.bfloat16().transpose(2, 3)).float())


@bug(
    "numbers",
    accepted=("precision", "weight"),
    words="round|precis|tf32|tensorfloat|bit",
    taps=("mlp.gate",),
    layers=(2,),
    model="mistral-full",
)
def gate_with_ten_bits_of_mantissa(p: Patched) -> None:
    def short(x):
        return (x.contiguous().view(torch.int32) & ~0x1FFF).view(torch.float32)

    gate = p.mlp(2).gate_proj
    p.wrap(gate, lambda forward, x: nn.functional.linear(short(x), short(gate.weight)))


@bug(
    "numbers",
    accepted=("overflow", "weight", "reduce", "activation"),
    words="overflow|inf|range|float16|NaN",
    taps=("mlp.down", "mlp.act"),
    layers=(0,),
    model="llama-massive",
    dtype="float16",
)
def product_of_the_mlp_overflows(p: Patched) -> None:
    down = p.mlp(0).down_proj
    p.wrap(down, lambda forward, x: forward(x * 30000) / 30000)


@bug(
    "numbers",
    accepted=("overflow", "softmax", "mask", "cache"),
    words="NaN|0 ?[*·×x]|masked",
    taps=("attn.context", "attn.v_cache"),
    layers=(0,),
    model="qwen3",
)
def nan_behind_the_mask(p: Patched) -> None:
    def context(probs, v):
        v = v.clone()
        v[:, :, -1] = math.nan if not p.decode else v[:, :, -1]
        return probs @ v

    p.attention((0,), context=context)


@bug(
    "numbers",
    accepted=("overflow", "scores", "softmax", "precision"),
    words="clamp|clip|cap|limit|range",
    taps=("attn.scores",),
    model="llama-sharp",
)
def scores_clamped(p: Patched) -> None:
    p.attention(scale=lambda s, scaling: (s * scaling).clamp(-8, 8))
