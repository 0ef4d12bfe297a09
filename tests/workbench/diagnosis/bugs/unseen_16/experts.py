"""Experts: their weights and where they lie, what they compute, shared ones, sums over ranks."""

from __future__ import annotations

import re

import torch
from torch import Tensor

from lockstep.engine.checkpoint.load import own_tensor
from lockstep.engine.config import ModelConfig
from lockstep.engine.config.families import Gating
from lockstep.engine.layers.experts import MixtureOfExperts
from lockstep.engine.model import Decoder
from lockstep.engine.rules import defaults, routing
from tests.workbench.diagnosis.bugs.bug import bug
from tests.workbench.diagnosis.bugs.engine_ranks import RingComm, Spoilt

GATE_UP = ("mlp.experts.gate", "mlp.experts.up")
ACT = ("mlp.experts.act",)
DOWN = ("mlp.experts.down",)
PARTIAL = ("mlp.combine.partial",)


def _mixtures(decoder: Decoder) -> dict[int, MixtureOfExperts]:
    """Those of the layers that have one."""
    return {i: layer.mlp for i, layer in enumerate(decoder.layers) if isinstance(layer.mlp, MixtureOfExperts)}


# -- weights -------------------------------------------------------------------------------------------------


@bug(
    "names",
    accepted=("experts", "weight", "linear"),
    words="gate|up|swap|exchang|other|weight|order",
    taps=GATE_UP,
    model="mixtral",
    dtype="bfloat16",
    tp=2,
    ep=1,
)
def w1_is_taken_for_up_and_w3_for_the_gate(p: Spoilt) -> None:
    """The table of expert parameters is copied from a model that numbers its matrices otherwise."""

    def spoil(decoder: Decoder) -> None:
        for mixture in _mixtures(decoder).values():
            for expert in mixture.experts:
                gate, up = expert.gate_up.weight.parts().values()
                held = gate.clone()
                gate.copy_(up)
                up.copy_(held)

    p.loaded(spoil)


