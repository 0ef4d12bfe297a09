"""Held out: norms."""

from __future__ import annotations

from functools import partial

import torch

from tests.workbench.diagnosis.bugs.bug import bug
from tests.workbench.diagnosis.bugs.patched import Patched


def _rms(x, eps):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)


@bug("norm", accepted=("norm",), words="eps", taps=("attn_norm",), layers=(0,), model="qwen2-tied")
def epsilon_too_large_in_the_first_layer(p: Patched) -> None:
    p.decoder.layers[0].input_layernorm.variance_epsilon = 1e-3


@bug(
    "norm",
    accepted=("norm", "weight"),
    words="weight|other|post_attention",
    taps=("attn_norm",),
    layers=(1,),
    model="llama",
)
def weight_of_the_other_norm(p: Patched) -> None:
    other = p.decoder.layers[1].post_attention_layernorm.weight.detach().clone()
    p.weight(p.decoder.layers[1].input_layernorm, lambda w: other)


@bug(
    "norm",
    accepted=("norm", "weight"),
    words="layer|weight",
    taps=("mlp_norm",),
    layers=(1, 2),
    model="mistral-full",
)
def norm_weights_of_the_first_layer(p: Patched) -> None:
    first = p.decoder.layers[0].post_attention_layernorm.weight.detach().clone()
    for i in (1, 2):
        p.weight(p.decoder.layers[i].post_attention_layernorm, lambda w: first)


@bug(
    "norm",
    accepted=("norm",),
    words="skip|not (been )?(normed|applied|normalised)|never|without|missing|identity",
    taps=("mlp_norm",),
    layers=(1,),
    model="qwen3",
)
def a_norm_skipped(p: Patched) -> None:
    p.decoder.layers[1].post_attention_layernorm.forward = lambda x: x


@bug(
    "norm",
    accepted=("norm",),
    words="skip|not (been )?(normed|applied|normalised)|never|without|missing|identity",
    taps=("final_norm",),
    model="qwen2-tied",
)
def final_norm_skipped(p: Patched) -> None:
    p.decoder.norm.forward = lambda x: x


@bug("norm", accepted=("norm",), words="twice|two|again|2", taps=("final_norm",), model="llama")
def final_norm_applied_twice(p: Patched) -> None:
    p.wrap(p.decoder.norm, lambda forward, x: forward(forward(x)))


@bug(
    "norm",
    accepted=("norm",),
    words="all heads|over|per head|together|head",
    taps=("attn.q_norm", "attn.k_norm"),
    model="qwen3",
)
def heads_normed_together(p: Patched) -> None:
    def forward(x, norm):
        return norm.weight * (x * torch.rsqrt(x.pow(2).mean((-1, -2), keepdim=True) + 1e-5))

    for i, _ in p.layers():
        for norm in (p.attn(i).q_norm, p.attn(i).k_norm):
            norm.forward = partial(forward, norm=norm)


@bug(
    "norm",
    accepted=("norm",),
    words="weight|before|order|first",
    taps=("mlp_norm",),
    layers=(2,),
    model="qwen3",
)
def weight_applied_before_the_norm(p: Patched) -> None:
    norm = p.decoder.layers[2].post_attention_layernorm
    norm.forward = lambda x: _rms(x * norm.weight, 1e-5)


@bug(
    "norm",
    accepted=("norm",),
    words="half|part|local|subset|rank|rms|shard|width|dimension",
    taps=("attn_norm",),
    layers=(1,),
    model="llama",
)
def norm_over_half_of_the_width(p: Patched) -> None:
    norm = p.decoder.layers[1].input_layernorm
    norm.forward = lambda x: norm.weight * x * torch.rsqrt(x[..., :32].pow(2).mean(-1, keepdim=True) + 1e-5)


@bug(
    "norm",
    accepted=("norm",),
    words="rank|local|part|shard|half|rms",
    taps=("attn_norm",),
    model="qwen2-tied",
    tp=2,
)
def each_rank_norms_its_own_half(p: Patched) -> None:
    half = slice(p.rank * 32, (p.rank + 1) * 32)
    for _, layer in p.layers():
        norm = layer.input_layernorm
        norm.forward = lambda x, norm=norm: (
            norm.weight * x * torch.rsqrt(x[..., half].pow(2).mean(-1, keepdim=True) + 1e-5)
        )


@bug(
    "norm",
    accepted=("norm", "weight"),
    words="element|weight|one|single|channel|column|9",
    taps=("attn_norm",),
    layers=(2,),
    model="llama",
)
def one_norm_weight_wrong(p: Patched) -> None:
    def change(w):
        w[9] *= -1
        return w

    p.weight(p.decoder.layers[2].input_layernorm, change)


@bug(
    "norm",
    accepted=("norm",),
    words="skip|not (been )?(normed|applied|normalised)|never|without|missing|identity",
    taps=("attn_norm",),
    layers=(2,),
    step=1,
    model="llama",
)
def a_norm_skipped_in_decode(p: Patched) -> None:
    p.wrap(p.decoder.layers[2].input_layernorm, lambda forward, x: x if p.decode else forward(x))


@bug(
    "norm",
    accepted=("norm", "precision"),
    words="eps|tiny|small|round|precis",
    taps=("final_norm",),
    model="qwen2-deep",
)
def epsilon_forgotten_in_the_final_norm(p: Patched) -> None:
    p.decoder.norm.variance_epsilon = 1e-4
