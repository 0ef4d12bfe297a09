"""What experts compute, what is made of it, shared experts, and experts on several ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lockstep.engine.config import ModelConfig
from lockstep.engine.config.families import Gating
from lockstep.engine.layers.experts import MixtureOfExperts
from lockstep.engine.model import Decoder
from lockstep.engine.parallel import shards
from lockstep.engine.rules import defaults, routing
from tests.workbench.diagnosis.bugs.bug import bug
from tests.workbench.diagnosis.bugs.engine_ranks import RingComm, Spoilt

PARTIAL = ("mlp.combine.partial",)
ACT = ("mlp.experts.act",)
DOWN = ("mlp.experts.down",)
GATE_UP = ("mlp.experts.gate", "mlp.experts.up")


def _mixtures(decoder: Decoder) -> dict[int, MixtureOfExperts]:
    """Those of the layers that have one."""
    return {i: layer.mlp for i, layer in enumerate(decoder.layers) if isinstance(layer.mlp, MixtureOfExperts)}


# -- products ------------------------------------------------------------------------------------------------


@bug(
    "balancer",
    accepted=("experts", "weight", "linear", "sharding"),
    words="another|other expert|weight|exchang|swap|moved|order|load",
    taps=DOWN,
    layers=(1,),
    ranks=(1,),
    model="qwen2-moe",
    tp=2,
    ep=2,
)
def down_stays_behind_when_an_expert_moves_to_another_slot(p: Spoilt) -> None:
    """The balancer of one layer moves w13 and its map, and not w2, which was a view made before."""

    def spoil(decoder: Decoder) -> None:
        experts = _mixtures(decoder)[1].experts
        (one,), (other,) = (experts[i].down.parts().values() for i in (4, 6))
        held = one.clone()
        one.copy_(other)
        other.copy_(held)

    if p.rank == 1:
        p.loaded(spoil)


@bug(
    "biases",
    accepted=("experts", "bias", "weight", "linear"),
    words="bias",
    taps=GATE_UP,
    ranks=(1,),
    model="gpt-oss",
    tp=2,
    ep=2,
)
def second_expert_rank_finds_no_biases_of_gate_and_up(p: Spoilt) -> None:
    """They are looked up by the number within the rank, of which no parameter has the name, and stay zero."""

    def spoil(decoder: Decoder) -> None:
        for mixture in _mixtures(decoder).values():
            for expert in mixture.experts:
                assert expert.gate_up.bias is not None
                expert.gate_up.bias.zero_()

    if p.rank == 1:
        p.loaded(spoil)


@bug(
    "sharding",
    accepted=("experts", "weight", "sharding", "linear"),
    words="column|shard|part|slice|rank|half|down|weight|order|other",
    taps=DOWN,
    model="mixtral",
    tp=4,
    ep=2,
)
def columns_of_an_expert_s_down_go_to_its_ranks_from_the_last(p: Spoilt) -> None:
    """Gate and up are cut by the rank within the group, down by its distance from the end."""

    def shard(name: str, model: ModelConfig, tp: int, rank: int, ep: int = 1) -> shards.Shard:
        down = ".experts." in name and (".w2." in name or "down_proj" in name)
        return shards.plan(name, model, tp, rank ^ 1 if down else rank, ep)

    p.rules(shard=shard)


@bug(
    "dispatch",
    accepted=("experts", "input", "scale", "linear"),
    words="input|scal|row|token|quanti|before|factor|dispatch",
    taps=GATE_UP,
    layers=(1, 2),
    ranks=(1,),
    model="glm4-moe",
    tp=2,
    ep=2,
)
def dispatched_rows_arrive_with_the_scale_of_the_row_before(p: Spoilt) -> None:
    """Rows are sent to the other rank as eight-bit codes, and their scales by a buffer that begins a row later."""

    def spoil(decoder: Decoder) -> None:
        for mixture in _mixtures(decoder).values():

            def read(x: Tensor, weights: Tensor, right: Any = mixture._read) -> Tensor:
                largest = x.abs().amax(-1, keepdim=True)
                return right(x * (largest.roll(1, 0) / largest), weights)

            mixture._read = read

    if p.rank == 1:
        p.loaded(spoil)


# -- activation ----------------------------------------------------------------------------------------------


@bug(
    "activation",
    accepted=("activation",),
    words="clamp|limit|clip",
    taps=ACT,
    step=1,
    model="gpt-oss",
    dtype="bfloat16",
    tp=2,
    ep=2,
)
def kernel_of_decode_does_not_clamp_gate_and_up(p: Spoilt) -> None:
    """The epilogue for few tokens has the slope and the one that is added, and no argument for swiglu_limit."""

    def act(gate: Tensor, up: Tensor, activation: Gating) -> Tensor:
        return gate * (1.702 * gate).sigmoid() * (up + 1)

    p.rules(act=p.later(defaults.act_and_mul, act))


# -- sum over a token's experts ------------------------------------------------------------------------------


@bug(
    "biases",
    accepted=("combine", "bias"),
    words="bias|weigh",
    taps=PARTIAL,
    model="gpt-oss",
    dtype="bfloat16",
    ep=1,
)
def bias_of_down_is_added_behind_the_weights(p: Spoilt) -> None:
    """The kernel multiplies its accumulator by the routing weight and then adds the bias, of which each token gets
    the whole for every expert."""
    ids: dict[int, Tensor] = {}
    biases: dict[int, Tensor] = {}

    def spoil(decoder: Decoder) -> None:
        for i, mixture in _mixtures(decoder).items():
            biases[i] = torch.stack([one.bias for one in mixture.experts if one.bias is not None])

            def route(x: Tensor, i: int = i, right: Any = mixture.route) -> tuple[Tensor, Tensor]:
                ids[i], weights = right(x)
                return ids[i], weights

            mixture.route = route

    def combine(outputs: Tensor, weights: Tensor, i: int) -> Tensor:
        own = biases[i][ids[i]]
        return routing.weighed_sum(outputs - own, weights) + own.sum(1)

    p.loaded(spoil)
    for i in range(p.model.num_layers):
        p.rules((i,), combine=lambda outputs, weights, i=i: combine(outputs, weights, i))


@bug(
    "combine",
    accepted=("combine",),
    words="slot|third|last|left out|missing|two|drop|fewer",
    taps=PARTIAL,
    model="olmoe",
    ep=1,
)
def sum_is_compiled_for_two_slots_of_three(p: Spoilt) -> None:
    """moe_sum is unrolled for the top-k of another model."""
    p.rules(combine=lambda outputs, weights: routing.weighed_sum(outputs[:, :2], weights[:, :2]))


@bug(
    "padding",
    accepted=("combine", "reduce", "input"),
    words="row|token|pad|first|twice|sequence|added",
    taps=PARTIAL,
    step=1,
    model="hunyuan-moe",
    dtype="bfloat16",
    ep=1,
)
def padding_of_the_sorted_rows_is_added_to_the_first_token(p: Spoilt) -> None:
    """Graphs of decode pad the sorted ids with the last row; the index of what is not there is clamped to zero."""

    def combine(outputs: Tensor, weights: Tensor) -> Tensor:
        out = routing.weighed_sum(outputs, weights)
        return torch.cat((out[:1] + out[-1:], out[1:]))

    p.rules(combine=p.later(routing.weighed_sum, combine))


# -- shared experts ------------------------------------------------------------------------------------------


@bug(
    "shared expert",
    accepted=("combine", "input", "layer"),
    words="shared|layer|before|previous|stale|buffer|old|other",
    taps=PARTIAL,
    layers=(1, 2),
    step=1,
    model="deepseek-v3",
    tp=2,
    ep=2,
)
def decode_adds_what_the_shared_expert_gave_a_layer_before(p: Spoilt) -> None:
    """It runs on a stream of its own and is not waited for: its buffer holds what an earlier layer has written."""
    buffer: list[Tensor] = []

    def add(routed: Tensor, shared: Tensor, gate: Tensor | None, comm: RingComm) -> Tensor:
        read = buffer[0][: len(shared)] if p.decode else shared
        buffer[:] = [shared.clone()]
        return routing.with_shared(routed, read, gate, comm)

    p.rules(shared_expert=add)


@bug(
    "gate of the shared expert",
    accepted=("combine", "sigmoid", "gate", "scale", "sharding"),
    words=r"twice|doubl|rank|factor|scal|sum|times|\b2\b",
    taps=PARTIAL,
    model="qwen3-next",
    dtype="bfloat16",
    tp=2,
    ep=1,
)
def logit_of_the_shared_gate_is_summed_over_ranks_that_have_it_whole(p: Spoilt) -> None:
    """The gate of one row is replicated, and finished as if each rank had a part of what goes in."""

    def add(routed: Tensor, shared: Tensor, gate: Tensor | None, comm: RingComm) -> Tensor:
        assert gate is not None
        return routing.with_shared(routed, shared, gate * comm.size, comm)

    p.rules(shared_expert=add)


@bug(
    "gate of the shared expert",
    accepted=("combine", "sigmoid", "gate", "scale"),
    words="gate|sigmoid|half|divid|rank|factor|scal|shared",
    taps=PARTIAL,
    layers=(2,),
    model="qwen2-moe",
    tp=2,
    ep=2,
)
def last_layer_divides_the_shared_expert_by_the_ranks_and_leaves_out_its_gate(p: Spoilt) -> None:
    """Two at once: a layer that is not quantised takes another path, which takes the shared expert for replicated."""
    p.rules((2,), shared_expert=lambda routed, shared, gate, comm: routed + shared / comm.size)


@bug(
    "norms",
    accepted=("norm", "weight"),
    words="norm|weight|other|exchang|expert|swap",
    taps=("mlp.dense_norm",),
    model="gemma4-moe",
    ep=1,
)
def norms_behind_the_mlp_and_behind_the_experts_change_places(p: Spoilt) -> None:
    """post_feedforward_layernorm_1 and _2 are mapped by the order in which the code adds both."""

    def spoil(decoder: Decoder) -> None:
        for layer in decoder.layers:
            assert layer.beside is not None
            one, other = layer.beside.dense_norm.weight, layer.beside.combine_norm.weight
            held = one.clone()
            one.copy_(other)
            other.copy_(held)

    p.loaded(spoil)
