"""What each rank loads."""

from __future__ import annotations

import torch

from tests.workbench.diagnosis.bugs.bug import bug
from tests.workbench.diagnosis.bugs.patched import Patched


def _rows(p, side, source, rows):
    """`side` of this rank made of these rows of the whole model's `source`, its bias too."""
    p.weight(side, lambda w: source.weight.detach()[rows].clone())
    if side.bias is not None:
        p.bias(side, lambda b: source.bias.detach()[rows].clone())


@bug(
    "sharding",
    accepted=("sharding", "weight", "heads"),
    words="rank|shard|column|offset|head|late|shift",
    taps=("attn.o_proj.partial", "attn.o_proj"),
    ranks=(2,),
    model="llama-mha",
    tp=4,
)
def rank_2_begins_half_a_head_late_in_o(p: Patched) -> None:
    if p.rank == 2:
        for i, _ in p.layers():
            whole = p.full.model.layers[i].self_attn.o_proj.weight.detach()
            p.weight(p.attn(i).o_proj, lambda w, whole=whole: whole[:, 36:52].clone())


@bug(
    "sharding",
    accepted=("sharding", "weight"),
    words="rank|shard|layer|other|weight",
    taps=("mlp.gate", "mlp.up"),
    layers=(1, 2),
    ranks=(1,),
    model="qwen3-kv4",
    dtype="bfloat16",
    tp=2,
)
def rank_1_exchanges_the_mlps_of_two_layers(p: Patched) -> None:
    """Its files were numbered in another order."""
    if p.rank == 1:
        one, two = p.mlp(1), p.mlp(2)
        for name in ("gate_proj", "up_proj", "down_proj"):
            first, second = getattr(one, name), getattr(two, name)
            first.weight, second.weight = second.weight, first.weight


@bug(
    "bias",
    accepted=("bias", "reduce", "sharding"),
    words="bias",
    taps=("attn.o_proj",),
    model="llama-bias",
    tp=2,
)
def halves_of_the_bias_of_o_both_added_to_its_first_columns(p: Patched) -> None:
    """It was cut with the inputs, and each rank adds its half at the beginning."""
    for i, _ in p.layers():
        p.bias(p.attn(i).o_proj, lambda b: torch.cat([b[:32] + b[32:], torch.zeros_like(b[32:])]))


@bug(
    "sharding",
    accepted=("sharding", "weight", "heads"),
    words="head|order|revers|exchang|swap|permut|rank",
    taps=("attn.k_proj", "attn.v_proj"),
    heads=(2, 3),
    ranks=(1,),
    model="llama",
    tp=2,
)
def rank_1_loads_its_two_kv_heads_from_the_last(p: Patched) -> None:
    if p.rank == 1:
        for i, _ in p.layers():
            for side in (p.attn(i).k_proj, p.attn(i).v_proj):
                p.weight(side, lambda w: w.roll(8, 0))


@bug(
    "sharding",
    accepted=("sharding", "weight", "heads", "bias"),
    words="rank|shard|head|exchang|other|swap|order",
    taps=("attn.q_proj",),
    ranks=(1, 2),
    model="qwen2-kv8",
    dtype="bfloat16",
    tp=4,
)
def ranks_numbered_across_two_nodes_for_the_queries_alone(p: Patched) -> None:
    """0 2 1 3, which keys and values do not know."""
    first = 16 * (0, 2, 1, 3)[p.rank]
    for i, _ in p.layers():
        _rows(p, p.attn(i).q_proj, p.full.model.layers[i].self_attn.q_proj, slice(first, first + 16))


@bug(
    "sharding",
    accepted=("sharding", "weight"),
    words="rank|shard|row|offset|begin|shift|order|unit",
    taps=("mlp.up",),
    ranks=(1, 3),
    model="llama",
    tp=4,
)
def shards_of_up_begin_at_whole_tiles_of_sixteen(p: Patched) -> None:
    """96 units on four ranks begin at 0, 24, 48, 72, and here at 0, 16, 48, 64."""
    first = 24 * p.rank // 16 * 16
    for i, _ in p.layers():
        _rows(p, p.mlp(i).up_proj, p.full.model.layers[i].mlp.up_proj, slice(first, first + 24))


@bug(
    "sharding",
    accepted=("weight", "scale", "sharding", "reduce"),
    words="twice|double|times|factor|scale|2|sum|replica",
    taps=("attn.v_proj",),
    model="qwen2-tied",
    tp=4,
)
def replicated_values_summed_over_their_replicas(p: Patched) -> None:
    """When the shards were gathered for a change of layout: each KV head is on two ranks."""
    for i, _ in p.layers():
        p.weight(p.attn(i).v_proj, lambda w: 2 * w)
        p.bias(p.attn(i).v_proj, lambda b: 2 * b)
