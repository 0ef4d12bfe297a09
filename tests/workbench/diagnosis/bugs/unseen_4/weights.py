"""Weights and biases: loading, conversion, quantisation."""

from __future__ import annotations

import math

import torch

from tests.workbench.diagnosis.bugs.bug import QKV, bug
from tests.workbench.diagnosis.bugs.patched import Patched


def _qkv(p, i):
    return p.attn(i).q_proj, p.attn(i).k_proj, p.attn(i).v_proj


@bug(
    "bias",
    accepted=("bias",),
    words="not|drop|miss|without",
    taps=QKV,
    model="qwen2-untied",
    dtype="bfloat16",
)
def biases_of_attention_never_loaded(p: Patched) -> None:
    for i, _ in p.layers():
        for side in _qkv(p, i):
            p.bias(side, torch.zeros_like)


@bug(
    "bias",
    accepted=("bias",),
    words="layer|other|order|not its|wrong|before",
    taps=QKV,
    layers=(1, 2, 3, 4, 5),
    model="qwen2-deep",
)
def biases_come_a_layer_late(p: Patched) -> None:
    known = [[side.bias.detach().clone() for side in _qkv(p, i)] for i, _ in p.layers()]
    for i, _ in p.layers(range(1, 6)):
        for side, bias in zip(_qkv(p, i), known[i - 1], strict=True):
            p.bias(side, lambda b, bias=bias: bias)


@bug(
    "linear",
    accepted=("weight", "activation"),
    words="swap|exchang|up|gate",
    taps=("mlp.gate", "mlp.up"),
    model="mistral-full",
    dtype="bfloat16",
)
def up_and_gate_exchanged_in_every_layer(p: Patched) -> None:
    for i, _ in p.layers():
        gate, up = (side.weight.detach().clone() for side in (p.mlp(i).gate_proj, p.mlp(i).up_proj))
        p.weight(p.mlp(i).gate_proj, lambda w, up=up: up)
        p.weight(p.mlp(i).up_proj, lambda w, gate=gate: gate)


@bug(
    "linear",
    accepted=("weight",),
    words="transpos",
    taps=("attn.q_proj", "attn.o_proj"),
    model="qwen2-tied",
)
def square_weights_left_transposed_by_the_converter(p: Patched) -> None:
    for i, _ in p.layers():
        for side in (p.attn(i).q_proj, p.attn(i).o_proj):
            p.weight(side, lambda w: w.t().contiguous())


@bug(
    "linear",
    accepted=("weight", "rope", "heads"),
    words="order|permut|row|interleav|pairs",
    taps=("attn.q_proj", "attn.k_proj"),
    model="llama",
    tp=2,
)
def q_and_k_left_in_the_order_of_the_original_release(p: Patched) -> None:
    for i, _ in p.layers():
        for side in (p.attn(i).q_proj, p.attn(i).k_proj):
            p.weight(side, lambda w: w.view(-1, 2, 4, w.shape[1]).transpose(1, 2).reshape(w.shape))


@bug(
    "linear",
    accepted=("weight", "rope", "heads"),
    words="head|order|permut|row|interleav",
    taps=("attn.q_proj",),
    heads=(7,),
    model="mistral-full",
)
def last_head_of_q_left_out_of_the_permutation(p: Patched) -> None:
    """The loop over the heads of the original release ends one early."""

    def left(w):
        w[112:] = w[112:].view(2, 8, -1).transpose(0, 1).reshape(16, -1)
        return w

    for i, _ in p.layers():
        p.weight(p.attn(i).q_proj, left)


@bug(
    "linear",
    accepted=("weight",),
    words="weight|random|not|load|checkpoint|init",
    taps=("mlp.gate", "mlp.up"),
    layers=(5,),
    model="qwen2-deep",
)
def last_layer_keeps_the_mlp_of_its_initialisation(p: Patched) -> None:
    for side in (p.mlp(5).gate_proj, p.mlp(5).up_proj, p.mlp(5).down_proj):
        p.weight(side, lambda w: 0.02 * torch.randn_like(w))


@bug(
    "quantisation",
    accepted=("weight", "scale", "precision"),
    words="scale|group|block|quant|column|factor",
    taps=("mlp.down",),
    layers=(2,),
    model="llama",
)
def scales_of_groups_of_16_read_as_of_32(p: Patched) -> None:
    def scaled(w):
        groups = w.view(len(w), -1, 16).abs().amax(-1)
        columns = torch.arange(w.shape[1])
        return w / groups[:, columns // 16] * groups[:, columns // 32]

    p.weight(p.mlp(2).down_proj, scaled)


@bug(
    "quantisation",
    accepted=("weight", "scale"),
    words="scale|channel|column|row|quant|axis|factor",
    taps=("attn.q_proj",),
    layers=(1,),
    model="llama",
)
def scales_of_the_rows_spread_along_the_columns(p: Patched) -> None:
    def scaled(w):
        scales = w.abs().amax(1)
        return w / scales[:, None] * scales

    p.weight(p.attn(1).q_proj, scaled)


@bug(
    "quantisation",
    accepted=("weight", "scale"),
    words="scale|factor|times|constant",
    taps=("attn.k_proj", "attn.v_proj"),
    model="qwen3",
    tp=2,
)
def fused_qkv_dequantised_by_the_scale_of_q(p: Patched) -> None:
    for i, _ in p.layers():
        whole = p.full.model.layers[i].self_attn
        q = whole.q_proj.weight.detach().abs().amax()
        for name in ("k_proj", "v_proj"):
            own = getattr(whole, name).weight.detach().abs().amax()
            p.weight(getattr(p.attn(i), name), lambda w, factor=q / own: w * factor)


@bug(
    "quantisation",
    accepted=("weight", "scale", "overflow"),
    words="scale|factor|times|large|magnitude",
    taps=("mlp.gate",),
    layers=(1,),
    model="qwen2-tied",
)
def inverse_scale_taken_for_the_scale(p: Patched) -> None:
    p.weight(p.mlp(1).gate_proj, lambda w: w / (w.abs().amax() / 448) ** 2)


@bug(
    "quantisation",
    accepted=("overflow", "weight"),
    words="NaN|inf|row|group",
    taps=("mlp.up",),
    layers=(1,),
    model="qwen3",
)
def an_empty_group_dequantises_to_nan(p: Patched) -> None:
    def poison(w):
        w[5, 16:32] = math.nan
        return w

    p.weight(p.mlp(1).up_proj, poison)


@bug(
    "quantisation",
    accepted=("weight", "input"),
    words="column|input|feature|channel|zero|outlier",
    taps=("mlp.gate",),
    layers=(0,),
    model="qwen3-bias",
)
def outlier_columns_never_added_back(p: Patched) -> None:
    def without(w):
        w[:, w.norm(dim=0).topk(4).indices] = 0
        return w

    p.weight(p.mlp(0).gate_proj, without)


@bug(
    "quantisation",
    accepted=("weight", "input"),
    words="weight|rotat|Hadamard|matrix|column|input|basis|differ|other",
    taps=("attn.o_proj",),
    layers=(2,),
    model="llama",
)
def o_turned_by_a_hadamard_matrix_and_its_input_not(p: Patched) -> None:
    def turned(w):
        hadamard = torch.ones(1, 1)
        while len(hadamard) < w.shape[1]:
            hadamard = torch.cat([torch.cat([hadamard] * 2, 1), torch.cat([hadamard, -hadamard], 1)])
        return w @ hadamard / w.shape[1] ** 0.5

    p.weight(p.attn(2).o_proj, turned)
