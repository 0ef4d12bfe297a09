"""What experts compute, and how it is put together."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from lockstep.engine.rules import defaults, routing
from tests.workbench.diagnosis.bugs.bug import bug
from tests.workbench.diagnosis.bugs.engine_ranks import Spoilt

PARTIAL = ("mlp.combine.partial", "mlp.combine")
READ = ("mlp.experts.gate", "mlp.experts.up")


def _experts(decoder, layers):
    for i in layers:
        yield from (expert for expert in decoder.layers[i].mlp.experts if expert.gate_up.sizes[0])


@bug(
    "weights",
    accepted=("weight", "experts", "sharding"),
    words="gate|up|swap|exchang|other|order",
    taps=READ,
    layers=(0, 2),
    ranks=(1,),
    model="qwen3-moe",
    tp=2,
    ep=2,
)
def second_expert_rank_loads_up_before_gate(p: Spoilt) -> None:
    """TransformerLens#1668, where the stack of one rank was converted by the older script."""

    def spoil(decoder):
        for expert in _experts(decoder, (0, 2)):
            gate, up = expert.gate_up.parameters().values()
            first = gate.clone()
            gate.copy_(up)
            up.copy_(first)

    if p.rank == 1:
        p.loaded(spoil)


@bug(
    "weights",
    accepted=("experts", "weight"),
    words="expert|order|permut|other|stride|index",
    taps=READ,
    model="mixtral",
    dtype="bfloat16",
    ep=1,
)
def number_of_the_expert_is_the_fastest_index_of_the_stack(p: Spoilt) -> None:
    """vllm#31534: expert e is sought at (e % 2) * 4 + e // 2."""
    p.rules(own_experts=lambda ids, held: ids % 2 * 4 + ids // 2)


@bug(
    "weights",
    accepted=("weight", "experts", "sharding"),
    words="weight|init|random|not loaded|stale|other|rank|checkpoint",
    taps=READ,
    layers=(2,),
    ranks=(1,),
    model="qwen3-moe",
    tp=2,
    ep=1,
)
def one_rank_keeps_the_experts_of_before_the_weight_sync(p: Spoilt) -> None:
    """SkyRL#1680: not written in the last layer. Those of before are near to the new ones."""

    def spoil(decoder):
        for expert in _experts(decoder, (2,)):
            for weight in expert.gate_up.parameters().values():
                weight += 0.05 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(1))

    if p.rank == 1:
        p.loaded(spoil)


@bug(
    "bias",
    accepted=("bias", "experts", "weight"),
    words="bias|other|next|expert|order|neighbour",
    taps=("mlp.experts.down",),
    model="gpt-oss",
    tp=2,
    ep=1,
)
def down_adds_the_bias_of_the_next_expert(p: Spoilt) -> None:
    def spoil(decoder):
        for layer in decoder.layers:
            biases = [expert.bias.clone() for expert in layer.mlp.experts]
            for expert, bias in zip(layer.mlp.experts, [*biases[1:], biases[0]], strict=True):
                expert.bias.copy_(bias)

    p.loaded(spoil)


@bug(
    "lost",
    accepted=("experts", "sharding"),
    words="expert|lost|zero|missing|drop|nobody|skip|rank",
    taps=READ,
    ranks=(0,),
    step=1,
    model="olmoe",
    tp=2,
    ep=2,
)
def decode_loses_the_first_two_experts_of_rank_0(p: Spoilt) -> None:
    """The range of the local experts begins behind the slots of redundant ones, which decode has not."""

    def lost(ids, held):
        return ids.where(ids >= held.start + 2, -1)

    if p.rank == 0:
        p.rules(own_experts=p.later(routing.by_number, lost))


@bug(
    "lost",
    accepted=("experts",),
    words="expert|lost|zero|missing|drop|capacity|row|token|most",
    taps=READ,
    layers=(1, 2),
    model="deepseek-v2",
    ep=1,
)
def rows_beyond_an_expert_s_capacity_are_dropped(p: Spoilt) -> None:
    """Six rows each, as in training."""

    def within(ids, held):
        ranks = F.one_hot(ids, 8).cumsum(0).gather(1, ids[:, None])[:, 0]
        return ids.where(ranks <= 6, -1)

    p.rules(own_experts=within)


@bug(
    "shared",
    accepted=("combine", "scale"),
    words="shared|factor|scal|times",
    taps=PARTIAL,
    layers=(1, 2),
    model="deepseek-v3",
    dtype="bfloat16",
    ep=1,
)
def routed_factor_reaches_the_shared_expert(p: Spoilt) -> None:
    def scaled(routed, shared, gate, comm):
        return routing.with_shared(routed, shared * 2.5, gate, comm)

    p.rules(shared_expert=scaled)


@bug(
    "shared",
    accepted=("combine", "scale"),
    words="shared|factor|scal|times|0\\.4|divid|weight",
    taps=PARTIAL,
    layers=(1, 2),
    model="glm4-moe",
    dtype="bfloat16",
    tp=2,
    ep=2,
)
def shared_expert_fused_as_a_slot_counts_one_over_the_factor(p: Spoilt) -> None:
    """sglang#28237: the slot's weight is 1 / 2.5, and the kernel does not multiply by 2.5."""

    def scaled(routed, shared, gate, comm):
        return routing.with_shared(routed, shared / 2.5, gate, comm)

    p.rules(shared_expert=scaled)


