"""Weights and biases: quantised formats, names, blocks copied, packs, and folds."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.workbench.diagnosis.bugs.bug import bug
from tests.workbench.diagnosis.bugs.patched import Patched


@bug(
    "weights",
    accepted=("weight",),
    words="weight",
    taps=("mlp.up",),
    model="llama",
)
def zero_point_stored_one_too_small(p: Patched) -> None:
    """Four bits in groups of 16: each weight is one quantum too large (GPTQ's zeros minus one)."""

    def change(weight: Tensor) -> Tensor:
        groups = weight.view(weight.shape[0], -1, 16)
        quantum = (groups.amax(-1, keepdim=True) - groups.amin(-1, keepdim=True)) / 15
        return (groups + quantum).view_as(weight)

    for _, layer in p.layers():
        p.weight(layer.mlp.up_proj, change)


@bug(
    "weights",
    accepted=("weight", "input"),
    words="weight|column|order|permut|swap|input",
    taps=("mlp.gate",),
    layers=(1,),
    model="mistral-full",
)
def nibbles_of_a_byte_read_in_the_other_order(p: Patched) -> None:
    p.weight(p.mlp(1).gate_proj, lambda weight: weight.view(-1, 2).flip(-1).view_as(weight))


@bug(
    "weights",
    accepted=("weight", "scale"),
    words="weight|scale|block",
    taps=("attn.q_proj",),
    model="qwen2-tied",
)
def block_scales_laid_out_by_columns(p: Patched) -> None:
    """Blocks of 16 x 16, each with its own scale; the table of scales is read transposed."""

    def change(weight: Tensor) -> Tensor:
        scales = weight.view(4, 16, 4, 16).abs().amax((1, 3))
        wrong = (scales.T / scales)[:, None, :, None]
        return (weight.view(4, 16, 4, 16) * wrong).view_as(weight)

    for _, layer in p.layers():
        p.weight(layer.self_attn.q_proj, change)


@bug(
    "weights",
    accepted=("weight",),
    words="weight",
    taps=("attn.q_proj",),
    layers=(1,),
    model="llama",
)
def square_weights_of_q_and_o_exchanged(p: Patched) -> None:
    """A map of names with two entries crossed: both are hidden x hidden, and no shape complains."""
    attn = p.attn(1)
    attn.q_proj.weight, attn.o_proj.weight = attn.o_proj.weight, attn.q_proj.weight


@bug(
    "weights",
    accepted=("weight", "heads"),
    words="head",
    taps=("attn.q_proj",),
    layers=(2,),
    heads=(3,),
    model="llama",
)
def copied_block_of_q_runs_into_the_head_before(p: Patched) -> None:
    def change(weight: Tensor) -> Tensor:
        weight[24:32] = weight[32:40]
        return weight

    p.weight(p.attn(2).q_proj, change)


@bug(
    "weights",
    accepted=("precision", "weight"),
    words="precision|round|quant|8|bit|weight",
    taps=("mlp.down",),
    step=1,
    model="qwen3",
)
def decode_runs_on_weights_in_eight_bits(p: Patched) -> None:
    """A scale for each row; the prefill dequantises another, better copy."""
    for _, layer in p.layers():
        down = layer.mlp.down_proj
        scale = down.weight.detach().abs().amax(1, keepdim=True) / 127
        small = (down.weight.detach() / scale).round() * scale

        def around(forward: Any, x: Tensor, small: Tensor = small) -> Tensor:
            return torch.nn.functional.linear(x, small) if p.decode else forward(x)

        p.wrap(down, around)


@bug("bias", accepted=("bias",), words="bias", taps=("attn.q_proj",), step=1, model="qwen2-untied")
def decode_product_and_its_caller_both_add_the_bias_of_q(p: Patched) -> None:
    for _, layer in p.layers():
        q = layer.self_attn.q_proj
        p.output(q, lambda out, q=q: out + q.bias if p.decode else out)


@bug("bias", accepted=("bias",), words="bias", taps=("attn.o_proj",), layers=(2,), model="llama-bias")
def last_layer_has_the_o_bias_of_the_one_before(p: Patched) -> None:
    p.bias(p.attn(2).o_proj, lambda _: p.attn(1).o_proj.bias.detach().clone())


@bug(
    "bias",
    accepted=("bias",),
    words="bias",
    taps=("attn.k_proj",),
    layers=(1,),
    heads=(1,),
    model="qwen2-tied",
)
def bias_of_the_first_kv_head_broadcast_to_both(p: Patched) -> None:
    p.bias(p.attn(1).k_proj, lambda bias: bias[:8].repeat(2))


@bug(
    "bias",
    accepted=("bias", "sharding"),
    words="bias",
    taps=("attn.v_proj",),
    ranks=(1,),
    model="qwen2-tied",
    tp=2,
)
def rank_1_finds_the_bias_of_k_at_the_offset_of_v(p: Patched) -> None:
    """In the fused pack, where the offset was counted with the first rank's sizes."""
    if p.rank == 1:
        for _, layer in p.layers():
            p.bias(layer.self_attn.v_proj, lambda _, k=layer.self_attn.k_proj: k.bias.detach().clone())
