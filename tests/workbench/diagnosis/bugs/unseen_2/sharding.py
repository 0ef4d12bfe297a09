"""Tensor parallelism: shards off by something, stale or squeezed sums, a worker with another configuration."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.workbench.diagnosis.bugs.bug import CACHES, ROTATED, bug
from tests.workbench.diagnosis.bugs.patched import Patched


@bug(
    "sharding",
    accepted=("reduce", "sharding"),
    words="reduc|sum|partial|layer|stale",
    taps=("attn.o_proj",),
    layers=(2,),
    step=1,
    model="llama",
    tp=2,
)
def decode_takes_the_sum_of_the_layer_before_from_the_buffer(p: Patched) -> None:
    """The captured graph does not wait: what is read is what the buffer held."""
    before, late = p.attn(1).o_proj, p.attn(2).o_proj
    held: list[Tensor] = []

    def keep(partial: Tensor, known: Any = before.reduce) -> Tensor:
        held[:] = [known(partial)]
        return held[0]

    def stale(partial: Tensor, known: Any = late.reduce) -> Tensor:
        whole: Tensor = known(partial)
        return held[0] if p.decode else whole

    before.reduce, late.reduce = keep, stale


@bug(
    "sharding",
    accepted=("sharding", "weight"),
    words="rank|shard|row|moved|shift|offset",
    taps=("mlp.up",),
    ranks=(1,),
    model="llama",
    tp=2,
)
def rank_1_begins_with_the_last_row_of_rank_0(p: Patched) -> None:
    if p.rank == 1:
        for i, layer in p.layers():
            whole = p.full.model.layers[i].mlp.up_proj.weight
            p.weight(layer.mlp.up_proj, lambda _, whole=whole: whole[47:95])


@bug(
    "sharding",
    accepted=("sharding", "weight", "heads"),
    words="rank|shard|column|head|moved|order|shift",
    taps=("attn.o_proj.partial", "attn.o_proj"),
    layers=(1,),
    model="mistral-full",
    tp=2,
)
def columns_of_o_begin_one_head_late_and_wrap_around(p: Patched) -> None:
    dim, heads = 16, 8 // p.tp
    columns = (torch.arange(heads * dim) + (p.rank * heads + 1) * dim) % (8 * dim)
    p.weight(p.attn(1).o_proj, lambda _: p.full.model.layers[1].self_attn.o_proj.weight[:, columns])


@bug(
    "sharding",
    accepted=("precision", "reduce"),
    words="precision|round|quant|bit|reduc",
    taps=("mlp.down",),
    model="qwen3",
    tp=2,
)
def partial_sums_sent_in_eight_bits(p: Patched) -> None:
    def reduce(partial: Tensor, known: Any) -> Tensor:
        scale = partial.abs().amax(-1, keepdim=True) / 127
        whole: Tensor = known((partial / scale).round() * scale)
        return whole

    for _, layer in p.layers():
        down = layer.mlp.down_proj
        down.reduce = lambda partial, known=down.reduce: reduce(partial, known)


@bug(
    "rope",
    accepted=("rope",),
    words="frequenc|theta|base|angle",
    taps=ROTATED,
    ranks=(1,),
    model="qwen3",
    tp=2,
)
def worker_of_rank_1_has_the_default_theta(p: Patched) -> None:
    """Its configuration was built afresh, without the checkpoint's."""
    if p.rank == 1:
        p.frequencies(lambda inv: 1e4 ** -(torch.arange(0, 16, 2) / 16))


@bug(
    "cache",
    accepted=("cache",),
    words="row|slot|cache|overwrit",
    taps=CACHES,
    ranks=(1,),
    step=1,
    model="llama",
    tp=2,
)
def slot_of_the_new_row_never_sent_to_rank_1(p: Patched) -> None:
    """The slot's number stays 0 there: each decode step's row is written over the first one, its own slot is empty."""

    def first(rows: Tensor) -> Tensor:
        rows = rows.clone()
        rows[:, :, 0] = rows[:, :, -1]
        rows[:, :, p.model.prompt_lengths[p.seq] :] = 0
        return rows

    if p.rank == 1:
        p.cache(read=lambda k, v: (first(k), first(v)) if p.decode else (k, v))


@bug(
    "vocabulary",
    accepted=("embedding", "sharding", "reduce"),
    words="embed|rank|id|row|sum|vocab",
    taps=("embed",),
    model="llama",
    tp=2,
)
def rows_of_foreign_ids_not_zeroed_before_the_sum(p: Patched) -> None:
    """An id of the other rank is clamped into the own rows, and that row is added."""
    table = p.decoder.embed_tokens

    def forward(ids: Tensor) -> Tensor:
        local = (ids - table.first).clamp(0, table.weight.shape[0] - 1)
        whole: Tensor = p.ring.sum(p.rank, torch.nn.functional.embedding(local, table.weight))
        return whole

    table.forward = forward


@bug(
    "vocabulary",
    accepted=("head", "weight"),
    words="head|embed|tied|weight",
    taps=("logits",),
    step=1,
    model="qwen2-untied",
)
def decode_graph_captured_with_a_tied_head(p: Patched) -> None:
    table = p.decoder.embed_tokens

    def around(forward: Any, x: Tensor) -> Tensor:
        return torch.nn.functional.linear(x, table.weight) if p.decode else forward(x)

    p.wrap(p.model.lm_head, around)
