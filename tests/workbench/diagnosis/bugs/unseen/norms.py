"""RMS norms: weights, epsilon, what the mean runs over."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from tests.workbench.diagnosis.bugs.bug import bug
from tests.workbench.diagnosis.bugs.patched import Patched

NORM = "norm|weight|rms|mean"


@bug("norm", accepted=("norm", "weight"), words=NORM, taps=("attn_norm",), model="llama")
def both_norms_of_a_layer_mapped_to_each_other(p: Patched) -> None:
    for _, layer in p.layers():
        attn, mlp = layer.input_layernorm, layer.post_attention_layernorm
        attn.weight, mlp.weight = mlp.weight, attn.weight


@bug("norm", accepted=("norm", "weight"), words=NORM, taps=("attn.k_norm",), model="qwen3")
def keys_normed_by_the_weight_of_queries(p: Patched) -> None:
    for _, layer in p.layers():
        layer.self_attn.k_norm.weight = layer.self_attn.q_norm.weight


@bug("norm", accepted=("norm",), words="eps", taps=("attn_norm",), model="qwen2-tied")
def epsilon_added_outside_the_root(p: Patched) -> None:
    def around(forward: Any, x: Tensor, norm: Any) -> Tensor:
        root = x.pow(2).mean(-1, keepdim=True).sqrt()
        weighted: Tensor = norm.weight * (x / (root + norm.variance_epsilon))
        return weighted

    for _, layer in p.layers():
        for norm in (layer.input_layernorm, layer.post_attention_layernorm):
            p.wrap(norm, lambda forward, x, norm=norm: around(forward, x, norm))


@bug(
    "norm",
    accepted=("norm", "scale"),
    words="norm|factor|scale|n - 1|n-1|mean",
    taps=("mlp_norm",),
    layers=(1,),
    model="qwen3",
)
def variance_of_a_sample_in_one_layer(p: Patched) -> None:
    """The sum of squares over n - 1."""
    p.output(p.decoder.layers[1].post_attention_layernorm, lambda x: x * math.sqrt(63 / 64))


@bug(
    "norm",
    accepted=("norm",),
    words="norm|mean|rms|factor|half|channel",
    taps=("attn_norm",),
    ranks=(1,),
    model="llama",
    tp=2,
)
def rank_1_averages_over_half_the_row(p: Patched) -> None:
    """A block reduction that leaves out its second warp, in one rank's build."""

    def around(forward: Any, x: Tensor, norm: Any) -> Tensor:
        square = x[..., :32].pow(2).mean(-1, keepdim=True)
        weighted: Tensor = norm.weight * (x * (square + norm.variance_epsilon).rsqrt())
        return weighted

    if p.rank == 1:
        for _, layer in p.layers():
            norm = layer.input_layernorm
            p.wrap(norm, lambda forward, x, norm=norm: around(forward, x, norm))


@bug(
    "norm",
    accepted=("norm",),
    words="norm|head|rms|mean",
    taps=("attn.k_norm",),
    layers=(1,),
    model="qwen3-kv4",
)
def keys_of_one_layer_normed_over_all_heads(p: Patched) -> None:
    norm = p.attn(1).k_norm

    def around(forward: Any, x: Tensor) -> Tensor:
        square = x.flatten(2).pow(2).mean(-1)[..., None, None]
        weighted: Tensor = norm.weight * (x * (square + norm.variance_epsilon).rsqrt())
        return weighted

    p.wrap(norm, around)


@bug("norm", accepted=("norm",), words="norm|twice|weight", taps=("final_norm",), model="qwen2-untied")
def final_norm_in_the_model_and_in_the_head(p: Patched) -> None:
    p.wrap(p.decoder.norm, lambda forward, x: forward(forward(x)))


@bug("norm", accepted=("norm",), words="norm|head", taps=("attn.q_norm",), heads=(7,), model="qwen3")
def norm_kernel_stops_before_the_last_query_head(p: Patched) -> None:
    for _, layer in p.layers():
        p.wrap(
            layer.self_attn.q_norm,
            lambda forward, x: torch.cat((forward(x)[:, :, :7], x[:, :, 7:]), 2),
        )


@bug("norm", accepted=("norm", "weight"), words=NORM, taps=("mlp_norm",), layers=(2,), model="mistral-full")
def weight_of_the_last_norm_stays_at_ones(p: Patched) -> None:
    p.weight(p.decoder.layers[2].post_attention_layernorm, torch.ones_like)
