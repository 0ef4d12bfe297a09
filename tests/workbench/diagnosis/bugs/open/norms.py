"""Norms."""

from __future__ import annotations

import torch

from tests.workbench.diagnosis.bugs.bug import bug
from tests.workbench.diagnosis.bugs.patched import Patched


def _norms(p):
    return [
        norm for _, layer in p.layers() for norm in (layer.input_layernorm, layer.post_attention_layernorm)
    ]


@bug("norm", accepted=("norm",), words="eps", taps=("attn_norm",), model="llama")
def epsilon_of_another_family(p: Patched) -> None:
    for norm in (*_norms(p), p.decoder.norm):
        norm.variance_epsilon = 1e-6


@bug("norm", accepted=("norm",), words="eps", taps=("final_norm",), model="llama")
def epsilon_of_the_final_norm(p: Patched) -> None:
    p.decoder.norm.variance_epsilon = 1e-3


@bug("norm", accepted=("norm",), words="eps", taps=("attn_norm",), model="qwen3")
def epsilon_outside_the_root(p: Patched) -> None:
    for norm in _norms(p):
        norm.forward = lambda x, norm=norm: (
            norm.weight * (x / (x.pow(2).mean(-1, keepdim=True).sqrt() + 1e-5))
        )


@bug(
    "norm",
    accepted=("norm",),
    words="\\+ ?1|1 ?\\+|one is added|plus one|Gemma",
    taps=("mlp_norm",),
    layers=(1,),
    model="llama",
)
def one_added_to_a_weight(p: Patched) -> None:
    p.weight(p.decoder.layers[1].post_attention_layernorm, lambda w: w + 1)


@bug(
    "norm",
    accepted=("norm", "weight"),
    words="weight|ones|one",
    taps=("attn_norm",),
    layers=(2,),
    model="qwen2-tied",
)
def norm_weight_left_at_one(p: Patched) -> None:
    p.weight(p.decoder.layers[2].input_layernorm, torch.ones_like)


@bug("norm", accepted=("norm",), words="mean|LayerNorm|centr", taps=("attn_norm",), model="llama")
def mean_subtracted(p: Patched) -> None:
    for norm in _norms(p):
        p.input(norm, lambda x: x - x.mean(-1, keepdim=True))


@bug(
    "norm",
    accepted=("norm",),
    words="skip|not (been )?(normed|applied|normalised)|never|without|missing|identity",
    taps=("attn.q_norm",),
    model="qwen3",
)
def q_never_normed(p: Patched) -> None:
    for i, _ in p.layers():
        p.attn(i).q_norm.forward = lambda x: x


@bug(
    "norm",
    accepted=("norm",),
    words="skip|not (been )?(normed|applied|normalised)|never|without|missing|identity",
    taps=("attn.q_norm", "attn.k_norm"),
    step=1,
    model="qwen3-kv4",
)
def heads_not_normed_in_decode(p: Patched) -> None:
    for i, _ in p.layers():
        for norm in (p.attn(i).q_norm, p.attn(i).k_norm):
            p.wrap(norm, lambda forward, x: x if p.decode else forward(x))


@bug(
    "norm",
    accepted=("norm", "weight"),
    words="weight|q_norm|other",
    taps=("attn.k_norm",),
    layers=(0,),
    model="qwen3",
)
def k_normed_by_q_s_weight(p: Patched) -> None:
    other = p.attn(0).q_norm.weight.detach().clone()
    p.weight(p.attn(0).k_norm, lambda w: other)


@bug(
    "norm", accepted=("norm",), words="variance|square|root|divid|sqrt|rms", taps=("mlp_norm",), model="llama"
)
def divided_by_the_variance(p: Patched) -> None:
    for _, layer in p.layers():
        norm = layer.post_attention_layernorm
        norm.forward = lambda x, norm=norm: norm.weight * x / (x.pow(2).mean(-1, keepdim=True) + 1e-5)


@bug(
    "norm",
    accepted=("norm",),
    words="sum|mean|size|sqrt|factor|scale|width|hidden",
    taps=("attn_norm",),
    layers=(1,),
    model="llama",
)
def sum_of_squares_in_place_of_the_mean(p: Patched) -> None:
    norm = p.decoder.layers[1].input_layernorm
    norm.forward = lambda x: norm.weight * x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + 1e-5)


@bug(
    "norm",
    accepted=("norm",),
    words="token|axis|dimension|row|rms|all",
    taps=("attn_norm",),
    layers=(0,),
    model="qwen2-tied",
)
def one_norm_over_all_tokens(p: Patched) -> None:
    norm = p.decoder.layers[0].input_layernorm
    norm.forward = lambda x: norm.weight * x * torch.rsqrt(x.pow(2).mean((-1, -2), keepdim=True) + 1e-5)


@bug(
    "norm",
    accepted=("norm", "weight"),
    words="rank|weight",
    taps=("mlp_norm",),
    layers=(1,),
    ranks=(1,),
    model="llama",
    tp=2,
)
def norm_weight_missing_on_one_rank(p: Patched) -> None:
    if p.rank == 1:
        p.weight(p.decoder.layers[1].post_attention_layernorm, torch.ones_like)
