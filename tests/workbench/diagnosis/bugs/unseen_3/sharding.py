"""What the ranks hold: shards of fused, quantised, adapted, replicated weights, and each rank's own configuration."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.workbench.diagnosis.bugs.bug import QKV, bug
from tests.workbench.diagnosis.bugs.patched import Patched


def _whole(p: Patched, i: int, name: str) -> Any:
    """The unsharded linear layer."""
    layer = p.full.model.layers[i]
    return getattr(layer.self_attn if hasattr(layer.self_attn, name) else layer.mlp, name)


@bug(
    "sharding",
    accepted=("sharding", "heads", "weight"),
    words="rank|head|shard|replica|row",
    taps=("attn.v_proj",),
    ranks=(1, 2),
    model="qwen2-tied",
    tp=4,
)
def replicas_of_v_dealt_by_modulo_those_of_k_by_division(p: Patched) -> None:
    rows = slice(p.rank % 2 * 8, p.rank % 2 * 8 + 8)
    for i, _ in p.layers():
        whole = _whole(p, i, "v_proj")
        p.weight(p.attn(i).v_proj, lambda _, whole=whole: whole.weight.detach()[rows].clone())
        p.bias(p.attn(i).v_proj, lambda _, whole=whole: whole.bias.detach()[rows].clone())


@bug(
    "sharding",
    accepted=("sharding", "weight"),
    words="rank|shard|order|exchang|swap",
    taps=("mlp.gate", "mlp.up"),
    ranks=(1, 2),
    model="llama",
    dtype="bfloat16",
    tp=4,
)
def mesh_of_two_by_two_counted_column_first(p: Patched) -> None:
    """Ranks 1 and 2 hold each other's rows of gate and up, and their own columns of down."""
    at = (0, 2, 1, 3)[p.rank] * 24
    for i, _ in p.layers():
        for name in ("gate_proj", "up_proj"):
            whole = _whole(p, i, name).weight.detach()
            p.weight(getattr(p.mlp(i), name), lambda _, whole=whole: whole[at : at + 24].clone())


@bug(
    "sharding",
    accepted=("norm", "weight", "sharding"),
    words="weight|shard|half|halves|repeat",
    taps=("attn.q_norm", "attn.k_norm"),
    model="qwen3",
    tp=2,
)
def weight_of_the_head_norms_cut_among_the_ranks(p: Patched) -> None:
    """Each takes its half of the head's dimensions, and broadcasts it over both."""
    for i, _ in p.layers():
        for norm in (p.attn(i).q_norm, p.attn(i).k_norm):
            p.weight(norm, lambda w: w.chunk(2)[p.rank].repeat(2))


@bug(
    "sharding",
    accepted=("sharding", "weight", "scale"),
    words="rank|shard|scale|group|factor",
    taps=("mlp.down.partial", "mlp.down"),
    ranks=(1,),
    model="mistral-full",
    tp=2,
)
def group_scales_of_down_are_rank_0_s_on_both(p: Patched) -> None:
    """Row-parallel weights in groups of 16 inputs: the scales were loaded without an offset."""

    def scales(w: Tensor) -> Tensor:
        return w.view(len(w), -1, 16).abs().amax(-1).repeat_interleave(16, 1)

    if p.rank == 1:
        for i, _ in p.layers():
            first = _whole(p, i, "down_proj").weight.detach()[:, :48]
            p.weight(p.mlp(i).down_proj, lambda w, first=first: w / scales(w) * scales(first))


@bug(
    "sharding",
    accepted=("sharding", "weight"),
    words="rank|shard|low.rank|adapter|LoRA",
    taps=("attn.o_proj.partial", "attn.o_proj"),
    layers=(2,),
    ranks=(1,),
    model="llama",
    tp=2,
)
def rank_1_merges_the_adapter_s_columns_of_rank_0(p: Patched) -> None:
    generator = torch.Generator().manual_seed(5)
    a = torch.randn(4, 64, generator=generator) / 8
    b = torch.randn(64, 4, generator=generator) / 4
    if p.rank == 1:
        p.weight(p.attn(2).o_proj, lambda w: w + b @ (a[:, :32] - a[:, 32:]))


@bug(
    "sharding",
    accepted=("norm", "sharding"),
    words="eps",
    taps=("attn_norm",),
    ranks=(1,),
    model="qwen2-tied",
    tp=2,
)
def worker_of_rank_1_keeps_the_epsilon_of_its_class(p: Patched) -> None:
    if p.rank == 1:
        for name, module in p.decoder.named_modules():
            if name.endswith("norm"):
                module.variance_epsilon = 1e-3


@bug(
    "sharding",
    accepted=("mask", "sharding"),
    words="mask|causal|future",
    taps=("attn.scores",),
    ranks=(1,),
    model="qwen3",
    tp=2,
)
def mask_never_reaches_rank_1(p: Patched) -> None:
    if p.rank == 1:
        p.attention(allow=lambda allowed: allowed | True)


@bug(
    "sharding",
    accepted=("sharding", "weight", "heads"),
    words="fused|pack|qkv|shard|order|split|row|q_proj|rank",
    taps=QKV,
    model="llama",
    tp=2,
)
def packed_qkv_cut_in_two_before_it_is_taken_apart(p: Patched) -> None:
    for i, _ in p.layers():
        names = ("q_proj", "k_proj", "v_proj")
        packed = torch.cat([_whole(p, i, name).weight.detach() for name in names])
        sides = packed.chunk(2)[p.rank].split([32, 16, 16])
        for name, mine in zip(names, sides, strict=True):
            p.weight(getattr(p.attn(i), name), lambda _, mine=mine: mine.clone())
