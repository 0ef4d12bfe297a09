"""NaN, overflow, low precision."""

from __future__ import annotations

import math

import torch
from torch import nn

from tests.workbench.diagnosis.bugs.bug import bug
from tests.workbench.diagnosis.bugs.patched import Patched


@bug(
    "numbers",
    accepted=("overflow", "norm"),
    words="overflow|square|inf|float16|range|zero",
    taps=("attn_norm",),
    model="llama-massive",
    dtype="float16",
)
def squares_overflow_in_half(p: Patched) -> None:
    for _, layer in p.layers():
        norm = layer.input_layernorm
        norm.forward = lambda x, norm=norm: (
            norm.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5))
        )


@bug(
    "numbers",
    accepted=("precision", "norm"),
    words="round|precis|bfloat16|bf16",
    taps=("mlp_norm",),
    layers=(1,),
    model="llama",
)
def a_norm_in_bfloat16(p: Patched) -> None:
    p.output(p.decoder.layers[1].post_attention_layernorm, lambda y: y.bfloat16().float())


@bug(
    "numbers",
    accepted=("precision", "residual"),
    words="round|precis|float16|fp16|half",
    taps=("attn_residual", "mlp_residual"),
    model="qwen2-deep",
)
def residual_kept_in_half(p: Patched) -> None:
    for i, _ in p.layers():
        p.residuals(i, lambda r, o: (r + o).half().float(), lambda r, o: (r + o).half().float())


@bug(
    "numbers",
    accepted=("precision", "head"),
    words="round|precis|bfloat16|bf16",
    taps=("logits",),
    model="llama",
)
def head_in_bfloat16(p: Patched) -> None:
    head = p.model.lm_head
    head.forward = lambda x: nn.functional.linear(x.bfloat16(), head.weight.bfloat16()).float()


@bug(
    "numbers",
    accepted=("embedding", "weight", "overflow"),
    words="NaN|row|embed",
    taps=("embed",),
    model="qwen2-untied",
)
def a_row_of_the_embedding_is_nan(p: Patched) -> None:
    def poison(w):
        w[130, 3] = math.nan
        return w

    p.weight(p.decoder.embed_tokens, poison)


@bug(
    "numbers",
    accepted=("precision", "norm"),
    words="round|precis|float32|bfloat16|bf16|variance",
    taps=("attn_norm",),
    model="llama",
)
def variance_in_the_low_precision(p: Patched) -> None:
    for _, layer in p.layers():
        norm = layer.input_layernorm

        def forward(x, norm=norm):
            variance = x.bfloat16().pow(2).mean(-1, keepdim=True).float()
            return norm.weight * x * torch.rsqrt(variance + 1e-5)

        norm.forward = forward


@bug(
    "numbers",
    accepted=("overflow", "weight"),
    words="NaN|rank|inf",
    taps=("attn.o_proj.partial", "attn.o_proj"),
    layers=(1,),
    ranks=(1,),
    model="llama",
    tp=2,
)
def nan_in_one_rank_s_partial(p: Patched) -> None:
    def poison(w):
        w[0, 0] = math.nan
        return w

    if p.rank == 1:
        p.weight(p.attn(1).o_proj, poison)
