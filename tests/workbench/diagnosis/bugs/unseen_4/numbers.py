"""Precision."""

from __future__ import annotations

import math

from tests.workbench.diagnosis.bugs.bug import bug
from tests.workbench.diagnosis.bugs.patched import Patched


@bug(
    "numbers",
    accepted=("precision", "scores"),
    words="round|precis|int8|8.bit|quant|bits",
    taps=("attn.scores",),
    model="qwen3",
)
def scores_from_queries_and_keys_in_eight_bits(p: Patched) -> None:
    def rounded(x):
        step = x.abs().amax(-1, keepdim=True) / 127
        return (x / step).round() * step

    p.attention(product=lambda q, k: rounded(q) @ rounded(k).transpose(2, 3))


@bug(
    "numbers",
    accepted=("precision", "context", "attention"),
    words="round|precis|bfloat16|bf16|bits",
    taps=("attn.context",),
    layers=(1,),
    model="llama",
)
def context_of_one_layer_rounded_to_bfloat16(p: Patched) -> None:
    p.attention((1,), merge=lambda c: c.transpose(1, 2).contiguous().bfloat16().float())


@bug(
    "numbers",
    accepted=("softmax", "precision"),
    words="exp|approx|precis|round|softmax",
    taps=("attn.probs",),
    model="mistral-window",
)
def exponential_of_the_softmax_by_straight_lines(p: Patched) -> None:
    """Between the powers of two a line."""

    def softmax(s):
        x = ((s - s.amax(-1, keepdim=True)) * math.log2(math.e)).clamp(min=-120)
        powers = x.floor().exp2() * (1 + x - x.floor())
        return powers / powers.sum(-1, keepdim=True)

    p.attention(softmax=softmax)
