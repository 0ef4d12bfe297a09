"""What experts compute, on which rank, and how it is put together."""

from __future__ import annotations

import re
from dataclasses import replace

import torch

from lockstep.engine.parallel import shards
from lockstep.engine.parallel.shards import Span
from lockstep.engine.rules import routing
from tests.workbench.diagnosis.bugs.bug import bug
from tests.workbench.diagnosis.bugs.engine_ranks import Spoilt

READ = ("mlp.experts.gate", "mlp.experts.up")
SUM = ("mlp.combine.partial", "mlp.combine")


@bug(
    "placement",
    accepted=("experts", "weight", "sharding", "choice"),
    words="expert|weight|other|place|swap|exchang|order|number|load",
    taps=READ,
    model="minimax-m2",
    tp=2,
    ep=2,
)
def experts_moved_by_the_balancer_are_asked_by_their_old_numbers(p: Spoilt) -> None:
    """Two experts have changed places between the ranks; the map from logical to physical numbers is the
    old one.
    """
    moved = {"1": "6", "6": "1"}

    def tensor_of(name, model):
        return re.sub(r"\.experts\.(\d+)\.", lambda found: f".experts.{moved.get(found[1], found[1])}.", name)

    p.rules(tensor_of=tensor_of)


@bug(
    "sharding",
    accepted=("sharding", "weight", "experts", "linear"),
    words="shard|cut|split|part|rank|weight|rows|gate|up|expert|other",
    taps=READ,
    model="mixtral",
    tp=2,
    ep=1,
)
def stack_of_gate_and_up_is_cut_through_the_middle(p: Spoilt) -> None:
    """sglang#15432: of a fused [w1; w3] each rank takes a run of rows: the first all of w1, the second
    all of w3.
    """

    def tensor_of(name, model):
        both = re.search(r"\.experts\.\d+\.w[13]\.", name)
        return re.sub(r"\.w[13]\.", f".w{1 + 2 * p.rank}.", name) if both else name

    def plan(name, model, tp, rank, ep=1):
        right = shards.plan(name, model, tp, rank, ep)
        if found := re.search(r"\.experts\.\d+\.w([13])\.", name):
            size = right.span.size
            right = replace(right, span=Span(0, size) if found[1] == "1" else Span(size, 2 * size))
        return right

    p.rules(tensor_of=tensor_of, shard=plan)


@bug(
    "bias",
    accepted=("bias", "experts", "weight"),
    words="bias|constant|offset|order|interleav|turn|expert",
    taps=READ,
    model="gpt-oss",
    tp=2,
    ep=2,
)
def biases_of_gate_and_up_are_cut_in_halves_where_they_alternate(p: Spoilt) -> None:
    """gate_up_proj is put in order while loading, gate_up_proj_bias stays as the checkpoint has it."""

    def spoil(decoder):
        for layer in decoder.layers:
            for expert in layer.mlp.experts:
                gate, up = expert.gate_up.bias.split(expert.gate_up.sizes)
                expert.gate_up.bias.copy_(torch.stack((gate, up), -1).flatten())

    p.loaded(spoil)


@bug(
    "shared",
    accepted=("combine", "reduce", "sharding", "scale", "experts"),
    words="shared|twice|times|rank|sum|reduc|scal|repeat|whole|count|combin",
    taps=SUM,
    layers=(1, 2),
    model="deepseek-v3",
    tp=2,
    ep=2,
)
def shared_expert_that_every_rank_has_whole_is_summed_over_the_groups(p: Spoilt) -> None:
    """sglang#26845, sglang#31475: R + ep_size * S."""

    def added(routed, shared, gate, comm):
        return routing.with_shared(routed, comm.ring.sum(comm.rank, shared.clone()), gate, comm)

    p.rules(shared_expert=added)