@bug(
    "shared",
    accepted=("combine", "gate", "input"),
    words="gate|shared|token|before|row|shift|other",
    taps=PARTIAL,
    layers=(1, 2),
    model="qwen2-moe",
    tp=2,
    ep=1,
)
def gate_of_the_shared_expert_is_that_of_the_token_before(p: Spoilt) -> None:
    """vllm#37856: the shared expert ran on its rank's chunk of the tokens, one off."""

    def shifted(routed, shared, gate, comm):
        return routing.with_shared(routed, shared, gate.roll(1, 0), comm)

    p.rules(shared_expert=shifted)


@bug(
    "shared",
    accepted=("combine", "reduce", "sharding", "scale"),
    words="shared|rank|twice|times|every|again|double|2",
    taps=PARTIAL,
    step=1,
    model="qwen3.5-moe",
    dtype="bfloat16",
    tp=2,
    ep=2,
)
def decode_adds_the_shared_expert_once_a_rank(p: Spoilt) -> None:
    """It is computed on another stream, where it is summed up, and each rank puts the sum into its term."""

    def whole(routed, shared, gate, comm):
        return routing.with_shared(routed, comm.all_reduce(shared.clone()), gate, comm)

    p.rules(shared_expert=p.later(routing.with_shared, whole))


@bug(
    "reduce",
    accepted=("reduce", "combine", "scale"),
    words="twice|again|reduc|times|double|sum|2",
    taps=("mlp.combine",),
    model="minimax-m2",
    tp=2,
    ep=2,
)
def combine_that_has_been_reduced_is_reduced_again(p: Spoilt) -> None:
    """vllm-ascend#6710."""

    def reduce(partial, comm):
        done = defaults.sum_over_ranks(partial, comm)
        return comm.all_reduce(done) if p.at("mlp.combine") else done

    p.rules(reduce=reduce)


@bug(
    "reduce",
    accepted=("combine", "experts", "reduce", "sharding"),
    words="rank|zero|missing|without|lost|nothing|term",
    taps=PARTIAL,
    ranks=(1,),
    step=1,
    model="mixtral",
    dtype="bfloat16",
    tp=2,
    ep=1,
)
def second_rank_adds_nothing_in_decode(p: Spoilt) -> None:
    if p.rank == 1:
        p.rules(combine=p.later(routing.weighed_sum, lambda outputs, weights: 0 * outputs[:, 0]))


@bug(
    "combine",
    accepted=("combine", "choice_weights"),
    words="weight|twice|square|again",
    taps=PARTIAL,
    layers=(0, 2),
    step=1,
    model="qwen3-moe",
    ep=1,
)
def decode_weighs_inside_the_kernel_and_behind_it(p: Spoilt) -> None:
    def twice(outputs, weights):
        return routing.weighed_sum(outputs, weights * weights)

    p.rules(combine=p.later(routing.weighed_sum, twice))


@bug(
    "combine",
    accepted=("combine", "choice_weights"),
    words="weight|order|slot|other|exchang|swap|permut|reverse|expert",
    taps=PARTIAL,
    layers=(2,),
    model="olmoe",
    dtype="bfloat16",
    ep=1,
)
def last_layer_puts_its_slots_back_the_other_way_round(p: Spoilt) -> None:
    p.rules((2,), combine=lambda outputs, weights: routing.weighed_sum(outputs, weights.flip(-1)))


@bug(
    "combine",
    accepted=("precision", "combine"),
    words="precis|round|bfloat16|bits|accumul|dtype",
    taps=PARTIAL,
    model="mixtral",
    ep=1,
)
def terms_are_accumulated_in_bfloat16(p: Spoilt) -> None:
    def rounded(outputs, weights):
        total = torch.zeros_like(outputs[:, 0], dtype=torch.bfloat16)
        for term, weight in zip(outputs.unbind(1), weights.unbind(1), strict=True):
            total = total + (term * weight[:, None]).bfloat16()
        return total.to(outputs.dtype)

    p.rules(combine=rounded)


@bug(
    "activation",
    accepted=("activation",),
    words="up|1|one|activat|clamp|swiglu|without",
    taps=("mlp.experts.act",),
    layers=(1,),
    model="gpt-oss",
    dtype="bfloat16",
    ep=1,
)
def one_layer_s_swiglu_forgets_to_add_one_to_up(p: Spoilt) -> None:
    def act(gate, up, activation):
        return defaults.gated(gate, activation) * up.clamp(-activation.limit, activation.limit)

    p.rules((1,), act=act)


@bug(
    "activation",
    accepted=("activation", "scale"),
    words="slope|1\\.702|activat|silu|sigmoid|gelu|swiglu|alpha|factor",
    taps=("mlp.experts.act",),
    ranks=(1,),
    model="gpt-oss",
    tp=2,
    ep=2,
)
def second_expert_rank_gates_with_a_slope_of_one(p: Spoilt) -> None:
    def act(gate, up, activation):
        up = up.clamp(-activation.limit, activation.limit) + 1
        return F.silu(gate.clamp(max=activation.limit)) * up

    if p.rank == 1:
        p.rules(act=act)


@bug(
    "activation",
    accepted=("activation",),
    words="activat|relu|square|silu|gelu",
    taps=("mlp.experts.act",),
    layers=(1,),
    model="nemotron-h-moe",
    tp=2,
    ep=2,
)
def experts_without_a_gate_forget_the_square(p: Spoilt) -> None:
    """The fused kernel has relu, the MLP beside it relu2."""
    p.rules((1,), act_alone=lambda x, activation: F.relu(x))
