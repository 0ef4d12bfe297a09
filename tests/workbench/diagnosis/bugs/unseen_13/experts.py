"""What experts compute, on which rank, and how it is put together."""

from __future__ import annotations

import re
from dataclasses import replace

import torch

from lockstep.engine.parallel import shards
from lockstep.engine.rules import defaults, routing
from tests.workbench.diagnosis.bugs.bug import bug
from tests.workbench.diagnosis.bugs.engine_ranks import Spoilt

COMBINED = ("mlp.combine",)
PARTIAL = ("mlp.combine.partial", *COMBINED)
READ = ("mlp.experts.gate", "mlp.experts.up")
SHARED_READ = ("mlp.shared.gate", "mlp.shared.up")


@bug(
    "shared",
    accepted=("linear", "input", "experts"),
    words="input|read|shared|other|output|routed|combin|place",
    taps=SHARED_READ,
    layers=(1, 2),
    model="qwen2-moe",
    dtype="bfloat16",
    ep=1,
)
def shared_expert_reads_what_the_routed_ones_have_written(p: Spoilt) -> None:
    """vllm#28942: their kernel writes its sum where it has read, and the shared expert comes behind it."""
    held: list = []

    def combine(outputs, weights):
        held[:] = [routing.weighed_sum(outputs, weights)]
        return held[0]

    def spoil(decoder):
        for i in (1, 2):
            shared = decoder.layers[i].mlp.shared
            for part in (shared.expert.gate_up, shared.gate):
                right = part.weight.product
                part.weight.product = lambda x, bias=None, right=right: right(held[0], bias)

    p.rules(combine=combine)
    p.loaded(spoil)


@bug(
    "shared",
    accepted=("combine", "reduce", "sharding", "experts", "input"),
    words="shared|row|token|half|rank|part|missing|lost|zero|sum",
    taps=PARTIAL,
    model="qwen3.5-moe",
    tp=2,
    ep=2,
)
def split_shared_expert_sees_the_tokens_of_its_own_rank(p: Spoilt) -> None:
    """vllm#37856: each rank has its part of the tokens, which is right for experts that are whole."""

    def own(routed, shared, gate, comm):
        part = torch.arange(len(shared)) // -(-len(shared) // comm.size)
        return routing.with_shared(routed, shared * (part == comm.rank).unsqueeze(-1), gate, comm)

    p.rules(shared_expert=own)


@bug(
    "shared",
    accepted=("combine", "reduce", "sharding", "scale"),
    words="shared|rank|twice|times|every|again|double|whole|2",
    taps=PARTIAL,
    layers=(1, 2),
    model="glm4-moe",
    dtype="bfloat16",
    tp=2,
    ep=1,
)
def shared_expert_is_reduced_by_its_own_down_and_with_the_others(p: Spoilt) -> None:
    """vllm#49122: it is built without reduce_results=False."""

    def whole(routed, shared, gate, comm):
        return routing.with_shared(routed, comm.all_reduce(shared.clone()), gate, comm)

    p.rules(shared_expert=whole)


@bug(
    "placement",
    accepted=("weight", "experts", "sharding"),
    words="expert|order|place|other|permut|rank|weight|index|stride",
    taps=READ,
    model="minimax-m2",
    tp=2,
    ep=2,
)
def experts_are_dealt_out_in_turn_and_sought_in_blocks(p: Spoilt) -> None:
    """The loader places them round robin, the map of the kernel is that of consecutive ones."""

    def dealt(name, model):
        found = re.search(r"\.experts\.(\d+)\.", name)
        if found is None:
            return name
        slot = int(found[1]) % 4
        return name.replace(found[0], f".experts.{slot * p.config.ep + p.rank}.")

    p.rules(tensor_of=dealt)


@bug(
    "placement",
    accepted=("experts", "sharding", "weight"),
    words="expert|rank|other|last|foreign|remote|map|zero|row|not",
    taps=READ,
    ranks=(0,),
    model="mixtral",
    dtype="bfloat16",
    tp=2,
    ep=2,
)
def experts_of_others_are_the_last_of_the_first_rank(p: Spoilt) -> None:
    """The map has -1 for them, which the kernel of that rank takes for an index from the end."""

    def spoil(decoder):
        for layer in decoder.layers:
            layer.mlp.held = shards.Span(0, layer.mlp.config.count)

    if p.rank == 0:
        p.rules(own_experts=lambda ids, held: ids.clamp(max=3))
        p.loaded(spoil)


@bug(
    "sharding",
    accepted=("weight", "sharding", "experts"),
    words="rank|shard|half|row|group|other|same|weight|part",
    taps=READ,
    layers=(1,),
    ranks=(1, 2),
    model="ernie4-5-moe",
    tp=4,
    ep=2,
)
def number_of_the_group_is_taken_for_the_place_in_it(p: Spoilt) -> None:
    """Ranks 0 and 1 load the first half of each of their experts, 2 and 3 the second."""

    def plan(name, model, tp, rank, ep=1):
        group = rank // 2
        return shards.plan(name, model, tp, 2 * group + group if ".mlp.experts." in name else rank, ep)

    p.rules(shard=plan)


