"""What is summed among the ranks, and how it comes back."""

from __future__ import annotations

import torch

from tests.workbench.diagnosis.bugs.bug import bug
from tests.workbench.diagnosis.bugs.patched import Patched


@bug(
    "collectives",
    accepted=("reduce", "sharding"),
    words="reduce|sum|own partial",
    taps=("mlp.down",),
    layers=(1,),
    model="llama",
    dtype="bfloat16",
    tp=4,
)
def down_of_the_middle_layer_left_partial(p: Patched) -> None:
    p.mlp(1).down_proj.reduce = lambda partial: partial


@bug(
    "collectives",
    accepted=("reduce", "sharding", "scale"),
    words="mean|average|divid|quarter|1/|0\\.25|factor|times",
    taps=("mlp.down",),
    step=1,
    model="qwen2-kv8",
    tp=4,
)
def mean_over_the_ranks_in_decode(p: Patched) -> None:
    for i, _ in p.layers():

        def reduce(partial):
            return p.ring.sum(p.rank, partial) / (p.tp if p.decode else 1)

        p.mlp(i).down_proj.reduce = reduce


@bug(
    "collectives",
    accepted=("reduce", "sharding"),
    words="reduce|sum|partial|rank|broadcast",
    taps=("attn.o_proj",),
    model="mistral-full",
    tp=2,
)
def broadcast_in_place_of_the_sum(p: Patched) -> None:
    for i, _ in p.layers():
        p.attn(i).o_proj.reduce = lambda partial: p.ring.gather(p.rank, partial)[0]


@bug(
    "collectives",
    accepted=("reduce", "sharding"),
    words="reduce|sum|partial|rank|left out|missing|without",
    taps=("attn.o_proj",),
    ranks=(3,),
    model="qwen3",
    tp=4,
)
def rank_3_leaves_its_own_part_out_of_its_sum(p: Patched) -> None:
    def reduce(partial):
        parts = p.ring.gather(p.rank, partial)
        return sum(parts[:3]) if p.rank == 3 else torch.stack(parts).sum(0)

    for i, _ in p.layers():
        p.attn(i).o_proj.reduce = reduce


@bug(
    "collectives",
    accepted=("reduce", "sharding"),
    words="token|order|row|half|swap|exchang|permut|roll|shift|gather",
    taps=("attn.o_proj",),
    model="llama",
    tp=2,
)
def scattered_tokens_gathered_in_the_wrong_order(p: Patched) -> None:
    """Each rank sums its half of the tokens; the prefill's halves come back the wrong way round."""

    def reduce(partial):
        whole = p.ring.sum(p.rank, partial)
        half = (whole.shape[1] + 1) // 2
        return torch.cat([whole[:, half:], whole[:, :half]], 1)

    for i, _ in p.layers():
        p.attn(i).o_proj.reduce = reduce


@bug(
    "collectives",
    accepted=("embedding", "reduce", "sharding", "scale"),
    words="twice|2|double|times|sum|reduc|scale|factor",
    taps=("embed",),
    model="mistral-window",
    tp=2,
)
def rows_of_the_embedding_summed_by_layer_and_caller(p: Patched) -> None:
    p.output(p.decoder.embed_tokens, lambda y: p.ring.sum(p.rank, y))
