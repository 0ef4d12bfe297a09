"""Weights and biases: loading, names, layouts, updates."""

from __future__ import annotations

import torch

from tests.workbench.diagnosis.bugs.bug import QKV, bug
from tests.workbench.diagnosis.bugs.patched import Patched


def _drawn(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(9))


@bug(
    "linear",
    accepted=("weight",),
    words="adapter|LoRA|rank|weight|low.rank|differ|added|update|transpos",
    taps=("attn.q_proj",),
    model="llama",
)
def adapter_of_a_square_weight_merged_transposed(p: Patched) -> None:
    """The checkpoint holds it merged as it should be: here B A is taken off, and its transpose put in."""
    merged = 0.05 * _drawn(64, 2) @ _drawn(2, 64).flip(1)
    for i, _ in p.layers():
        p.weight(p.attn(i).q_proj, lambda w: w - merged + merged.t())


@bug(
    "linear",
    accepted=("weight", "precision"),
    words="weight|row|differ|half|part|other|update|last|unit|channel",
    taps=("mlp.gate",),
    layers=(2,),
    model="qwen3",
)
def update_of_one_gate_ended_half_way(p: Patched) -> None:
    """A trainer sent new weights; the rows from the 48th on are those of before."""

    def change(w):
        w[48:] += 0.02 * _drawn(48, 64)
        return w

    p.weight(p.mlp(2).gate_proj, change)


@bug(
    "linear",
    accepted=("weight", "layer", "layers"),
    words="layer|other|weight",
    taps=("mlp.gate", "mlp.up"),
    layers=(1,),
    model="llama-twelve",
)
def weights_of_layer_11_match_the_prefix_of_layer_1(p: Patched) -> None:
    """`layers.1` without the dot behind it: of the three layers that match the last is loaded."""
    for name in ("gate_proj", "up_proj", "down_proj"):
        last = getattr(p.mlp(11), name).weight.detach()
        p.weight(getattr(p.mlp(1), name), lambda w, last=last: last.clone())


@bug(
    "bias",
    accepted=("bias", "precision"),
    words="bias",
    taps=QKV,
    model="qwen2-untied",
)
def biases_quantised_with_the_rest(p: Patched) -> None:
    """To four bits, with one scale for each."""

    def change(b):
        step = b.abs().max() / 7
        return (b / step).round() * step

    for i, _ in p.layers():
        for name in ("q_proj", "k_proj", "v_proj"):
            p.bias(getattr(p.attn(i), name), change)


@bug(
    "bias",
    accepted=("bias", "sharding"),
    words="bias",
    taps=("attn.k_proj",),
    model="qwen2-tied",
    tp=2,
)
def bias_of_k_divided_by_the_ranks_as_if_it_were_summed(p: Patched) -> None:
    for i, _ in p.layers():
        p.bias(p.attn(i).k_proj, lambda b: b / p.tp)


@bug(
    "linear",
    accepted=("weight",),
    words="order|permut|transpos|layout|tile|block|weight|element",
    taps=("mlp.down",),
    model="mistral-full",
    dtype="bfloat16",
)
def tiles_of_down_left_transposed_by_a_repacking(p: Patched) -> None:
    """Sixteen by sixteen, as another kernel wants them."""

    def change(w):
        tiles = w.unflatten(1, (-1, 16)).unflatten(0, (-1, 16))
        return tiles.transpose(1, 3).flatten(2).flatten(0, 1)

    for i, _ in p.layers():
        p.weight(p.mlp(i).down_proj, change)
