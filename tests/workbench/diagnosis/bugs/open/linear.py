"""Linear operations: weights, biases, inputs."""

from __future__ import annotations

import torch

from tests.workbench.diagnosis.bugs.bug import bug
from tests.workbench.diagnosis.bugs.patched import Patched


@bug("linear", accepted=("bias",), words="not|drop|miss|without", taps=("attn.q_proj",), layers=(1,))
def q_bias_dropped_in_one_layer(p: Patched) -> None:
    p.bias(p.attn(1).q_proj, torch.zeros_like)


@bug(
    "linear",
    accepted=("bias",),
    words="sign|negat|minus|subtract|-1",
    taps=("mlp.down",),
    layers=(1,),
    model="llama-bias",
)
def down_bias_subtracted(p: Patched) -> None:
    p.bias(p.mlp(1).down_proj, torch.neg)


@bug(
    "linear",
    accepted=("bias",),
    words="order|swap|permut|other|k_proj|v_proj",
    taps=("attn.k_proj", "attn.v_proj"),
    layers=(0,),
)
def k_and_v_bias_swapped(p: Patched) -> None:
    k, v = (side.bias.detach().clone() for side in (p.attn(0).k_proj, p.attn(0).v_proj))
    p.bias(p.attn(0).k_proj, lambda b: v)
    p.bias(p.attn(0).v_proj, lambda b: k)


@bug(
    "linear",
    accepted=("bias",),
    words="not|drop|miss|without",
    taps=("attn.k_proj",),
    step=1,
    layers=(0, 1, 2),
)
def k_bias_dropped_in_decode(p: Patched) -> None:
    for i, _ in p.layers():
        bias = p.attn(i).k_proj.bias
        p.output(p.attn(i).k_proj, lambda y, bias=bias: y - bias if p.decode else y)


@bug("linear", accepted=("weight", "activation"), words="up_proj|up", taps=("mlp.gate",), model="llama")
def gate_filled_with_up(p: Patched) -> None:
    for i, _ in p.layers():
        other = p.mlp(i).up_proj.weight.detach()
        p.weight(p.mlp(i).gate_proj, lambda w, other=other: other.clone())


@bug(
    "linear",
    accepted=("weight", "activation"),
    words="swap|up|gate",
    taps=("mlp.gate", "mlp.up"),
    layers=(1,),
    model="qwen3",
)
def gate_and_up_swapped_in_one_layer(p: Patched) -> None:
    gate, up = (side.weight.detach().clone() for side in (p.mlp(1).gate_proj, p.mlp(1).up_proj))
    p.weight(p.mlp(1).gate_proj, lambda w: up)
    p.weight(p.mlp(1).up_proj, lambda w: gate)


@bug("linear", accepted=("weight",), words="k_proj", taps=("attn.v_proj",), layers=(0,), model="llama-mha")
def v_filled_with_k(p: Patched) -> None:
    other = p.attn(0).k_proj.weight.detach()
    p.weight(p.attn(0).v_proj, lambda w: other.clone())


@bug("linear", accepted=("weight",), words="transpos", taps=("attn.q_proj",), layers=(1,), model="llama")
def q_transposed_in_one_layer(p: Patched) -> None:
    p.weight(p.attn(1).q_proj, lambda w: w.t().contiguous())


@bug("linear", accepted=("weight",), words="transpos|layout|memory|order", taps=("mlp.down",), model="llama")
def down_read_in_the_transposed_layout(p: Patched) -> None:
    for i, _ in p.layers():
        p.weight(p.mlp(i).down_proj, lambda w: w.t().reshape(w.shape).contiguous())


@bug(
    "linear",
    accepted=("weight",),
    words="order|permut|row|interleav",
    taps=("mlp.up",),
    layers=(2,),
    model="mistral-window",
)
def up_rows_interleaved(p: Patched) -> None:
    p.weight(p.mlp(2).up_proj, lambda w: w.view(2, -1, w.shape[1]).transpose(0, 1).reshape(w.shape))


@bug(
    "linear",
    accepted=("weight",),
    words="low.rank|rank.\\d|adapter|LoRA",
    taps=("attn.q_proj",),
    layers=(2,),
    model="qwen3",
)
def adapter_left_in_q(p: Patched) -> None:
    a, b = torch.randn(4, 64) / 8, torch.randn(128, 4) / 4
    p.weight(p.attn(2).q_proj, lambda w: w + b @ a)


@bug(
    "linear", accepted=("weight",), words="low.rank|rank.\\d|adapter|LoRA", taps=("mlp.down",), model="llama"
)
def adapter_of_rank_one_in_down(p: Patched) -> None:
    for i, _ in p.layers():
        a, b = torch.randn(1, 96) / 20, torch.randn(64, 1) / 2
        p.weight(p.mlp(i).down_proj, lambda w, a=a, b=b: w + b @ a)


@bug(
    "linear",
    accepted=("weight",),
    words="row|output|feature|17",
    taps=("mlp.gate",),
    layers=(1,),
    model="qwen2-tied",
)
def one_row_of_gate_zero(p: Patched) -> None:
    def zero(w):
        w[17] = 0
        return w

    p.weight(p.mlp(1).gate_proj, zero)


@bug(
    "linear",
    accepted=("weight",),
    words="column|input|feature|40",
    taps=("mlp.up",),
    layers=(2,),
    model="llama",
)
def one_column_of_up_ignored(p: Patched) -> None:
    def zero(w):
        w[:, 40] = 0
        return w

    p.weight(p.mlp(2).up_proj, zero)


@bug(
    "linear",
    accepted=("input", "positions", "weight"),
    words="shift|previous|before|token",
    taps=("attn.k_proj",),
    layers=(1,),
    model="llama",
)
def k_of_the_token_before(p: Patched) -> None:
    p.input(p.attn(1).k_proj, lambda x: x.roll(1, 1))


@bug(
    "linear",
    accepted=("input", "norm"),
    words="layer|input",
    taps=("attn.v_proj",),
    layers=(2,),
    model="qwen3",
)
def v_of_the_layer_before_s_norm(p: Patched) -> None:
    held = {}
    p.wrap(p.decoder.layers[1].input_layernorm, lambda forward, x: held.update(x=forward(x)) or held["x"])
    p.wrap(p.attn(2).v_proj, lambda forward, x: forward(held["x"]))


@bug(
    "linear",
    accepted=("weight", "heads"),
    words="head|row|same|repeat|copy",
    taps=("attn.v_proj",),
    heads=(3,),
    model="llama",
)
def last_kv_head_of_v_is_the_first(p: Patched) -> None:
    def copy_first(w):
        heads = w.view(4, -1, w.shape[1])
        heads[3] = heads[0]
        return heads.reshape(w.shape)

    for i, _ in p.layers():
        p.weight(p.attn(i).v_proj, copy_first)
