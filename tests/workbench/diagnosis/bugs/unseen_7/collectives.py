"""What the ranks sum: never, too early, among the wrong ones, too much."""

from __future__ import annotations

import torch

from tests.workbench.diagnosis.bugs.bug import bug
from tests.workbench.diagnosis.bugs.patched import Patched


@bug(
    "collectives",
    accepted=("reduce", "sharding"),
    words="reduce|sum|own partial",
    taps=("mlp.down",),
    model="qwen3",
    dtype="bfloat16",
    tp=4,
)
def down_built_without_its_reduction(p: Patched) -> None:
    for i, _ in p.layers():
        p.mlp(i).down_proj.reduce = lambda partial: partial


@bug(
    "collectives",
    accepted=("reduce", "residual", "sharding"),
    words="residual|stream|input|rank|sum|twice",
    taps=("mlp.down",),
    model="qwen2-untied",
    dtype="bfloat16",
    tp=2,
)
def rank_0_puts_the_stream_into_the_sum_to_which_it_is_added_again(p: Patched) -> None:
    for i, layer in p.layers():
        down, held = p.mlp(i).down_proj, {}

        def keep(forward, x, held=held):
            held["stream"] = x
            return forward(x)

        def reduce(partial, held=held, known=down.reduce):
            return known(partial + held["stream"] if p.rank == 0 else partial)

        p.wrap(layer.post_attention_layernorm, keep)
        down.reduce = reduce


@bug(
    "collectives",
    accepted=("reduce", "sharding"),
    words="reduce|sum|partial|rank|missing|part",
    taps=("attn.o_proj",),
    layers=(1,),
    step=1,
    model="mistral-full",
    tp=2,
)
def sum_starts_before_rank_1_has_written_its_second_half(p: Patched) -> None:
    o = p.attn(1).o_proj
    known = o.reduce

    def reduce(partial):
        if p.decode and p.rank == 1:
            partial = partial.clone()
            partial[..., partial.shape[-1] // 2 :] = 0
        return known(partial)

    o.reduce = reduce


@bug(
    "collectives",
    accepted=("reduce", "sharding"),
    words="reduce|sum|partial|rank|group|some|missing",
    taps=("attn.o_proj",),
    step=1,
    model="llama-mha",
    tp=4,
)
def decode_graph_sums_over_the_group_of_the_data_ranks(p: Patched) -> None:
    """Ranks 0 and 2, and 1 and 3."""
    for i, _ in p.layers():
        for side in (p.attn(i).o_proj, p.mlp(i).down_proj):

            def reduce(partial):
                parts = p.ring.gather(p.rank, partial)
                return sum(parts[p.rank % 2 :: 2] if p.decode else parts)

            side.reduce = reduce


@bug(
    "bias",
    accepted=("bias", "reduce"),
    words="bias|rank|tp|times|each",
    taps=("attn.o_proj",),
    model="llama-bias",
    dtype="bfloat16",
    tp=4,
)
def row_biases_inside_the_sum_of_four_ranks(p: Patched) -> None:
    for i, _ in p.layers():
        for side in (p.attn(i).o_proj, p.mlp(i).down_proj):
            bias, known = side.bias, side.reduce
            side.bias = None
            side.reduce = lambda partial, bias=bias, known=known: known(partial + bias)


@bug(
    "bias",
    accepted=("bias", "sharding"),
    words="bias|rank|shard",
    taps=("attn.v_proj",),
    model="qwen2-kv8",
    tp=2,
)
def biases_of_the_values_exchanged_between_the_ranks(p: Patched) -> None:
    for i, _ in p.layers():
        halves = p.full.model.layers[i].self_attn.v_proj.bias.chunk(2)
        p.bias(p.attn(i).v_proj, lambda b, halves=halves: halves[1 - p.rank].clone())


@bug(
    "bias",
    accepted=("bias", "sharding"),
    words="bias",
    taps=("attn.q_proj", "attn.k_proj", "attn.v_proj"),
    ranks=(1,),
    model="qwen2-untied",
    dtype="bfloat16",
    tp=2,
)
def rank_1_alone_loads_no_biases_of_attention(p: Patched) -> None:
    if p.rank == 1:
        for i, _ in p.layers():
            for side in (p.attn(i).q_proj, p.attn(i).k_proj, p.attn(i).v_proj):
                p.bias(side, torch.zeros_like)


@bug(
    "network",
    accepted=("weight", "sharding", "norm", "layer", "layers"),
    words="weight|layer|rank|initial|never|random|loaded",
    taps=("attn.q_proj", "attn.k_proj", "attn.v_proj"),
    layers=(5,),
    ranks=(1,),
    model="llama-deep",
    tp=2,
)
def rank_1_never_loads_the_last_layer(p: Patched) -> None:
    """Its copy of the last file was cut off; what was drawn at the start stays, but for the norms."""
    if p.rank == 1:
        attn, mlp = p.attn(5), p.mlp(5)
        for side in (
            attn.q_proj,
            attn.k_proj,
            attn.v_proj,
            attn.o_proj,
            mlp.gate_proj,
            mlp.up_proj,
            mlp.down_proj,
        ):
            p.weight(side, lambda w: 0.02 * torch.randn_like(w))
