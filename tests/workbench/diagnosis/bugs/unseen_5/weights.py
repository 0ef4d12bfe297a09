"""Weights and biases: loading, layout, packing, folding."""

from __future__ import annotations

import torch

from tests.workbench.diagnosis.bugs.bug import bug
from tests.workbench.diagnosis.bugs.patched import Patched


@bug(
    "weights",
    accepted=("weight",),
    words="row|permut|order|interleav|weight",
    taps=("attn.v_proj",),
    model="llama",
    tp=2,
)
def values_permuted_with_the_keys_by_the_converter(p: Patched) -> None:
    """Only what is rotated has to go from neighbours to halves."""
    for i, _ in p.layers():
        size = p.attn(i).head_dim
        p.weight(
            p.attn(i).v_proj,
            lambda w, size=size: w.view(-1, size // 2, 2, w.shape[1]).transpose(1, 2).reshape(w.shape),
        )


@bug(
    "weights",
    accepted=("weight", "precision"),
    words="weight|checkpoint|float16|bytes",
    taps=("mlp.gate",),
    layers=(1,),
    model="qwen2-untied",
)
def bytes_of_bfloat16_read_as_float16(p: Patched) -> None:
    p.weight(p.mlp(1).gate_proj, lambda w: w.bfloat16().view(torch.float16).float())


@bug(
    "weights",
    accepted=("weight",),
    words="weight|order|permut|column|row|checkpoint",
    taps=("attn.o_proj",),
    model="llama-mha",
    dtype="bfloat16",
)
def consolidated_shards_of_o_joined_below_each_other(p: Patched) -> None:
    """Two files of half the columns each, read one behind the other into the same memory."""
    for i, _ in p.layers():
        p.weight(p.attn(i).o_proj, lambda w: torch.cat(w.chunk(2, 1)).reshape(w.shape))


@bug(
    "weights",
    accepted=("weight",),
    words="row|order|permut|weight",
    taps=("mlp.gate", "mlp.up"),
    model="mistral-full",
)
def outputs_of_each_eight_left_in_their_packing_order(p: Patched) -> None:
    """Eight nibbles of a word are stored as 0 2 4 6 1 3 5 7, and unpacked as they come."""
    packing = torch.tensor([0, 2, 4, 6, 1, 3, 5, 7])
    for i, _ in p.layers():
        for side in (p.mlp(i).gate_proj, p.mlp(i).up_proj):
            p.weight(side, lambda w: w.unflatten(0, (-1, 8))[:, packing].flatten(0, 1))


@bug(
    "weights",
    accepted=("weight", "scale", "norm"),
    words="weight|norm|column|scale",
    taps=("mlp.gate", "mlp.up"),
    model="llama",
    dtype="bfloat16",
)
def norm_folded_into_the_products_and_still_applied(p: Patched) -> None:
    for i, layer in p.layers():
        for side in (p.mlp(i).gate_proj, p.mlp(i).up_proj):
            p.weight(side, lambda w, norm=layer.post_attention_layernorm: w * norm.weight.detach())


@bug(
    "weights",
    accepted=("heads", "weight"),
    words="head|order|permut|row|group",
    taps=("attn.q_proj",),
    model="llama",
    dtype="bfloat16",
)
def query_heads_left_with_their_groups_innermost(p: Patched) -> None:
    """One query of each KV head after the other, as another framework stores them."""
    for i, _ in p.layers():
        p.weight(p.attn(i).q_proj, lambda w: w.view(4, 2, -1, w.shape[1]).transpose(0, 1).reshape(w.shape))


@bug(
    "bias",
    accepted=("bias", "weight", "scale"),
    words="bias|scale|factor|times",
    taps=("attn.q_proj",),
    model="qwen2-tied",
)
def scale_folded_into_the_weight_of_q_but_not_into_its_bias(p: Patched) -> None:
    for i, _ in p.layers():
        p.weight(p.attn(i).q_proj, lambda w: w * 8**-0.5)
    p.attention(scale=lambda s, scaling: s)


@bug(
    "bias",
    accepted=("bias",),
    words="bias",
    taps=("mlp.gate",),
    model="llama-bias",
    tp=2,
)
def gate_takes_the_bias_of_up(p: Patched) -> None:
    for _, layer in p.layers():
        p.bias(layer.mlp.gate_proj, lambda b, mlp=layer.mlp: mlp.up_proj.bias.detach().clone())
