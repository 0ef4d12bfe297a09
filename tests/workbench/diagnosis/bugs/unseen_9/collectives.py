"""What the ranks sum, gather and hand on."""

from __future__ import annotations

import math

import torch

from tests.workbench.diagnosis.bugs.bug import bug
from tests.workbench.diagnosis.bugs.patched import Patched


@bug(
    "collectives",
    accepted=("reduce", "sharding"),
    words="reduc|sum|gather|order|slice|column|permut|rotat|shift|part|rank",
    taps=("attn.o_proj",),
    ranks=(1, 2, 3),
    model="llama-mha",
    tp=4,
)
def first_rank_alone_gathers_its_slices_in_order(p: Patched) -> None:
    """FasterTransformer#672: each rank counts the slices of a two-shot sum from itself."""
    for i, _ in p.layers():
        side = p.attn(i).o_proj
        side.reduce = lambda partial: p.ring.sum(p.rank, partial).roll(16 * p.rank, -1)


@bug(
    "collectives",
    accepted=("overflow", "reduce", "sharding"),
    words="nan|reduc|sum|inf|not a number",
    taps=("attn.o_proj",),
    layers=(1,),
    ranks=(1,),
    step=1,
    model="qwen3",
    dtype="bfloat16",
    tp=2,
)
def one_shot_sum_of_decode_read_before_it_was_written(p: Patched) -> None:
    """vllm#45448: what the buffer of one rank is filled with meanwhile is not a number."""

    def reduce(partial):
        whole = p.ring.sum(p.rank, partial)
        if p.decode and p.rank == 1:
            whole[..., :16] = math.nan
        return whole

    p.attn(1).o_proj.reduce = reduce


@bug(
    "collectives",
    accepted=("reduce", "sharding"),
    words="reduc|sum|partial|token|last|own|rank",
    taps=("mlp.down",),
    model="mistral-full",
    tp=2,
)
def last_token_of_an_odd_prompt_is_summed_on_no_rank(p: Patched) -> None:
    """The tokens are scattered in equal shares, and what is left over stays a part."""

    def reduce(partial):
        whole = p.ring.sum(p.rank, partial)
        if partial.shape[1] > 1 and partial.shape[1] % 2:
            whole[:, -1] = partial[:, -1]
        return whole

    for i, _ in p.layers():
        p.mlp(i).down_proj.reduce = reduce


@bug(
    "numbers",
    accepted=("precision", "reduce", "sharding"),
    words="round|precis|fp8|float8|e4m3|bits|quant|eight",
    taps=("mlp.down",),
    layers=(2,),
    step=1,
    model="qwen3-kv4",
    tp=2,
)
def decode_sends_the_parts_of_the_last_layer_in_eight_bits(p: Patched) -> None:
    side = p.mlp(2).down_proj
    known = side.reduce
    side.reduce = lambda partial: known(partial.to(torch.float8_e4m3fn).float() if p.decode else partial)


@bug(
    "collectives",
    accepted=("residual", "input", "sharding"),
    words="residual|stream|token|row|position|before|shift|rank|other",
    taps=("attn_residual",),
    layers=(1,),
    ranks=(1,),
    model="mistral-full",
    dtype="bfloat16",
    tp=2,
)
def stream_of_rank_1_gathered_a_token_late(p: Patched) -> None:
    """It is kept in shares of the tokens; the offset of one rank's is one too small."""

    def add(stream, o):
        return torch.cat([stream[:, :1], stream[:, :-1]], 1) + o

    if p.rank == 1:
        p.residuals(1, attn=add)