@bug(
    "combine",
    accepted=("combine", "choice_weights", "scale"),
    words="weigh|weight|slot|first|sum|combin|expert|scal",
    taps=SUM,
    model="hunyuan-moe",
    tp=2,
    ep=2,
)
def outputs_of_a_token_are_all_weighed_by_its_first_weight(p: Spoilt) -> None:
    """vllm-xpu-kernels#66: the index of the weight has no term of the slot."""
    p.rules(
        combine=lambda outputs, weights: routing.weighed_sum(outputs, weights[:, :1].expand(weights.shape))
    )


@bug(
    "gate",
    accepted=("combine", "gate", "sigmoid", "scale"),
    words="gate|sigmoid|routed|shared|sum|scal|times|combin",
    taps=SUM,
    model="qwen3.5-moe",
    dtype="bfloat16",
    tp=2,
    ep=1,
)
def gate_of_the_shared_expert_is_multiplied_by_the_whole_sum(p: Spoilt) -> None:
    """The outputs are added in the fused layer, and the gate comes behind it."""
    p.rules(shared_expert=lambda routed, shared, gate, comm: (routed + shared) * gate.sigmoid())


@bug(
    "shared",
    accepted=("combine", "reduce", "sharding", "experts", "input"),
    words="shared|rank|part|token|row|chunk|sum|reduc|missing|lack|combin",
    taps=SUM,
    layers=(0, 1, 3),
    model="qwen3-next",
    tp=2,
    ep=2,
)
def each_rank_gives_its_part_of_the_shared_expert_for_its_chunk_of_tokens(p: Spoilt) -> None:
    """vllm#37856: under sequence parallelism the shared expert, which is cut over ranks, meets other
    tokens on each.
    """

    def added(routed, shared, gate, comm):
        size = -(-len(shared) // comm.size)
        own = torch.zeros_like(shared)
        rows = slice(comm.rank * size, (comm.rank + 1) * size)
        own[rows] = shared[rows]
        return routing.with_shared(routed, own, gate, comm)

    p.rules(shared_expert=added)


@bug(
    "activation",
    accepted=("activation", "clip"),
    words="clamp|clip|limit|activ|gate|swiglu",
    taps=("mlp.experts.act",),
    model="gpt-oss",
    dtype="bfloat16",
    tp=2,
    ep=1,
)
def gate_of_experts_is_clamped_on_both_sides(p: Spoilt) -> None:
    """prime-rl#2365: as up is, whose limit is symmetrical."""

    def act(gate, up, activation):
        gate, up = (x.clamp(-activation.limit, activation.limit) for x in (gate, up))
        return gate * (gate * activation.slope).sigmoid() * (up + 1)

    p.rules(act=act)


@bug(
    "weight",
    accepted=("weight", "experts", "sharding"),
    words="zero|weight|expert|load|missing|empty|not written|lost",
    taps=("mlp.experts.down",),
    layers=(2,),
    ranks=(1,),
    model="olmoe",
    tp=2,
    ep=2,
)
def weight_sync_leaves_out_down_of_the_last_expert(p: Spoilt) -> None:
    """SkyRL#1680: the loop over what the trainer has sent is one short, in the last layer."""

    def spoil(decoder):
        for matrix in decoder.layers[2].mlp.experts[-1].down.parts().values():
            matrix.zero_()

    if p.rank == 1:
        p.loaded(spoil)


@bug(
    "sharding",
    accepted=("sharding", "weight", "experts"),
    words="shard|rank|part|cut|same|weight|expert|other|twice",
    taps=READ,
    layers=(1, 2),
    ranks=(1, 2),
    model="glm4-moe",
    tp=4,
    ep=2,
)
def part_of_an_expert_is_taken_by_the_number_of_the_group(p: Spoilt) -> None:
    """Of four ranks in two groups the coordinates within and between groups are mixed up: halves come
    twice.
    """

    def plan(name, model, tp, rank, ep=1):
        of_experts = ".experts." in name
        return shards.plan(name, model, tp, 3 * (rank // 2) if of_experts else rank, ep)

    p.rules(shard=plan)
