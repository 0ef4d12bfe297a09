"""Held out: linear operations: weights, biases, inputs."""

from __future__ import annotations

import torch

from tests.workbench.diagnosis.bugs.bug import bug
from tests.workbench.diagnosis.bugs.patched import Patched


@bug("linear", accepted=("bias",), words="twice|two times|2", taps=("attn.k_proj",))
def k_bias_added_twice(p: Patched) -> None:
    for i, _ in p.layers():
        p.bias(p.attn(i).k_proj, lambda b: 2 * b)


@bug("linear", accepted=("bias",), words="layer", taps=("attn.v_proj",), layers=(1, 2))
def v_bias_of_the_first_layer(p: Patched) -> None:
    first = p.attn(0).v_proj.bias.detach().clone()
    for i in (1, 2):
        p.bias(p.attn(i).v_proj, lambda b: first)


@bug("linear", accepted=("bias",), words="not|drop|miss|without", taps=("attn.o_proj",), model="llama-bias")
def o_bias_dropped(p: Patched) -> None:
    for i, _ in p.layers():
        p.bias(p.attn(i).o_proj, torch.zeros_like)


@bug(
    "linear",
    accepted=("bias",),
    words="not|drop|miss|without",
    taps=("mlp.gate",),
    layers=(2,),
    model="llama-bias",
)
def gate_bias_dropped_in_last_layer(p: Patched) -> None:
    p.bias(p.mlp(2).gate_proj, torch.zeros_like)


