"""Held out: tensor parallelism: what each rank holds, what is summed."""

from __future__ import annotations

import torch

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
    taps=("attn.q_proj",),
    ranks=(1,),
    model="llama",
    tp=2,
)
def q_shard_of_rank_0(p: Patched) -> None:
    for i, _ in p.layers():
        p.weight(p.attn(i).q_proj, lambda w, i=i: _whole(p, i, "q_proj")[: len(w)].clone())


@bug(
    "sharding",
    accepted=("reduce", "sharding"),
    words="reduce|sum|own partial",
    taps=("mlp.down",),
    layers=(0,),
    step=1,
    model="llama",
    tp=2,
)
def a_reduce_missing_in_decode(p: Patched) -> None:
    known = p.mlp(0).down_proj.reduce
    p.mlp(0).down_proj.reduce = lambda partial: partial if p.decode else known(partial)


@bug(
    "sharding",
    accepted=("reduce", "sharding", "scale"),
    words="reduce|twice|times|2|tp",
    taps=("mlp.down",),
    model="qwen3",
    tp=2,
)
def down_reduced_twice(p: Patched) -> None:
    for i, _ in p.layers():
        p.mlp(i).down_proj.reduce = lambda partial: p.ring.sum(p.rank, p.ring.sum(p.rank, partial))


@bug(
    "sharding",
    accepted=("reduce", "sharding"),
    words="rank|reduce|sum|own partial",
    taps=("attn.o_proj",),
    ranks=(1,),
    model="qwen2-tied",
    tp=2,
)
def one_rank_goes_on_with_its_partial(p: Patched) -> None:
    for i, _ in p.layers():
        known = p.attn(i).o_proj.reduce
        p.attn(i).o_proj.reduce = lambda partial, known=known: (known(partial), partial)[p.rank]


@bug(
    "sharding",
    accepted=("reduce", "sharding"),
    words="rank|reduce|sum|partial|missing|left out",
    taps=("mlp.down",),
    layers=(1,),
    model="llama",
    tp=4,
)
def one_rank_s_partial_left_out(p: Patched) -> None:
    p.mlp(1).down_proj.reduce = lambda partial: torch.stack(p.ring.gather(p.rank, partial)[:3]).sum(0)


@bug(
    "sharding",
    accepted=("bias", "reduce"),
    words="bias|rank|tp|times|each",
    taps=("mlp.down",),
    layers=(1,),
    model="llama-bias",
    tp=4,
)
def down_bias_added_on_each_rank(p: Patched) -> None:
    p.bias(p.mlp(1).down_proj, lambda b: 4 * b)


@bug(
    "sharding",
    accepted=("sharding", "weight"),
    words="rank|head|shard|order|swap|exchang",
    taps=("attn.k_proj", "attn.v_proj"),
    model="llama",
    tp=2,
)
def kv_shards_exchanged(p: Patched) -> None:
    for i, _ in p.layers():
        for name in ("k_proj", "v_proj"):
            whole = _whole(p, i, name)
            p.weight(
                _linear(p, i, name),
                lambda w, whole=whole: whole.roll(len(w), 0)[p.rank * len(w) :][: len(w)].clone(),
            )


@bug(
    "sharding",
    accepted=("sharding", "weight"),
    words="stride|column|order|interleav|shard|permut|every",
    taps=("attn.o_proj.partial", "attn.o_proj"),
    layers=(0,),
    model="llama",
    tp=2,
)
def o_columns_strided(p: Patched) -> None:
    p.weight(p.attn(0).o_proj, lambda w: _whole(p, 0, "o_proj")[:, p.rank :: 2].clone())


@bug(
    "sharding",
    accepted=("sharding", "weight"),
    words="rank|order|exchang|swap|shard",
    taps=("mlp.down.partial", "mlp.down"),
    layers=(2,),
    model="llama",
    tp=2,
)
def down_shards_exchanged(p: Patched) -> None:
    columns = slice(48, 96) if p.rank == 0 else slice(0, 48)
    p.weight(p.mlp(2).down_proj, lambda w: _whole(p, 2, "down_proj")[:, columns].clone())


@bug(
    "sharding",
    accepted=("sharding", "weight", "heads"),
    words="head|KV|rank|replic|shard",
    taps=("attn.k_proj", "attn.v_proj"),
    ranks=(2, 3),
    model="qwen2-tied",
    tp=4,
)
def second_kv_head_never_reaches_its_ranks(p: Patched) -> None:
    for i, _ in p.layers():
        for name in ("k_proj", "v_proj"):
            p.weight(_linear(p, i, name), lambda w, i=i, name=name: _whole(p, i, name)[: len(w)].clone())


@bug(
    "sharding",
    accepted=("sharding", "weight"),
    words="rank|zero|fill|load",
    taps=("mlp.up",),
    ranks=(3,),
    layers=(1,),
    model="llama",
    tp=4,
)
def one_rank_s_up_never_loaded(p: Patched) -> None:
    if p.rank == 3:
        p.weight(p.mlp(1).up_proj, torch.zeros_like)


@bug(
    "sharding",
    accepted=("sharding", "reduce", "input"),
    words="rank|input|stale|replica|disagree|differ",
    taps=("attn_norm", "mlp_norm"),
    layers=(1,),
    ranks=(1,),
    model="llama",
    tp=2,
)
def one_rank_s_copy_scaled(p: Patched) -> None:
    if p.rank == 1:
        p.output(p.decoder.layers[1].post_attention_layernorm, lambda y: y * 1.01)
