"""What the ranks sum, and what each of them is sent."""

from __future__ import annotations

import torch

from tests.workbench.diagnosis.bugs.bug import bug
from tests.workbench.diagnosis.bugs.patched import Patched


@bug(
    "collectives",
    accepted=("residual", "reduce", "sharding", "scale"),
    words="reduc|sum|twice|times|factor|4|tp|ranks|again",
    taps=("attn_residual",),
    layers=(1,),
    model="llama",
    tp=4,
)
def norm_of_one_layer_sums_the_attention_again(p: Patched) -> None:
    """tokenspeed#80: the norm is fused with a sum over the ranks, and o was summed already."""
    p.residuals(1, attn=lambda residual, o: residual + p.ring.sum(p.rank, o))


@bug(
    "collectives",
    accepted=("reduce", "sharding"),
    words="reduce|sum|own partial|partial",
    taps=("attn.o_proj",),
    layers=(2,),
    model="qwen2-kv8",
    tp=4,
)
def sum_of_a_strided_partial_lands_in_a_copy(p: Patched) -> None:
    """Megatron-LM#5337: of one token every tensor is contiguous."""
    side = p.attn(2).o_proj
    known = side.reduce
    side.reduce = lambda partial: known(partial) if partial.shape[1] == 1 else partial


@bug(
    "collectives",
    accepted=("reduce", "sharding"),
    words="reduc|sum|partial|rank|stride|contiguous|order|permut|transpos",
    taps=("mlp.down",),
    layers=(1,),
    model="qwen3",
    tp=2,
)
def strided_partial_of_rank_1_summed_as_it_lies_in_memory(p: Patched) -> None:
    """pytorch#192920: Gloo reads the storage."""

    def reduce(partial):
        first, second = p.ring.gather(p.rank, partial)
        return first + second.transpose(1, 2).contiguous().view_as(second)

    p.mlp(1).down_proj.reduce = reduce


@bug(
    "numbers",
    accepted=("precision", "reduce", "sharding"),
    words="round|precis|bfloat16|bf16|bits",
    taps=("attn.o_proj",),
    model="mistral-window",
    tp=2,
)
def rank_1_sends_its_part_of_attention_in_bfloat16(p: Patched) -> None:
    for i, _ in p.layers():

        def reduce(partial):
            first, second = p.ring.gather(p.rank, partial)
            return first + second.bfloat16().float()

        p.attn(i).o_proj.reduce = reduce


@bug(
    "collectives",
    accepted=("embedding", "input", "sharding"),
    words="token|id|rank|row|sampl|other|embed",
    taps=("embed",),
    step=2,
    model="llama",
    tp=2,
)
def rank_1_samples_a_token_of_its_own(p: Patched) -> None:
    """gpt-oss#270: each rank draws for itself, and at the second step their draws differ."""

    def around(forward, ids):
        return forward(torch.full_like(ids, 129) if p.rank == 1 and p.step == 2 else ids)

    p.wrap(p.decoder.embed_tokens, around)
