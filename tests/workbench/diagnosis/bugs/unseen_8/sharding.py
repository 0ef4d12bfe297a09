"""What each rank loads."""

from __future__ import annotations

import torch
from torch import nn

from tests.workbench.diagnosis.bugs.bug import bug
from tests.workbench.diagnosis.bugs.patched import Patched
from tests.workbench.diagnosis.bugs.sharded import bounds


def _rows(p, side, source, rows):
    """`side` of this rank made of these rows of the whole model's `source`, its bias too."""
    p.weight(side, lambda w: source.weight[rows].clone())
    if side.bias is not None:
        p.bias(side, lambda b: source.bias[rows].clone())


@bug(
    "sharding",
    accepted=("sharding", "weight", "heads"),
    words="rank|shard|head|replica|other|row",
    taps=("attn.k_proj", "attn.v_proj"),
    ranks=(1,),
    model="qwen3",
    tp=4,
)
def rank_1_takes_the_kv_head_of_its_own_number(p: Patched) -> None:
    """sglang#19086: two KV heads counted as max(1, 2 // 4) * 4, and the index clamped to the last."""
    if p.rank == 1:
        for i, _ in p.layers():
            whole, attn = p.full.model.layers[i].self_attn, p.attn(i)
            _rows(p, attn.k_proj, whole.k_proj, slice(16, 32))
            _rows(p, attn.v_proj, whole.v_proj, slice(16, 32))


@bug(
    "sharding",
    accepted=("sharding", "weight", "reduce", "input"),
    words="input|column|in_features|partial|sum|cut|shard|part|half",
    taps=("attn.v_proj",),
    model="llama-mha",
    tp=2,
)
def values_cut_along_their_inputs_and_never_summed(p: Patched) -> None:
    for i, _ in p.layers():
        value, mine = p.attn(i).v_proj, bounds(64, p.tp, p.rank)

        def forward(x, value=value, mine=mine):
            return nn.functional.linear(x[..., mine], value.weight[:, mine])

        value.forward = forward


@bug(
    "sharding",
    accepted=("sharding", "weight", "bias"),
    words="rank|shard",
    taps=("attn.v_proj",),
    ranks=(1, 2, 3),
    model="qwen2-kv8",
    dtype="bfloat16",
    tp=4,
)
def every_rank_loads_the_values_of_rank_0(p: Patched) -> None:
    """vllm-gguf-plugin#103, for the last part of the pack."""
    for i, _ in p.layers():
        _rows(p, p.attn(i).v_proj, p.full.model.layers[i].self_attn.v_proj, slice(0, 16))


@bug(
    "sharding",
    accepted=("sharding", "weight"),
    words="rank|shard|pack|fused|cut|split|contiguous|gate|order|row",
    taps=("mlp.gate", "mlp.up"),
    layers=(2,),
    model="mistral-full",
    dtype="bfloat16",
    tp=4,
)
def pack_of_gate_and_up_in_the_last_layer_cut_in_four(p: Patched) -> None:
    """Automodel#1324: 96 rows of gate and then 96 of up, cut without regard to where up begins."""
    whole = p.full.model.layers[2].mlp
    pack = torch.cat([whole.gate_proj.weight, whole.up_proj.weight]).detach()
    gate, up = pack[bounds(len(pack), p.tp, p.rank)].chunk(2)
    p.weight(p.mlp(2).gate_proj, lambda w: gate.clone())
    p.weight(p.mlp(2).up_proj, lambda w: up.clone())


@bug(
    "sharding",
    accepted=("sharding", "weight"),
    words="rank|shard|row|zero|missing|never|last|unit|channel|loaded",
    taps=("mlp.gate", "mlp.up"),
    ranks=(3,),
    model="qwen3-bias",
    dtype="bfloat16",
    tp=4,
)
def last_rank_misses_the_last_rows_of_gate_and_up(p: Patched) -> None:
    """sglang#9433"""

    def change(w):
        w[-8:] = 0
        return w

    if p.rank == 3:
        for i, _ in p.layers():
            p.weight(p.mlp(i).gate_proj, change)
            p.weight(p.mlp(i).up_proj, change)


@bug(
    "sharding",
    accepted=("sharding", "weight"),
    words="transpos|order|column|row|layout",
    taps=("attn.o_proj",),
    model="llama",
    tp=2,
)
def o_transposed_before_it_is_cut(p: Patched) -> None:
    """It is square, so nobody sees it by its shape."""
    for i, _ in p.layers():
        whole = p.full.model.layers[i].self_attn.o_proj.weight.detach()
        p.weight(p.attn(i).o_proj, lambda w, whole=whole: whole.t()[:, bounds(64, p.tp, p.rank)].clone())
