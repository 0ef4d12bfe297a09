"""Weights: loading, names, layouts, biases."""

from __future__ import annotations

import torch

from tests.workbench.diagnosis.bugs.bug import bug
from tests.workbench.diagnosis.bugs.patched import Patched


def _halves_from_neighbours(rows, size):
    """Rows of each head as if they were interleaved, put into halves."""
    return rows.unflatten(0, (-1, size // 2, 2)).transpose(1, 2).flatten(0, 2).clone()


@bug(
    "linear",
    accepted=("weight",),
    words="weight|initial|never|loaded|random|small|other",
    taps=("attn.k_proj", "attn.v_proj"),
    layers=(4,),
    model="llama-deep",
    dtype="bfloat16",
)
def keys_and_values_of_one_layer_left_at_their_initialisation(p: Patched) -> None:
    for side in (p.attn(4).k_proj, p.attn(4).v_proj):
        p.weight(side, lambda w: 0.02 * torch.randn_like(w))


@bug(
    "linear",
    accepted=("weight", "heads", "rope"),
    words="order|permut|interleav|row|rope|layout",
    taps=("attn.q_proj", "attn.k_proj"),
    model="qwen2-untied",
)
def rows_unpermuted_as_if_qwen_were_llama(p: Patched) -> None:
    """GGUF files of Qwen keep q and k in halves; biases too are moved."""
    for i, _ in p.layers():
        attn = p.attn(i)
        for side in (attn.q_proj, attn.k_proj):
            p.weight(side, lambda w, size=attn.head_dim: _halves_from_neighbours(w, size))
            p.bias(side, lambda b, size=attn.head_dim: _halves_from_neighbours(b, size))


@bug(
    "linear",
    accepted=("weight",),
    words="transpos",
    taps=("attn.k_proj", "attn.v_proj"),
    model="llama-mha",
)
def keys_and_values_left_transposed_where_they_are_square(p: Patched) -> None:
    for i, _ in p.layers():
        for side in (p.attn(i).k_proj, p.attn(i).v_proj):
            p.weight(side, lambda w: w.t().contiguous())


@bug(
    "linear",
    accepted=("weight",),
    words="layer|other|last|weight",
    taps=("mlp.down",),
    layers=(0, 1),
    model="qwen3",
)
def loop_gives_every_layer_the_down_of_the_last(p: Patched) -> None:
    """A function made in a loop sees the loop's last value."""
    last = p.mlp(2).down_proj.weight
    for i in (0, 1):
        p.weight(p.mlp(i).down_proj, lambda w: last.clone())


@bug(
    "linear",
    accepted=("weight", "heads"),
    words="order|permut|column|head|dimension|layout",
    taps=("attn.o_proj",),
    layers=(2,),
    model="mistral-full",
    dtype="bfloat16",
)
def columns_of_o_left_with_the_dimension_outside(p: Patched) -> None:
    p.weight(
        p.attn(2).o_proj,
        lambda w: w.unflatten(1, (-1, p.attn(2).head_dim)).transpose(1, 2).flatten(1).clone(),
    )


@bug(
    "bias",
    accepted=("bias",),
    words="bias",
    taps=("mlp.gate", "mlp.up"),
    model="llama-bias",
)
def mlp_built_without_biases(p: Patched) -> None:
    for i, _ in p.layers():
        mlp = p.mlp(i)
        for side in (mlp.gate_proj, mlp.up_proj, mlp.down_proj):
            side.bias = None


@bug(
    "bias",
    accepted=("bias",),
    words="bias",
    taps=("attn.k_proj", "attn.v_proj"),
    layers=(0,),
    model="qwen2-tied",
)
def first_layer_loads_the_bias_of_q_alone(p: Patched) -> None:
    for side in (p.attn(0).k_proj, p.attn(0).v_proj):
        p.bias(side, torch.zeros_like)
