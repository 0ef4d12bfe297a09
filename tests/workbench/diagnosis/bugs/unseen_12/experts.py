"""What experts compute, on which rank, and how it is put together."""

from __future__ import annotations

from dataclasses import replace

import torch

from lockstep.engine.parallel import shards
from lockstep.engine.rules import defaults, routing
from tests.workbench.diagnosis.bugs.bug import bug
from tests.workbench.diagnosis.bugs.engine_ranks import Spoilt

PARTIAL = ("mlp.combine.partial", "mlp.combine")
READ = ("mlp.experts.gate", "mlp.experts.up")


@bug(
    "input",
    accepted=("expert_input", "input", "experts", "scale", "choice_weights"),
    words="weight|input|scal|times|score|factor",
    taps=READ,
    model="mixtral",
    dtype="bfloat16",
    ep=1,
)
def weights_are_multiplied_by_what_experts_read(p: Spoilt) -> None:
    """apply_router_weight_on_input, which is for Llama 4, stays on: what is not linear comes behind it."""

    def spoil(decoder):
        for layer in decoder.layers:
            layer.mlp.config = replace(layer.mlp.config, weighed_inputs=True)

    p.rules(expert_input=lambda x, weights: routing.weighed_inputs(x, weights).to(x.dtype))
    p.loaded(spoil)


@bug(
    "weights",
    accepted=("weight", "experts", "sharding"),
    words="expert|weight|other|neighbour|same|twice|stale|load|before|replica",
    taps=READ,
    layers=(0,),
    ranks=(1,),
    model="qwen3-moe",
    tp=2,
    ep=2,
)
def slot_of_one_expert_keeps_the_copy_of_its_neighbour(p: Spoilt) -> None:
    """It held a replica of expert 4 before the last rebalancing, and expert 5 was not copied into it."""

    def spoil(decoder):
        source, target = (decoder.layers[0].mlp.experts[i].gate_up.parameters().values() for i in (4, 5))
        for theirs, own in zip(source, target, strict=True):
            own.copy_(theirs)

    if p.rank == 1:
        p.loaded(spoil)


@bug(
    "sharding",
    accepted=("weight", "experts", "sharding"),
    words="rank|shard|column|first|half|same|other|weight",
    taps=("mlp.experts.down",),
    ranks=(1,),
    model="granitemoe",
    dtype="bfloat16",
    tp=2,
    ep=1,
)
def second_rank_has_the_first_columns_of_every_down(p: Spoilt) -> None:
    """The offset into a stacked tensor is applied to the rows of gate and up alone."""

    def plan(name, model, tp, rank, ep=1):
        return shards.plan(name, model, tp, 0 if ".experts." in name and "down" in name else rank, ep)

    p.rules(shard=plan)


@bug(
    "activation",
    accepted=("activation",),
    words="activat|gelu|silu|tanh|swish",
    taps=("mlp.experts.act",),
    model="gemma4-moe",
    dtype="bfloat16",
    ep=1,
)
def experts_beside_a_gelu_have_a_silu(p: Spoilt) -> None:
    """The fused kernel of experts was not given the activation, which the MLP beside them has."""

    def spoil(decoder):
        for layer in decoder.layers:
            layer.beside.mixture.activation = "silu"

    p.loaded(spoil)


@bug(
    "activation",
    accepted=("activation", "clip"),
    words="clamp|clip|limit|up|one|1|add|order|activat|swiglu",
    taps=("mlp.experts.act",),
    step=1,
    model="gpt-oss",
    tp=4,
    ep=2,
)
def decode_clamps_up_behind_the_one_that_is_added(p: Spoilt) -> None:
    """As min(up + 1, limit), which saves an instruction and is another function."""

    def act(gate, up, activation):
        one_more = (up + 1).clamp(-activation.limit, activation.limit)
        return defaults.gated(gate, activation) * one_more

    p.rules(act=p.later(defaults.act_and_mul, act))


@bug(
    "bias",
    accepted=("bias", "experts", "weight"),
    words="bias|interleav|half|halves|order|permut|gate|up|stride|neighbour",
    taps=READ,
    layers=(0,),
    model="gpt-oss",
    ep=1,
)
def bias_of_gate_and_up_is_left_interleaved(p: Spoilt) -> None:
    """Rows of the weights are dealt out to gate and up, those of the bias of one layer are not."""

    def spoil(decoder):
        for expert in decoder.layers[0].mlp.experts:
            gate, up = expert.gate_up.bias.clone().chunk(2)
            expert.gate_up.bias.copy_(torch.stack((gate, up), -1).flatten())

    p.loaded(spoil)


