"""What experts compute, on which rank, and how it is put together."""

from __future__ import annotations

import torch

from lockstep.engine.rules import defaults, routing
from tests.workbench.diagnosis.bugs.bug import bug
from tests.workbench.diagnosis.bugs.engine_ranks import Spoilt

PARTIAL = ("mlp.combine.partial", "mlp.combine")
READ = ("mlp.experts.gate", "mlp.experts.up")
SHARED = ("mlp.shared.gate", "mlp.shared.up")


@bug(
    "shared",
    accepted=("combine", "experts"),
    words="shared|without|missing|lost|zero|term",
    taps=PARTIAL,
    layers=(1, 2),
    step=1,
    model="glm4-moe",
    tp=2,
    ep=1,
)
def decode_forgets_the_shared_expert(p: Spoilt) -> None:
    """It is overlapped with the routed ones on another stream, whose result is not waited for."""

    def alone(routed, shared, gate, comm):
        return routed

    p.rules(shared_expert=p.later(routing.with_shared, alone))


@bug(
    "shared",
    accepted=("weight", "linear", "experts", "sharding"),
    words="zero|missing|half|lost|width|weight|row|part|load|channel|shared",
    taps=SHARED,
    model="solar-open",
    dtype="bfloat16",
    ep=1,
)
def shared_expert_is_as_wide_as_one_of_two(p: Spoilt) -> None:
    """n_shared_experts is not read: rows behind the first expert's are not loaded."""

    def spoil(decoder):
        for layer in decoder.layers:
            for weight in layer.mlp.shared.expert.gate_up.parameters().values():
                weight[len(weight) // 2 :] = 0

    p.loaded(spoil)


@bug(
    "shared",
    accepted=("combine", "gate", "sigmoid"),
    words="sigmoid|gate|shared|logit",
    taps=PARTIAL,
    layers=(1, 2),
    model="qwen2-moe",
    dtype="bfloat16",
    tp=2,
    ep=2,
)
def shared_expert_is_multiplied_by_the_logit_of_its_gate(p: Spoilt) -> None:
    p.rules(shared_expert=lambda routed, shared, gate, comm: routed + gate * shared)


@bug(
    "bias",
    accepted=("bias", "experts", "sharding", "reduce"),
    words="bias|twice|rank|again|every|each",
    taps=("mlp.experts.down",),
    ranks=(1,),
    model="gpt-oss",
    tp=2,
    ep=1,
)
def every_rank_adds_the_bias_of_down(p: Spoilt) -> None:
    p.rules(expert_bias=lambda term, bias, first: term + bias)


@bug(
    "activation",
    accepted=("activation", "clip"),
    words="clamp|clip|limit|gate|activat|swiglu|below|negative",
    taps=("mlp.experts.act",),
    model="gpt-oss",
    ep=1,
)
def gate_is_clamped_from_below_as_well(p: Spoilt) -> None:
    """As up is: the gate has a limit above alone."""

    def act(gate, up, activation):
        return defaults.act_and_mul(gate.clamp(min=-activation.limit), up, activation)

    p.rules(act=act)


@bug(
    "order",
    accepted=("experts", "weight", "sharding"),
    words="expert|order|permut|other|revers|index|map|rank|exchang|swap",
    taps=READ,
    layers=(0,),
    ranks=(1,),
    model="mixtral",
    tp=2,
    ep=2,
)
def map_of_the_local_experts_is_that_of_before_they_were_moved(p: Spoilt) -> None:
    """The balancer has moved the weights of one layer on one rank: they lie in the other order."""
    if p.rank == 1:
        p.rules((0,), own_experts=lambda ids, held: held.start + held.stop - 1 - ids)


@bug(
    "lost",
    accepted=("experts", "sharding"),
    words="expert|lost|zero|missing|drop|nobody|skip|rank|last|7",
    taps=READ,
    ranks=(1,),
    model="qwen3.5-moe",
    tp=2,
    ep=2,
)
def loop_over_the_experts_ends_before_the_last(p: Spoilt) -> None:
    if p.rank == 1:
        p.rules(own_experts=lambda ids, held: ids.where(ids < held.stop - 1, -1))


@bug(
    "reduce",
    accepted=("reduce", "combine", "sharding"),
    words="reduc|rank|sum|partial|term",
    taps=("mlp.combine",),
    layers=(2,),
    step=1,
    model="deepseek-v3",
    dtype="bfloat16",
    tp=2,
    ep=2,
)
def last_layer_of_decode_leaves_its_terms_on_their_ranks(p: Spoilt) -> None:
    """The all-reduce is left to a kernel that is fused with the next norm, and behind the last layer there is none."""

    def kept(partial, comm):
        return partial if p.at("mlp.combine") else defaults.sum_over_ranks(partial, comm)

    p.rules((2,), reduce=p.later(defaults.sum_over_ranks, kept))


@bug(
    "lost",
    accepted=("combine", "experts"),
    words="row|token|zero|missing|lost|drop|position|sequence|16",
    taps=PARTIAL,
    model="olmoe",
    dtype="bfloat16",
    ep=1,
)
def sum_over_the_slots_is_made_of_sixteen_rows(p: Spoilt) -> None:
    """The grid of the kernel is rounded down to whole blocks of rows."""

    def combine(outputs, weights):
        total = routing.weighed_sum(outputs, weights)
        if len(total) > 16:
            total[16:] = 0
        return total

    p.rules(combine=combine)


@bug(
    "weights",
    accepted=("experts", "weight"),
    words="gate|up|interleav|half|halves|order|permut|other|stride|neighbour",
    taps=READ,
    layers=(1,),
    model="gpt-oss",
    tp=2,
    ep=1,
)
def interleaved_gate_and_up_are_cut_in_halves(p: Spoilt) -> None:
    """Rows of the fused checkpoint are gate, up, gate, up ...; one layer comes from another file."""

    def halves(gate, up):
        return torch.stack((gate, up), -1).flatten(-2).chunk(2, -1)

    p.rules((1,), expert_gate_up=halves)


@bug(
    "input",
    accepted=("expert_input", "choice_weights", "scale", "experts", "input"),
    words="weight|input|scal|times|score|without|never",
    taps=("mlp.experts.input",),
    layers=(1, 3),
    model="llama4",
    ep=1,
)
def inputs_of_the_experts_are_not_weighed(p: Spoilt) -> None:
    """apply_router_weight_on_input is taken for a matter of the sum, and the sum for one of the input."""
    p.rules(expert_input=lambda x, weights: x.unsqueeze(1).expand(-1, weights.shape[1], -1))


@bug(
    "order",
    accepted=("experts", "sharding"),
    words="expert|offset|rank|local|global|number|lost|zero|missing|index|nobody",
    taps=READ,
    ranks=(1,),
    model="granite4-moe",
    dtype="bfloat16",
    tp=2,
    ep=2,
)
def second_expert_rank_takes_global_numbers_for_its_own(p: Spoilt) -> None:
    """The first of its experts is not taken off: it computes rows of the other rank's, which are then masked."""
    if p.rank == 1:
        p.rules(own_experts=lambda ids, held: ids + held.start)