@bug(
    "names",
    accepted=("experts", "weight", "linear"),
    words="interleav|halves|half|order|layout|gate|altern|stack|row|column",
    taps=GATE_UP,
    model="gpt-oss",
    ep=1,
)
def interleaved_gate_and_up_are_cut_into_halves(p: Spoilt) -> None:
    """`gate, up = chunk(2, -1)`, where the checkpoint has a row of the gate and a row of up in turn."""

    def cut(gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
        one, other = torch.stack((gate, up), -1).flatten(-2).chunk(2, -1)
        return one, other

    p.rules(expert_gate_up=cut)


@bug(
    "placement",
    accepted=("experts", "weight", "sharding", "linear"),
    words="another|other|expert|rank|first|weight|offset|load|shard",
    taps=GATE_UP,
    layers=(0, 2),
    ranks=(1,),
    model="qwen3-moe",
    tp=2,
    ep=2,
)
def second_expert_rank_loads_the_experts_of_the_first(p: Spoilt) -> None:
    """Which experts are read is computed from the rank within the tensor-parallel group, which is 0 for both."""

    def tensor_of(name: str, model: ModelConfig) -> str:
        return own_tensor(re.sub(r"(experts\.)([4-7])\.", lambda m: f"{m[1]}{int(m[2]) - 4}.", name), model)

    if p.rank == 1:
        p.rules(tensor_of=tensor_of)


@bug(
    "placement",
    accepted=("experts", "weight", "sharding", "choice"),
    words="another|other|expert|map|place|slot|rank|order|round",
    taps=GATE_UP,
    layers=(1, 2),
    model="qwen2-moe",
    dtype="bfloat16",
    tp=4,
    ep=4,
)
def loader_deals_experts_out_in_turn_and_the_map_in_blocks(p: Spoilt) -> None:
    """expert_placement_strategy is round_robin for the loader, and the map of numbers is made by the default."""

    def dealt(number: int) -> int:
        return p.rank + (number - 2 * p.rank) * 4

    def tensor_of(name: str, model: ModelConfig) -> str:
        own = rf"experts\.([{2 * p.rank}{2 * p.rank + 1}])\."
        return own_tensor(re.sub(own, lambda m: f"experts.{dealt(int(m[1]))}.", name), model)

    p.rules(tensor_of=tensor_of)


@bug(
    "scales",
    accepted=("weight", "scale", "experts", "precision", "linear"),
    words="scal|factor|times|quanti|fp8|eight|magnitude|multipl",
    taps=GATE_UP,
    layers=(1, 2),
    model="deepseek-v3",
    tp=2,
    ep=2,
)
def codes_are_read_with_the_greater_of_the_scales_of_gate_and_up(p: Spoilt) -> None:
    """w13 keeps one scale after loading, and the codes of the matrix that had the lesser are not made anew for it."""

    def spoil(decoder: Decoder) -> None:
        for mixture in _mixtures(decoder).values():
            for expert in mixture.experts[mixture.held.start : mixture.held.stop]:
                matrices = list(expert.gate_up.weight.parts().values())
                scales = [one.abs().max() for one in matrices]
                for one, scale in zip(matrices, scales, strict=True):
                    one.mul_(max(scales) / scale)

    p.loaded(spoil)


# -- what an expert computes -----------------------------------------------------------------------------------


@bug(
    "activation",
    accepted=("activation",),
    words="gelu|silu|swish|activat",
    taps=ACT,
    model="gemma4-moe",
    tp=2,
    ep=1,
)
def fused_experts_know_no_other_activation_than_silu(p: Spoilt) -> None:
    """The MLP beside them is built with the model's activation, the mixture with its default."""

    def spoil(decoder: Decoder) -> None:
        for layer in decoder.layers:
            assert layer.beside is not None
            layer.beside.mixture.activation = "silu"

    p.loaded(spoil)


@bug(
    "activation",
    accepted=("activation",),
    words=r"one|\b1\b|up|added|offset|shift|plus",
    taps=ACT,
    model="gpt-oss",
    dtype="bfloat16",
    tp=2,
    ep=2,
)
def nothing_is_added_to_up_before_the_gate(p: Spoilt) -> None:
    """The kernel has slope and limit of the clamped SwiGLU, and `gate * up` instead of `gate * (up + 1)`."""

    def act(gate: Tensor, up: Tensor, activation: Gating) -> Tensor:
        return defaults.gated(gate, activation) * up.clamp(-activation.limit, activation.limit)

    p.rules(act=act)


@bug(
    "biases",
    accepted=("experts", "bias", "sharding", "linear"),
    words="bias",
    taps=DOWN,
    ranks=(1,),
    model="gpt-oss",
    tp=2,
    ep=1,
)
def bias_of_down_comes_from_each_rank_that_has_a_part_of_the_expert(p: Spoilt) -> None:
    """The bias is whole on each rank, and not zeroed on all but the first of those that share an expert."""
    p.rules(expert_bias=lambda term, bias, first: term + bias)


@bug(
    "weighed inputs",
    accepted=("expert_input", "choice_weights", "scale", "experts", "input"),
    words="weigh|input|before|after|output|scal|factor|times|multipl",
    taps=("mlp.experts.input",),
    layers=(1, 3),
    model="llama4",
    ep=1,
)
def weights_multiply_what_experts_give_and_not_what_they_read(p: Spoilt) -> None:
    """apply_router_weight_on_input is not passed to the kernel of this path."""
    of_pass: list[Tensor] = []

    def read(x: Tensor, weights: Tensor) -> Tensor:
        of_pass[:] = [weights]
        return x.unsqueeze(1).expand(-1, weights.shape[1], -1).contiguous()

    p.rules(expert_input=read, combine=lambda outputs, ones: routing.weighed_sum(outputs, of_pass[0]))


# -- shared experts and sums -----------------------------------------------------------------------------------


@bug(
    "shared expert",
    accepted=("combine", "reduce", "sharding", "scale"),
    words=r"twice|doubl|rank|factor|scal|sum|times|replic|each|\b2\b",
    taps=PARTIAL,
    layers=(1, 2),
    model="glm4-moe-lite",
    tp=2,
    ep=2,
)
def shared_expert_is_whole_on_each_rank_and_summed_with_the_rest(p: Spoilt) -> None:
    """It is replicated to save a collective, and its output is added before the one of the routed experts."""

    def add(routed: Tensor, shared: Tensor, gate: Tensor | None, comm: RingComm) -> Tensor:
        return routing.with_shared(routed, comm.ring.sum(comm.rank, shared.clone()), gate, comm)

    p.rules(shared_expert=add)


@bug(
    "shared expert",
    accepted=("combine", "gate", "sigmoid", "scale"),
    words="gate|sigmoid|shared",
    taps=PARTIAL,
    model="qwen3.5-moe",
    dtype="bfloat16",
    tp=2,
    ep=1,
)
def shared_expert_is_added_without_its_gate(p: Spoilt) -> None:
    """The class of shared experts is that of a family whose shared experts have none."""
    p.rules(shared_expert=lambda routed, shared, gate, comm: routed + shared)


@bug(
    "shared expert",
    accepted=("combine", "scale"),
    words=r"scal|factor|shared|times|multipl|2\.5",
    taps=PARTIAL,
    layers=(1, 2),
    model="glm4-moe",
    dtype="bfloat16",
    ep=1,
)
def scaling_factor_of_the_routed_multiplies_the_shared_as_well(p: Spoilt) -> None:
    """`(routed + shared) * routed_scaling_factor`: the factor was moved behind the sum of both."""

    def add(routed: Tensor, shared: Tensor, gate: Tensor | None, comm: RingComm) -> Tensor:
        return routed + shared * 2.5

    p.rules(shared_expert=add)


@bug(
    "sum over ranks",
    accepted=("reduce", "combine", "sharding"),
    words="sum|reduc|rank|group|half|missing|part",
    taps=("mlp.combine",),
    model="olmoe",
    tp=4,
    ep=2,
)
def experts_are_summed_within_their_group_of_ranks_alone(p: Spoilt) -> None:
    """The collective of the mixture is that of the ranks that share an expert, not of all that have any."""

    def reduce(partial: Tensor, comm: RingComm) -> Tensor:
        if not p.at("mlp.combine"):
            return defaults.sum_over_ranks(partial, comm)
        parts = comm.ring.gather(comm.rank, partial.clone())
        first = comm.rank // 2 * 2
        return parts[first] + parts[first + 1]

    p.rules(reduce=reduce)