@bug(
    "shared",
    accepted=("combine", "scale", "sharding", "reduce"),
    words="shared|rank|divid|scal|times|factor|quarter|4|0\\.25",
    taps=PARTIAL,
    layers=(1, 2),
    model="deepseek-v2",
    tp=4,
    ep=4,
)
def split_shared_expert_is_divided_by_the_ranks(p: Spoilt) -> None:
    """It was replicated once, and each rank brought its part of the same sum; now each has a term of it."""

    def divided(routed, shared, gate, comm):
        return routing.with_shared(routed, shared / comm.size, gate, comm)

    p.rules(shared_expert=divided)


@bug(
    "shared",
    accepted=("combine", "gate", "scale"),
    words="gate|sigmoid|shared|routed|both|sum|all|times|scal",
    taps=PARTIAL,
    layers=(0, 1, 3),
    step=1,
    model="qwen3-next",
    dtype="bfloat16",
    tp=2,
    ep=2,
)
def decode_lets_the_routed_through_the_gate_of_the_shared(p: Spoilt) -> None:
    """The epilogue multiplies the accumulator, in which both are by then."""

    def both(routed, shared, gate, comm):
        return gate.sigmoid() * (routed + shared)

    p.rules(shared_expert=p.later(routing.with_shared, both))


@bug(
    "combine",
    accepted=("combine", "choice_weights", "input"),
    words="weight|chunk|row|token|other|order|8|position|first|shift",
    taps=PARTIAL,
    model="olmoe",
    tp=2,
    ep=1,
)
def every_chunk_of_tokens_is_weighed_by_the_first_one_s_weights(p: Spoilt) -> None:
    """Tokens go through the experts eight at a time, and the pointer to the weights is not moved on."""

    def combine(outputs, weights):
        rows = torch.arange(len(outputs)) % 8
        return routing.weighed_sum(outputs, weights[rows])

    p.rules(combine=combine)


@bug(
    "reduce",
    accepted=("reduce", "combine", "sharding"),
    words="reduc|rank|sum|partial|group|half|missing|pair|differ",
    taps=("mlp.combine",),
    model="minimax-m2",
    tp=4,
    ep=2,
)
def sum_goes_over_the_ranks_of_one_group_of_experts(p: Spoilt) -> None:
    """The tensor-parallel group within the experts' is taken for that of all: ranks 0 and 1, 2 and 3."""

    def within(partial, comm):
        if not p.at("mlp.combine"):
            return defaults.sum_over_ranks(partial, comm)
        first = comm.rank // 2 * 2
        return partial.copy_(sum(comm.ring.gather(comm.rank, partial.clone())[first : first + 2]))

    p.rules(reduce=within)


@bug(
    "weights",
    accepted=("weight", "scale", "experts", "precision"),
    words="scal|times|factor|weight|up|ratio|larg|small",
    taps=("mlp.experts.up",),
    layers=(1,),
    model="ernie4-5-moe",
    ep=1,
)
def codes_of_up_are_read_with_the_scale_of_gate(p: Spoilt) -> None:
    """The fused product has one scale of an expert; the codes of its second half were not made anew for it."""

    def spoil(decoder):
        for expert in decoder.layers[1].mlp.experts:
            gate, up = expert.gate_up.parameters().values()
            up *= gate.abs().max() / up.abs().max()

    p.loaded(spoil)


@bug(
    "order",
    accepted=("experts", "weight", "sharding"),
    words="expert|row|block|other|order|index|number|token|neighbour|map",
    taps=READ,
    model="hunyuan-moe",
    dtype="bfloat16",
    tp=2,
    ep=1,
)
def block_of_four_rows_goes_through_the_expert_of_its_first(p: Spoilt) -> None:
    """Rows are sorted by their expert, and what is not padded to whole blocks shares one with the next expert."""

    def of_block(ids, held):
        order = ids.argsort(stable=True)
        found = ids.clone()
        found[order] = ids[order[torch.arange(len(ids)) // 4 * 4]]
        return found

    p.rules(own_experts=of_block)