@bug(
    "activation",
    accepted=("activation", "experts", "weight"),
    words="gate|up|activat|swap|exchang|other|order",
    taps=("mlp.experts.act",),
    step=1,
    model="olmoe",
    dtype="bfloat16",
    ep=1,
)
def kernel_of_few_tokens_activates_up(p: Spoilt) -> None:
    """It was written for files that have up before gate."""

    def exchanged(gate, up, activation):
        return defaults.act_and_mul(up, gate, activation)

    p.rules(act=p.later(defaults.act_and_mul, exchanged))


@bug(
    "activation",
    accepted=("activation", "clip"),
    words="clamp|clip|limit|bound|7|missing|without|activat",
    taps=("mlp.experts.act",),
    model="gpt-oss",
    dtype="bfloat16",
    ep=1,
)
def limit_of_the_swiglu_is_a_number_in_the_kernel(p: Spoilt) -> None:
    """7.0, as published checkpoints have it, and not swiglu_limit."""

    def act(gate, up, activation):
        return defaults.act_and_mul(gate, up, replace(activation, limit=7.0))

    p.rules(act=act)


@bug(
    "rows",
    accepted=("experts", "input"),
    words="expert|row|token|block|last|lost|missing|zero|drop",
    taps=READ,
    model="qwen3-next",
    dtype="bfloat16",
    tp=2,
    ep=1,
)
def last_rows_of_the_sorted_tokens_are_in_no_block(p: Spoilt) -> None:
    """The number of blocks of 16 rows is rounded down where there is more than one."""

    def whole_blocks(ids, held):
        if len(ids) < 16:
            return ids
        found = ids.clone()
        found[ids.argsort(stable=True)[len(ids) // 16 * 16 :]] = -1
        return found

    p.rules(own_experts=whole_blocks)


@bug(
    "reduce",
    accepted=("reduce", "combine", "input", "sharding", "positions"),
    words="rank|token|row|order|swap|exchang|half|other|gather|revers|shift",
    taps=COMBINED,
    layers=(1,),
    model="nemotron-h-moe",
    tp=2,
    ep=2,
)
def tokens_are_gathered_from_the_last_rank_on(p: Spoilt) -> None:
    """The sum is scattered over the ranks by tokens, and put together again in the order of another group."""

    def gathered(partial, comm):
        whole = defaults.sum_over_ranks(partial, comm)
        if not p.at("mlp.combine"):
            return whole
        half = (len(whole) + 1) // 2
        return torch.cat((whole[half:], whole[:half]))

    p.rules(reduce=gathered)


@bug(
    "reduce",
    accepted=("reduce", "combine", "scale", "sharding"),
    words="mean|averag|half|rank|divid|scal|sum|0\\.5|factor",
    taps=COMBINED,
    layers=(1, 2),
    model="lfm2-moe",
    dtype="bfloat16",
    tp=2,
    ep=2,
)
def sum_over_the_ranks_is_their_mean(p: Spoilt) -> None:
    """The collective has the operation that gradients are reduced by."""

    def mean(partial, comm):
        whole = defaults.sum_over_ranks(partial, comm)
        return whole / comm.size if p.at("mlp.combine") else whole

    p.rules(reduce=mean)


@bug(
    "bias",
    accepted=("bias", "experts", "sharding"),
    words="bias|constant|missing|without|not|zero|offset",
    taps=("mlp.experts.down",),
    ranks=(1,),
    model="gpt-oss",
    tp=2,
    ep=2,
)
def first_rank_alone_adds_the_bias_of_down(p: Spoilt) -> None:
    """As it has to be where experts are split, so that it is added once; here each rank has experts of its own."""
    if p.rank > 0:
        p.rules(expert_bias=lambda term, bias, first: term)


@bug(
    "activation",
    accepted=("activation",),
    words="activat|silu|relu|square|other|function",
    taps=("mlp.shared.act",),
    layers=(1,),
    model="nemotron-h-moe",
    dtype="bfloat16",
    ep=1,
)
def shared_expert_has_the_default_activation(p: Spoilt) -> None:
    """It is built as the MLP of another family, whose activation is SiLU."""

    def spoil(decoder):
        decoder.layers[1].mlp.shared.activation = "silu"

    p.loaded(spoil)


@bug(
    "shared",
    accepted=("combine", "gate", "sigmoid", "scale"),
    words="gate|sigmoid|shared|missing|without|skip|not|whole|scal",
    taps=PARTIAL,
    layers=(0, 1, 3),
    model="qwen3-next",
    tp=2,
    ep=2,
)
def gate_of_the_shared_expert_is_not_read(p: Spoilt) -> None:
    """The families before this one add it as it is."""
    p.rules(shared_expert=lambda routed, shared, gate, comm: routing.with_shared(routed, shared, None, comm))


@bug(
    "weights",
    accepted=("weight", "linear", "experts"),
    words="gate|up|swap|exchang|other|order|weight|half|halves",
    taps=SHARED_READ,
    layers=(1,),
    model="hunyuan-moe",
    dtype="bfloat16",
    tp=2,
    ep=2,
)
def shared_expert_of_one_layer_has_up_before_gate(p: Spoilt) -> None:
    """It goes through the loader of the routed experts, whose stack has the two in that order."""

    def spoil(decoder):
        gate, up = decoder.layers[1].mlp.shared.expert.gate_up.parameters().values()
        first = gate.clone()
        gate.copy_(up)
        up.copy_(first)

    p.loaded(spoil)
