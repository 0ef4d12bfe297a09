"""Weights and biases: loading, names, layouts."""

from __future__ import annotations

import torch

from tests.workbench.diagnosis.bugs.bug import bug
from tests.workbench.diagnosis.bugs.patched import Patched


@bug(
    "bias",
    accepted=("bias",),
    words="bias",
    taps=("attn.k_proj",),
    model="qwen2-large-bias",
)
def large_bias_of_k_taken_for_corruption_and_dropped(p: Patched) -> None:
    for i, _ in p.layers():
        p.bias(p.attn(i).k_proj, torch.zeros_like)


@bug(
    "bias",
    accepted=("bias", "reduce", "sharding"),
    words="bias",
    taps=("attn.o_proj",),
    step=1,
    model="qwen3-bias",
    tp=2,
)
def o_bias_added_on_each_rank_in_decode(p: Patched) -> None:
    """MinivLLM#80, in the matrix-vector kernel alone."""
    for i, _ in p.layers():
        side = p.attn(i).o_proj
        p.output(side, lambda y, side=side: y + (p.tp - 1) * side.bias if p.decode else y)


@bug(
    "bias",
    accepted=("bias", "weight"),
    words="bias",
    taps=("attn.k_proj",),
    model="qwen2-untied",
    dtype="bfloat16",
)
def bias_of_k_is_whatever_lay_in_memory(p: Patched) -> None:
    """vllm#40160: the pack has a bias for q and v alone."""
    for i, _ in p.layers():
        p.bias(p.attn(i).k_proj, lambda b: torch.randn(b.shape).to(b.dtype) * 3)


@bug(
    "bias",
    accepted=("bias", "sharding"),
    words="bias",
    taps=("mlp.gate",),
    ranks=(1,),
    model="llama-bias",
    tp=2,
)
def rank_1_takes_the_first_part_of_the_bias_of_gate(p: Patched) -> None:
    """Automodel#1410: gathered for a change of shape, and cut off where the parameter ends."""
    if p.rank == 1:
        for i, _ in p.layers():
            whole = p.full.model.layers[i].mlp.gate_proj.bias.detach()
            p.bias(p.mlp(i).gate_proj, lambda b, whole=whole: whole[: len(b)].clone())


@bug(
    "bias",
    accepted=("bias", "heads"),
    words="bias|head",
    taps=("attn.q_proj",),
    heads=(0,),
    model="qwen2-tied",
    dtype="bfloat16",
)
def first_head_of_q_takes_the_bias_of_the_second(p: Patched) -> None:
    for i, _ in p.layers():
        p.bias(p.attn(i).q_proj, lambda b: torch.cat([b[8:16], b[8:]]))


@bug(
    "linear",
    accepted=("weight",),
    words="transpos|layout|order|permut|row|weight",
    taps=("mlp.gate",),
    layers=(0,),
    model="qwen3",
    dtype="bfloat16",
)
def gate_reshaped_where_it_should_be_transposed(p: Patched) -> None:
    """aprender#1466: the file has [in, out], and it is read as [out, in]."""
    p.weight(p.mlp(0).gate_proj, lambda w: w.t().reshape(w.shape))


@bug(
    "linear",
    accepted=("weight", "rope", "heads"),
    words="permut|order|row|interleav|layout|GGUF|head",
    taps=("attn.k_proj",),
    model="llama",
)
def rows_of_k_permuted_by_the_size_of_a_group(p: Patched) -> None:
    """llama.cpp#3364: permuted for four heads by the converter, and back for 8 // 4 of them."""

    def change(w):
        permuted = w.view(4, 2, -1, 64).swapaxes(1, 2).reshape(w.shape)
        return permuted.view(2, -1, 2, 64).swapaxes(1, 2).reshape(w.shape)

    for i, _ in p.layers():
        p.weight(p.attn(i).k_proj, change)


@bug(
    "linear",
    accepted=("weight", "activation"),
    words="swap|exchang|up|gate",
    taps=("mlp.gate", "mlp.up"),
    layers=(3, 4, 5),
    model="llama-deep",
    tp=2,
)
def second_stage_loads_up_before_gate(p: Patched) -> None:
    """nntrainer#4194: by their order in the file, which its writer had turned round."""
    for i in (3, 4, 5):
        mlp = p.mlp(i)
        mlp.gate_proj.weight, mlp.up_proj.weight = mlp.up_proj.weight, mlp.gate_proj.weight


@bug(
    "linear",
    accepted=("weight", "norm"),
    words="layer|other|weight",
    taps=("attn_norm",),
    layers=(3, 4, 5),
    model="qwen2-deep",
)
def second_stage_has_the_norms_of_the_first(p: Patched) -> None:
    """tt-metal#54884: what has one dimension is looked up by the stage's own number of the layer."""
    for i in (3, 4, 5):
        p.weight(
            p.decoder.layers[i].input_layernorm,
            lambda w, i=i: p.full.model.layers[i - 3].input_layernorm.weight.detach().clone(),
        )
