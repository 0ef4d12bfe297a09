"""What each rank loads: heads, columns, and the config it works by."""

from __future__ import annotations

import torch

from tests.workbench.diagnosis.bugs.bug import bug
from tests.workbench.diagnosis.bugs.patched import Patched, repeat
from tests.workbench.diagnosis.bugs.sharded import bounds


def _whole(p, i):
    layer = p.full.model.layers[i]
    return layer.self_attn, layer.mlp


def _kv_head_from(p, head):
    """k and v of this rank are those of KV head `head`."""
    for i, _ in p.layers():
        attn, (source, _) = p.attn(i), _whole(p, i)
        rows = slice(head * attn.head_dim, (head + 1) * attn.head_dim)
        for name in ("k_proj", "v_proj"):
            side, whole = getattr(attn, name), getattr(source, name)
            p.weight(side, lambda w, whole=whole, rows=rows: whole.weight[rows].clone())
            if side.bias is not None:
                p.bias(side, lambda b, whole=whole, rows=rows: whole.bias[rows].clone())


@bug(
    "sharding",
    accepted=("sharding", "weight", "heads"),
    words="rank|shard|revers|order|head",
    taps=("attn.q_proj",),
    model="llama",
    tp=4,
)
def ranks_take_their_query_heads_from_the_end(p: Patched) -> None:
    for i, _ in p.layers():
        whole = _whole(p, i)[0].q_proj.weight
        mine = bounds(len(whole), p.tp, p.tp - 1 - p.rank)
        p.weight(p.attn(i).q_proj, lambda w, whole=whole, mine=mine: whole[mine].clone())


@bug(
    "sharding",
    accepted=("sharding", "weight", "heads"),
    words="rank|shard|KV head|replica|head|order|modulo",
    taps=("attn.k_proj", "attn.v_proj"),
    ranks=(1, 2),
    model="qwen3",
    dtype="bfloat16",
    tp=4,
)
def replicas_of_the_kv_heads_dealt_in_turn(p: Patched) -> None:
    """Rank r holds head r % 2 in place of r // 2."""
    _kv_head_from(p, p.rank % 2)


@bug(
    "sharding",
    accepted=("sharding", "weight", "heads"),
    words="rank|shard|KV head|first|replica|head",
    taps=("attn.k_proj", "attn.v_proj"),
    ranks=(2, 3),
    model="qwen2-tied",
    tp=4,
)
def fewer_kv_heads_than_ranks_gives_all_the_first(p: Patched) -> None:
    """The number of heads by that of ranks is rounded down to 0, and so is every offset."""
    _kv_head_from(p, 0)


@bug(
    "sharding",
    accepted=("sharding", "weight"),
    words="rank|shard|column",
    taps=("mlp.down.partial", "mlp.down"),
    ranks=(1, 2, 3),
    model="llama",
    dtype="bfloat16",
    tp=4,
)
def every_rank_loads_the_first_columns_of_down(p: Patched) -> None:
    for i, _ in p.layers():
        whole = _whole(p, i)[1].down_proj.weight
        p.weight(p.mlp(i).down_proj, lambda w, whole=whole: whole[:, : w.shape[1]].clone())


@bug(
    "sharding",
    accepted=("sharding", "weight"),
    words="rank|shard|offset|row|shift|zero|padd",
    taps=("mlp.gate", "mlp.up"),
    ranks=(1, 2, 3),
    model="llama-mha",
    tp=4,
)
def mlp_cut_by_the_offsets_of_its_padded_width(p: Patched) -> None:
    """96 units are padded to 128: rank r begins at 32 r, and keeps 24."""
    for i, _ in p.layers():
        mlp, (_, source) = p.mlp(i), _whole(p, i)
        for side, whole in ((mlp.gate_proj, source.gate_proj), (mlp.up_proj, source.up_proj)):

            def change(w, whole=whole):
                padded = torch.cat([whole.weight, torch.zeros(32, w.shape[1])])
                return padded[p.rank * 32 : p.rank * 32 + len(w)].clone()

            p.weight(side, change)


@bug(
    "sharding",
    accepted=("sharding", "weight", "reduce"),
    words="rank|zero|shard|never|missing|partial",
    taps=("mlp.down.partial", "mlp.down"),
    ranks=(3,),
    model="qwen2-kv8",
    tp=4,
)
def rank_3_never_fills_its_down(p: Patched) -> None:
    if p.rank == 3:
        for i, _ in p.layers():
            p.weight(p.mlp(i).down_proj, torch.zeros_like)


@bug(
    "sharding",
    accepted=("sharding", "weight", "heads"),
    words="rank|shard|column|swap|exchang|head|order",
    taps=("attn.o_proj.partial", "attn.o_proj"),
    layers=(2,),
    model="qwen2-kv8",
    dtype="bfloat16",
    tp=2,
)
def columns_of_o_exchanged_between_the_ranks_in_the_last_layer(p: Patched) -> None:
    whole = _whole(p, 2)[0].o_proj.weight
    mine = bounds(whole.shape[1], p.tp, 1 - p.rank)
    p.weight(p.attn(2).o_proj, lambda w: whole[:, mine].clone())


@bug(
    "sharding",
    accepted=("sharding", "weight", "heads"),
    words="rank|shard|head|other|first|last|row",
    taps=("attn.q_proj",),
    heads=(3,),
    ranks=(0,),
    model="llama-mha",
    tp=2,
)
def last_query_head_of_rank_0_is_the_first_of_rank_1(p: Patched) -> None:
    if p.rank == 0:
        for i, _ in p.layers():
            size, whole = p.attn(i).head_dim, _whole(p, i)[0].q_proj.weight
            rows = torch.cat([whole[: 3 * size], whole[4 * size : 5 * size]])
            p.weight(p.attn(i).q_proj, lambda w, rows=rows: rows.clone())


@bug(
    "mask",
    accepted=("mask",),
    words="window",
    taps=("attn.scores",),
    ranks=(1,),
    model="mistral-window",
    tp=2,
)
def worker_of_rank_1_knows_no_window(p: Patched) -> None:
    def allow(allowed):
        new, keys = allowed.shape[-2:]
        return (torch.arange(keys - new, keys)[:, None] >= torch.arange(keys)).expand_as(allowed)

    if p.rank == 1:
        p.attention(allow=allow)


@bug(
    "attention",
    accepted=("scores", "scale"),
    words="scale|factor|sqrt|head_dim|times",
    taps=("attn.scores",),
    ranks=(1,),
    model="mistral-full",
    tp=2,
)
def rank_1_scales_by_the_width_over_the_heads(p: Patched) -> None:
    """Its config lost `head_dim`, which is 16 and not 64 / 8."""
    if p.rank == 1:
        p.attention(scale=lambda s, scaling: s * 8**-0.5)


@bug(
    "attention",
    accepted=("heads", "scores"),
    words="tile|repeat|interleav|order|KV head|h %",
    taps=("attn.scores",),
    layers=(1,),
    model="llama",
    dtype="bfloat16",
    tp=2,
)
def one_layer_tiles_the_local_kv_heads(p: Patched) -> None:
    def tile(kv, groups):
        return kv.repeat(1, groups, 1, 1) if kv.shape[1] > 1 else repeat(kv, groups)

    p.attention((1,), keys=tile, values=tile)
