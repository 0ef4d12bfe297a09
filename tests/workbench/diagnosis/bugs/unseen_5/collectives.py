"""Sums over the ranks."""

from __future__ import annotations

import torch

from tests.workbench.diagnosis.bugs.bug import bug
from tests.workbench.diagnosis.bugs.patched import Patched


@bug(
    "collectives",
    accepted=("reduce", "sharding"),
    words="rank|sum|order|slice|column|permut|shift|gather",
    taps=("attn.o_proj",),
    layers=(1,),
    model="llama",
    tp=4,
)
def slices_of_the_two_shot_sum_gathered_one_rank_late(p: Patched) -> None:
    """Each rank sums a quarter of the columns; the quarters come together one place too far."""
    p.attn(1).o_proj.reduce = lambda part: p.ring.sum(p.rank, part).roll(part.shape[-1] // p.tp, -1)


@bug(
    "collectives",
    accepted=("reduce",),
    words="sum|reduc|step before|stale|twice|added|buffer",
    taps=("mlp.down",),
    layers=(1,),
    step=2,
    model="qwen2-tied",
    tp=2,
)
def sum_added_onto_that_of_the_decode_step_before(p: Patched) -> None:
    """The graph's buffer is not cleared."""
    buffers: dict[int, torch.Tensor] = {}

    def reduce(part):
        total = p.ring.sum(p.rank, part)
        if p.decode:
            total = total + buffers.get(p.seq, 0)
            buffers[p.seq] = total
        return total

    p.mlp(1).down_proj.reduce = reduce


@bug(
    "collectives",
    accepted=("reduce",),
    words="sum|max|reduc",
    taps=("mlp.down",),
    layers=(2,),
    model="mistral-full",
    dtype="bfloat16",
    tp=2,
)
def maximum_over_the_ranks_in_place_of_their_sum(p: Patched) -> None:
    p.mlp(2).down_proj.reduce = lambda part: torch.stack(p.ring.gather(p.rank, part)).amax(0)


@bug(
    "collectives",
    accepted=("reduce", "scale", "sharding"),
    words="sum|scale|rank|reduc|partial|weighted|factor",
    taps=("attn.o_proj",),
    model="qwen3",
    tp=4,
)
def partial_sums_all_dequantised_by_the_scale_of_rank_0(p: Patched) -> None:
    """Eight bits and one scale from each rank; the first scale serves them all."""

    def reduce(part):
        parts = p.ring.gather(p.rank, part)
        scales = [one.abs().amax() / 127 for one in parts]
        codes = [(one / scale).round() for one, scale in zip(parts, scales, strict=True)]
        return torch.stack(codes).sum(0) * scales[0]

    for i, _ in p.layers():
        p.attn(i).o_proj.reduce = reduce