@bug("linear", accepted=("bias",), words="order|permut|interleav|row", taps=("attn.q_proj",))
def q_bias_left_interleaved(p: Patched) -> None:
    def interleaved(b):
        return b.view(-1, 2, p.attn(0).head_dim // 2).transpose(1, 2).reshape(-1)

    for i, _ in p.layers():
        p.bias(p.attn(i).q_proj, interleaved)


@bug("linear", accepted=("bias", "sharding"), words="rank|shard", taps=("attn.k_proj",), ranks=(1,), tp=2)
def k_bias_shard_of_rank_0(p: Patched) -> None:
    for i, _ in p.layers():
        whole = p.full.model.layers[i].self_attn.k_proj.bias.detach()
        p.bias(p.attn(i).k_proj, lambda b, whole=whole: whole[: len(b)].clone())


@bug(
    "linear",
    accepted=("bias", "precision"),
    words="round|precis|float16|bfloat16|half",
    taps=("attn.v_proj",),
    layers=(2,),
)
def v_bias_rounded_to_half(p: Patched) -> None:
    p.bias(p.attn(2).v_proj, lambda b: b.bfloat16().float())


@bug("linear", accepted=("weight",), words="layer", taps=("attn.q_proj",), layers=(1,), model="llama")
def q_weight_of_the_layer_before(p: Patched) -> None:
    other = p.attn(0).q_proj.weight.detach()
    p.weight(p.attn(1).q_proj, lambda w: other.clone())


@bug("linear", accepted=("weight",), words="layer", taps=("attn.o_proj",), layers=(1, 2), model="qwen3")
def o_weights_shifted_by_a_layer(p: Patched) -> None:
    known = [layer.self_attn.o_proj.weight.detach().clone() for _, layer in p.layers()]
    for i in (1, 2):
        p.weight(p.attn(i).o_proj, lambda w, i=i: known[i - 1])


@bug("linear", accepted=("weight",), words="layer", taps=("mlp.down",), layers=(1,), model="mistral-full")
def down_weight_of_the_next_layer(p: Patched) -> None:
    other = p.mlp(2).down_proj.weight.detach()
    p.weight(p.mlp(1).down_proj, lambda w: other.clone())


@bug("linear", accepted=("weight",), words="transpos", taps=("attn.o_proj",), model="qwen2-untied")
def o_transposed_everywhere(p: Patched) -> None:
    for i, _ in p.layers():
        p.weight(p.attn(i).o_proj, lambda w: w.t().contiguous())


@bug(
    "linear",
    accepted=("weight",),
    words="transpos|layout|memory|order",
    taps=("mlp.up",),
    layers=(0,),
    model="qwen2-tied",
)
def up_read_in_the_transposed_layout(p: Patched) -> None:
    p.weight(p.mlp(0).up_proj, lambda w: w.t().reshape(w.shape).contiguous())


@bug(
    "linear",
    accepted=("weight", "heads"),
    words="order|permut|column|head",
    taps=("attn.o_proj",),
    layers=(1,),
    model="qwen3",
)
def o_columns_by_reversed_heads(p: Patched) -> None:
    p.weight(p.attn(1).o_proj, lambda w: w.view(w.shape[0], -1, 16).flip(1).reshape(w.shape))


@bug(
    "linear",
    accepted=("weight",),
    words="order|permut|column",
    taps=("mlp.down",),
    layers=(0,),
    model="llama",
)
def down_columns_permuted(p: Patched) -> None:
    p.weight(p.mlp(0).down_proj, lambda w: w.view(w.shape[0], 2, -1).transpose(1, 2).reshape(w.shape))


@bug(
    "linear",
    accepted=("weight",),
    words="order|permut|row|interleav|llama.cpp|gguf",
    taps=("attn.k_proj",),
    model="llama",
)
def k_rows_left_interleaved(p: Patched) -> None:
    def interleaved(w):
        dim = p.attn(0).head_dim
        return w.view(-1, 2, dim // 2, w.shape[1]).transpose(1, 2).reshape(w.shape)

    for i, _ in p.layers():
        p.weight(p.attn(i).k_proj, interleaved)


@bug(
    "linear",
    accepted=("weight",),
    words="low.rank|rank.\\d|adapter|LoRA",
    taps=("attn.v_proj",),
    layers=(0, 1, 2),
    step=1,
    model="mistral-full",
)
def adapter_applied_in_decode_alone(p: Patched) -> None:
    for i, _ in p.layers():
        a, b = torch.randn(2, 64) / 8, torch.randn(64, 2) / 2
        p.wrap(
            p.attn(i).v_proj, lambda forward, x, a=a, b=b: forward(x) + (x @ a.t() @ b.t() if p.decode else 0)
        )


@bug(
    "linear",
    accepted=("weight",),
    words="single|one (weight|element|number|entry)|element|\\b5\\b",
    taps=("attn.o_proj",),
    layers=(1,),
    model="llama",
)
def one_weight_of_o_flipped(p: Patched) -> None:
    def flip(w):
        w[5, 7] += 2.0
        return w

    p.weight(p.attn(1).o_proj, flip)


@bug(
    "linear",
    accepted=("weight", "scale"),
    words="half|0\\.5|times|factor|scal",
    taps=("mlp.down",),
    layers=(1,),
    model="llama",
)
def down_halved(p: Patched) -> None:
    p.weight(p.mlp(1).down_proj, lambda w: 0.5 * w)


@bug(
    "linear",
    accepted=("weight", "scale"),
    words="scal|factor|times",
    taps=("attn.q_proj",),
    layers=(0,),
    model="llama",
)
def row_scales_of_q_ignored(p: Patched) -> None:
    p.weight(p.attn(0).q_proj, lambda w: w * (0.5 + torch.rand(len(w), 1)))


@bug(
    "linear",
    accepted=("weight", "scale"),
    words="scal|factor|times",
    taps=("attn.o_proj",),
    layers=(2,),
    model="qwen2-tied",
)
def o_scaled_by_a_trifle(p: Patched) -> None:
    p.weight(p.attn(2).o_proj, lambda w: w * (1 + 2e-5))


@bug(
    "linear",
    accepted=("precision", "weight"),
    words="quant|round|precis|int8|8.bit",
    taps=("attn.v_proj",),
    layers=(1,),
    model="qwen3",
)
def v_quantised_to_8_bits(p: Patched) -> None:
    def quantised(w):
        step = w.abs().max() / 127
        return (w / step).round() * step

    p.weight(p.attn(1).v_proj, quantised)


@bug(
    "linear",
    accepted=("precision", "weight"),
    words="round|precis|bfloat16|bf16",
    taps=("mlp.gate",),
    model="llama",
)
def gate_rounded_to_bfloat16(p: Patched) -> None:
    for i, _ in p.layers():
        p.weight(p.mlp(i).gate_proj, lambda w: w.bfloat16().float())


@bug(
    "linear", accepted=("weight",), words="zero|fill|load", taps=("attn.v_proj",), layers=(2,), model="llama"
)
def v_never_loaded(p: Patched) -> None:
    p.weight(p.attn(2).v_proj, torch.zeros_like)


@bug(
    "linear",
    accepted=("weight",),
    words="random|initial|untrain|load|none of|not the checkpoint|other",
    taps=("mlp.up",),
    layers=(1,),
    model="qwen2-untied",
)
def up_left_at_its_initial_values(p: Patched) -> None:
    p.weight(p.mlp(1).up_proj, lambda w: 0.02 * torch.randn_like(w))


@bug(
    "linear",
    accepted=("norm", "input", "residual"),
    words="norm|input",
    taps=("attn.q_proj",),
    layers=(1,),
    model="llama",
)
def q_of_what_was_not_normed(p: Patched) -> None:
    held = {}
    p.wrap(p.decoder.layers[1].input_layernorm, lambda forward, x: held.update(x=x) or forward(x))
    p.wrap(p.attn(1).q_proj, lambda forward, x: forward(held["x"]))


@bug(
    "linear",
    accepted=("norm", "input", "residual"),
    words="norm|input",
    taps=("mlp.gate", "mlp.up"),
    layers=(2,),
    model="qwen2-tied",
)
def mlp_of_what_was_not_normed(p: Patched) -> None:
    held = {}
    p.wrap(p.decoder.layers[2].post_attention_layernorm, lambda forward, x: held.update(x=x) or forward(x))
    for side in (p.mlp(2).gate_proj, p.mlp(2).up_proj):
        p.wrap(side, lambda forward, x: forward(held["x"]))


@bug(
    "linear",
    accepted=("weight", "heads"),
    words="head|order|permut|row",
    taps=("attn.q_proj",),
    layers=(0,),
    heads=(2, 5),
    model="mistral-full",
)
def two_heads_of_q_exchanged(p: Patched) -> None:
    def exchange(w):
        heads = w.view(8, -1, w.shape[1])
        return heads[[0, 1, 5, 3, 4, 2, 6, 7]].reshape(w.shape)

    p.weight(p.attn(0).q_proj, exchange)


@bug(
    "linear",
    accepted=("precision",),
    words="round|precis|bfloat16|bf16",
    taps=("mlp.down",),
    layers=(0,),
    model="llama",
)
def input_of_down_rounded(p: Patched) -> None:
    p.wrap(p.mlp(0).down_proj, lambda forward, x: forward(x) + (forward(x.bfloat16().float()) - forward(x)))


@bug(
    "linear",
    accepted=("precision",),
    words="round|precis|float16|fp16|half",
    taps=("attn.k_proj",),
    layers=(2,),
    model="qwen2-tied",
)
def output_of_k_in_half(p: Patched) -> None:
    p.output(p.attn(2).k_proj, lambda y: y.half().float())


@bug(
    "linear",
    accepted=("input", "weight", "residual"),
    words="input|zero|token|last",
    taps=("mlp.gate", "mlp.up"),
    layers=(1,),
    step=1,
    model="qwen3",
)
def mlp_reads_zeros_in_decode(p: Patched) -> None:
    for side in (p.mlp(1).gate_proj, p.mlp(1).up_proj):
        p.input(side, lambda x: x * 0 if p.decode else x)


@bug(
    "linear",
    accepted=("weight",),
    words="layer",
    taps=("attn.q_proj", "attn.k_proj", "attn.v_proj", "attn_norm"),
    layers=(1, 2),
    model="llama",
)
def two_layers_exchanged(p: Patched) -> None:
    layers = p.decoder.layers
    one, two = layers[1].state_dict(), layers[2].state_dict()
    one, two = ({name: value.clone() for name, value in each.items()} for each in (one, two))
    layers[1].load_state_dict(two)
    layers[2].load_state_dict(one)


@bug("linear", accepted=("weight",), words="layer", taps=("attn_norm",), layers=(3, 4, 5), model="llama-deep")
def second_half_repeats_the_first(p: Patched) -> None:
    for i in (3, 4, 5):
        known = p.decoder.layers[i - 3].state_dict()
        p.decoder.layers[i].load_state_dict({name: value.clone() for name, value in known.items()})
