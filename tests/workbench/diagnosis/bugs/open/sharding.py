"""Tensor parallelism: what each rank holds, what is summed."""

from __future__ import annotations

import torch
from torch import nn

from tests.workbench.diagnosis.bugs.bug import bug
from tests.workbench.diagnosis.bugs.patched import Patched


def _linear(p, i, name):
    layer = p.decoder.layers[i]
    return getattr(layer.self_attn if name in ("q_proj", "k_proj", "v_proj", "o_proj") else layer.mlp, name)


def _whole(p, i, name):
    layer = p.full.model.layers[i]
    owner = layer.self_attn if name in ("q_proj", "k_proj", "v_proj", "o_proj") else layer.mlp
    return getattr(owner, name).weight.detach()


@bug(
    "sharding",
    accepted=("sharding", "weight"),
    words="rank|shard",
    taps=("attn.o_proj.partial", "attn.o_proj"),
    ranks=(1,),
    layers=(1,),
    model="qwen3",
    tp=2,
)
def o_columns_of_rank_0(p: Patched) -> None:
    p.weight(p.attn(1).o_proj, lambda w: _whole(p, 1, "o_proj")[:, : w.shape[1]].clone())


@bug(
    "sharding",
    accepted=("sharding", "weight"),
    words="rank|shard",
    taps=("mlp.gate", "mlp.up"),
    ranks=(1, 2, 3),
    model="llama",
    tp=4,
)
def every_rank_loads_the_first_mlp_shard(p: Patched) -> None:
    for i, _ in p.layers():
        for name in ("gate_proj", "up_proj"):
            p.weight(_linear(p, i, name), lambda w, i=i, name=name: _whole(p, i, name)[: len(w)].clone())


@bug(
    "sharding",
    accepted=("reduce", "sharding"),
    words="reduce|sum|own partial",
    taps=("attn.o_proj",),
    model="llama",
    tp=2,
)
def o_never_reduced(p: Patched) -> None:
    for i, _ in p.layers():
        p.attn(i).o_proj.reduce = lambda partial: partial


@bug(
    "sharding",
    accepted=("reduce", "sharding"),
    words="reduce|sum|own partial",
    taps=("mlp.down",),
    layers=(2,),
    model="qwen2-tied",
    tp=2,
)
def last_down_never_reduced(p: Patched) -> None:
    p.mlp(2).down_proj.reduce = lambda partial: partial


@bug(
    "sharding",
    accepted=("reduce", "sharding", "scale"),
    words="mean|average|divid|half|1/|0\\.5",
    taps=("attn.o_proj",),
    layers=(1,),
    model="llama",
    tp=2,
)
def mean_in_place_of_the_sum(p: Patched) -> None:
    p.attn(1).o_proj.reduce = lambda partial: p.ring.sum(p.rank, partial) / p.tp


@bug(
    "sharding",
    accepted=("reduce", "sharding"),
    words="rank|twice|partial|sum|reduce",
    taps=("attn.o_proj",),
    layers=(2,),
    model="mistral-full",
    tp=2,
)
def the_first_partial_summed_twice(p: Patched) -> None:
    p.attn(2).o_proj.reduce = lambda partial: 2 * p.ring.gather(p.rank, partial)[0]


@bug(
    "sharding",
    accepted=("bias", "reduce"),
    words="bias|rank|tp|times|each",
    taps=("attn.o_proj",),
    model="llama-bias",
    tp=2,
)
def o_bias_added_on_each_rank(p: Patched) -> None:
    for i, _ in p.layers():
        p.bias(p.attn(i).o_proj, lambda b: 2 * b)


@bug(
    "sharding",
    accepted=("sharding", "weight", "activation"),
    words="fused|gate|up|shard|half|order|split|rows",
    taps=("mlp.gate", "mlp.up", "mlp.act"),
    model="qwen3",
    tp=2,
)
def fused_gate_and_up_cut_contiguously(p: Patched) -> None:
    for i, _ in p.layers():
        fused = torch.cat([_whole(p, i, "gate_proj"), _whole(p, i, "up_proj")])
        mine = fused[p.rank * 96 : (p.rank + 1) * 96]
        p.weight(p.mlp(i).gate_proj, lambda w, mine=mine: mine[:48].clone())
        p.weight(p.mlp(i).up_proj, lambda w, mine=mine: mine[48:].clone())


@bug(
    "sharding",
    accepted=("reduce", "precision"),
    words="round|precis|bfloat16|bf16|low|reduc",
    taps=("mlp.down",),
    model="llama",
    tp=2,
)
def reduced_in_bfloat16(p: Patched) -> None:
    for i, _ in p.layers():
        p.mlp(i).down_proj.reduce = lambda partial: p.ring.sum(p.rank, partial.bfloat16()).float()


@bug(
    "sharding",
    accepted=("sharding", "weight", "scale"),
    words="rank|times|factor|scal",
    taps=("attn.v_proj",),
    ranks=(1,),
    layers=(2,),
    model="llama",
    tp=2,
)
def one_rank_s_v_scaled(p: Patched) -> None:
    if p.rank == 1:
        p.weight(p.attn(2).v_proj, lambda w: 1.5 * w)


@bug(
    "sharding",
    accepted=("precision", "weight", "sharding"),
    words="rank|round|precis|bf16|bfloat16",
    taps=("mlp.gate",),
    ranks=(0,),
    model="qwen2-tied",
    tp=2,
)
def one_rank_s_gate_rounded(p: Patched) -> None:
    if p.rank == 0:
        for i, _ in p.layers():
            p.weight(p.mlp(i).gate_proj, lambda w: w.bfloat16().float())


@bug(
    "sharding",
    accepted=("sharding", "weight"),
    words="transpos|in.features|column|shard|partial|sum",
    taps=("attn.q_proj",),
    layers=(0, 1, 2),
    model="llama",
    tp=2,
)
def q_cut_along_its_inputs(p: Patched) -> None:
    for i, _ in p.layers():
        whole = _whole(p, i, "q_proj")

        def forward(forward, x, whole=whole):
            mine = slice(p.rank * 32, (p.rank + 1) * 32)
            return nn.functional.linear(x[..., mine], whole[:, mine])[..., mine]

        p.wrap(p.attn(i).q_proj, forward)


@bug(
    "sharding",
    accepted=("sharding", "weight", "heads"),
    words="head|order|interleav|rank|shard|stride|row",
    taps=("attn.q_proj",),
    model="llama",
    tp=2,
)
def query_heads_dealt_out_in_turn(p: Patched) -> None:
    for i, _ in p.layers():
        heads = _whole(p, i, "q_proj").view(8, -1, 64)
        p.weight(p.attn(i).q_proj, lambda w, heads=heads: heads[p.rank :: 2].reshape(w.shape).clone())
