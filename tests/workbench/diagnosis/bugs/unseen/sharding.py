"""Tensor parallelism: which rows and columns a rank takes, and what becomes of the sums."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.workbench.diagnosis.bugs.bug import bug
from tests.workbench.diagnosis.bugs.patched import Patched

O_PROJ = ("attn.o_proj.partial", "attn.o_proj")
DOWN = ("mlp.down.partial", "mlp.down")


def _whole(p: Patched, i: int) -> Any:
    return p.full.model.layers[i]


@bug(
    "sharding",
    accepted=("sharding", "weight"),
    words="rank|column|shard|moved",
    taps=O_PROJ,
    model="llama",
    tp=2,
)
def o_columns_counted_from_the_last_rank(p: Patched) -> None:
    for i, layer in p.layers():
        columns = _whole(p, i).self_attn.o_proj.weight.chunk(p.tp, 1)
        p.weight(layer.self_attn.o_proj, lambda _, columns=columns: columns[p.tp - 1 - p.rank])


@bug(
    "sharding",
    accepted=("sharding", "weight"),
    words="stripe|moved|interleav|strid|shard|permut|order|column",
    taps=("mlp.gate",),
    model="qwen3",
    tp=2,
)
def gate_dealt_row_by_row_up_in_blocks(p: Patched) -> None:
    for i, layer in p.layers():
        rows = _whole(p, i).mlp.gate_proj.weight[p.rank :: p.tp]
        p.weight(layer.mlp.gate_proj, lambda _, rows=rows: rows)


@bug(
    "sharding",
    accepted=("sharding", "heads", "weight"),
    words="head|moved|order|shard|rank",
    taps=("attn.q_proj",),
    model="qwen2-tied",
    tp=2,
)
def query_heads_dealt_in_turn_kv_heads_in_blocks(p: Patched) -> None:
    for i, layer in p.layers():
        whole, attn = _whole(p, i).self_attn, layer.self_attn
        rows = torch.arange(64).view(8, 8)[p.rank :: p.tp].flatten()
        p.weight(attn.q_proj, lambda _, whole=whole, rows=rows: whole.q_proj.weight[rows])
        p.bias(attn.q_proj, lambda _, whole=whole, rows=rows: whole.q_proj.bias[rows])
        p.weight(attn.o_proj, lambda _, whole=whole, rows=rows: whole.o_proj.weight[:, rows])


@bug(
    "sharding",
    accepted=("sharding", "heads", "weight"),
    words="head|rank|replica|shard",
    taps=("attn.k_proj", "attn.v_proj"),
    ranks=(1, 2),
    model="qwen2-tied",
    tp=4,
)
def replicated_kv_head_is_rank_modulo_heads(p: Patched) -> None:
    """Four ranks, two KV heads: 0 1 0 1 instead of 0 0 1 1."""
    head = p.rank % 2
    for i, layer in p.layers():
        whole, attn = _whole(p, i).self_attn, layer.self_attn
        for full, module in ((whole.k_proj, attn.k_proj), (whole.v_proj, attn.v_proj)):
            p.weight(module, lambda _, full=full: full.weight[8 * head : 8 * head + 8])
            p.bias(module, lambda _, full=full: full.bias[8 * head : 8 * head + 8])


@bug(
    "sharding",
    accepted=("reduce",),
    words="reduc|partial|sum",
    taps=("attn.o_proj",),
    ranks=(1,),
    step=1,
    model="llama",
    tp=2,
)
def rank_1_keeps_its_partial_sum_in_decode(p: Patched) -> None:
    def reduce(known: Any, partial: Tensor) -> Tensor:
        whole: Tensor = known(partial)
        return partial if p.rank == 1 and p.decode else whole

    for _, layer in p.layers():
        o = layer.self_attn.o_proj
        o.reduce = lambda partial, known=o.reduce: reduce(known, partial)


@bug(
    "sharding",
    accepted=("reduce", "sharding"),
    words="reduc|partial|sum|rank",
    taps=("mlp.down",),
    layers=(2,),
    model="qwen3",
    tp=2,
)
def sum_reads_the_buffer_before_rank_1_has_written(p: Patched) -> None:
    """What lies in the buffer is rank 1's partial sum of the layer before."""
    if p.rank != 1:
        return
    before, late = p.mlp(1).down_proj, p.mlp(2).down_proj
    held: list[Tensor] = []

    def keep(partial: Tensor, known: Any = before.reduce) -> Tensor:
        held[:] = [partial]
        return known(partial)

    before.reduce = keep
    late.reduce = lambda partial, known=late.reduce: known(held[0])


@bug(
    "sharding",
    accepted=("sharding", "weight"),
    words="column|shard|rank|moved|offset|shift",
    taps=DOWN,  # the sum is wrong on both ranks, though one alone brings the error
    model="llama",
    tp=2,
)
def down_cut_at_the_padded_width_gate_and_up_are_not(p: Patched) -> None:
    """96 columns padded to 128 are 64 a rank: rank 1 begins at 64 instead of 48."""
    if p.rank == 1:
        for i, layer in p.layers():
            columns = _whole(p, i).mlp.down_proj.weight[:, 64:]
            padded = torch.nn.functional.pad(columns, (0, 16))
            p.weight(layer.mlp.down_proj, lambda _, padded=padded: padded)


@bug(
    "sharding",
    accepted=("sharding", "weight"),
    words="rank",
    taps=("mlp.up",),
    layers=(2,),
    ranks=(1,),
    model="qwen3",
    tp=2,
)
def last_layer_s_up_cut_without_its_rank(p: Patched) -> None:
    p.weight(p.mlp(2).up_proj, lambda _: _whole(p, 2).mlp.up_proj.weight[:48])


@bug(
    "sharding",
    accepted=("sharding", "weight"),
    words="gate|up|swap|exchang|moved|order",
    taps=("mlp.gate", "mlp.up"),
    ranks=(1,),
    model="mistral-full",
    tp=2,
)
def rank_1_reads_its_half_of_the_pack_backwards(p: Patched) -> None:
    if p.rank == 1:
        for _, layer in p.layers():
            mlp = layer.mlp
            mlp.gate_proj.weight, mlp.up_proj.weight = mlp.up_proj.weight, mlp.gate_proj.weight


@bug(
    "sharding",
    accepted=("reduce", "sharding"),
    words="reduc|partial|sum|rank",
    taps=("mlp.down",),
    layers=(1,),
    model="llama",
    tp=2,
)
def rank_1_left_out_of_one_layer_s_sum(p: Patched) -> None:
    down = p.mlp(1).down_proj
    down.reduce = lambda partial, known=down.reduce: known(partial * (p.rank == 0))


@bug(
    "sharding",
    accepted=("scale", "scores"),
    words="scale|factor|sqrt|√|head_dim",
    taps=("attn.scores",),
    model="llama",
    tp=2,
)
def head_dim_taken_from_the_local_number_of_heads(p: Patched) -> None:
    """hidden / (heads / tp): twice too large, in the scale alone."""
    for _, layer in p.layers():
        layer.self_attn.scaling = (64 // (8 // p.tp)) ** -0.5


@bug(
    "sharding",
    accepted=("norm", "weight", "sharding"),
    words="norm|weight|order|moved|rank",
    taps=("final_norm",),
    model="qwen3",
    tp=2,
)
def final_norm_gathered_in_the_wrong_order(p: Patched) -> None:
    p.weight(p.decoder.norm, lambda weight: weight.roll(32))
