"""Harmless changes of routers, experts, latents, states and attention that differs by layer."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from lockstep.engine.config.experts import ExpertsConfig
from lockstep.engine.config.families import ClampedSwiGLU, Gating
from lockstep.engine.config.indexer import IndexerConfig
from lockstep.engine.layers.experts import Expert, MixtureOfExperts, Router
from lockstep.engine.model import Decoder
from lockstep.engine.rules import indexer, routing
from tests.workbench.diagnosis.bugs.bug import control
from tests.workbench.diagnosis.bugs.engine_ranks import RingComm, Spoilt


def _mixtures(decoder: Decoder) -> list[MixtureOfExperts]:
    return [layer.mlp for layer in decoder.layers if isinstance(layer.mlp, MixtureOfExperts)]


def _weight(expert: Expert) -> Tensor:
    """Of its down."""
    (found,) = expert.down.parts().values()
    assert isinstance(found, Tensor)
    return found


# -- routers -------------------------------------------------------------------------------------------------


@control("router", model="deepseek-v3", tp=2, ep=2)
def scores_of_the_router_are_made_in_double_precision(p: Spoilt) -> None:
    p.rules(router_scores=lambda logits, experts: routing.scores(logits.double(), experts).float())


class _Double(Router):
    """The product in float64, rounded once."""

    def __call__(self, x: Tensor) -> Tensor:
        (weight,) = self.weight.parts().values()
        assert isinstance(weight, Tensor)
        return (x.double() @ weight.double().T).to(weight.dtype)


@control("router", model="glm4-moe", ep=1)
def product_of_the_router_is_made_in_double_precision(p: Spoilt) -> None:
    def spoil(decoder: Decoder) -> None:
        for mixture in _mixtures(decoder):
            mixture.router.__class__ = _Double

    p.loaded(spoil)


@control("weights", model="mixtral", tp=2, ep=1)
def shares_are_made_of_scores_over_the_largest(p: Spoilt) -> None:
    def weigh(scores: Tensor, ids: Tensor, correction: Tensor | None, experts: ExpertsConfig) -> Tensor:
        return routing.weights(scores / scores.amax(-1, keepdim=True), ids, correction, experts)

    p.rules(choice_weights=weigh)


@control("weights", model="phimoe", ep=1)
def sparse_mixer_works_in_double_precision(p: Spoilt) -> None:
    def weigh(scores: Tensor, ids: Tensor, correction: Tensor | None, experts: ExpertsConfig) -> Tensor:
        return routing.weights(scores.double(), ids, correction, experts).float()

    p.rules(choice_weights=weigh)


# -- experts -------------------------------------------------------------------------------------------------


@control("experts", model="olmoe", dtype="bfloat16", tp=2, ep=2)
def down_of_experts_is_summed_in_two_halves(p: Spoilt) -> None:
    def spoil(decoder: Decoder) -> None:
        for expert in (one for mixture in _mixtures(decoder) for one in mixture.experts):

            def product(x: Tensor, bias: Tensor | None = None, expert: Expert = expert) -> Tensor:
                halves = zip(x.chunk(2, -1), _weight(expert).chunk(2, -1), strict=True)
                one, other = (F.linear(*half) for half in halves)
                return one + other

            expert.down.product = product

    p.loaded(spoil)


@control("experts", model="gpt-oss", dtype="bfloat16", tp=2, ep=2)
def down_of_experts_is_rounded_once_behind_its_bias(p: Spoilt) -> None:
    def spoil(decoder: Decoder) -> None:
        for expert in (one for mixture in _mixtures(decoder) for one in mixture.experts):

            def product(x: Tensor, bias: Tensor | None = None, expert: Expert = expert) -> Tensor:
                return F.linear(x.float(), _weight(expert).float())

            expert.down.product = product

    def add(term: Tensor, bias: Tensor, first: bool) -> Tensor:
        return routing.bias_once(term, bias.float(), first).bfloat16()

    p.loaded(spoil)
    p.rules(expert_bias=add)


@control("activation", model="gpt-oss", tp=2, ep=2)
def clamped_swiglu_by_a_silu(p: Spoilt) -> None:
    def act(gate: Tensor, up: Tensor, activation: Gating) -> Tensor:
        assert isinstance(activation, ClampedSwiGLU)
        limit, slope = activation.limit, activation.slope
        return F.silu(slope * gate.clamp(max=limit)) * (up.clamp(-limit, limit) + 1) / slope

    p.rules(act=act)


@control("shared expert", model="qwen3-next", dtype="bfloat16", tp=2, ep=1)
def shared_expert_is_divided_by_one_and_an_exponential(p: Spoilt) -> None:
    def add(routed: Tensor, shared: Tensor, gate: Tensor | None, comm: RingComm) -> Tensor:
        assert gate is not None
        return (routed + shared.float() / (1 + (-gate.float()).exp())).to(routed.dtype)

    p.rules(shared_expert=add)


# -- latents, states and attention ---------------------------------------------------------------------------


@control("indexer", model="deepseek-v32", ep=1)
def index_scores_are_made_in_double_precision(p: Spoilt) -> None:
    def score(q: Tensor, k: Tensor, weights: Tensor, config: IndexerConfig) -> Tensor:
        return indexer.scores(q.double(), k.double(), weights.double(), config).float()

    p.rules(index_scores=score)


@control("delta rule", model="qwen3.5", tp=2, ep=1)
def delta_rule_works_in_double_precision(p: Spoilt) -> None:
    def rule(
        state: Tensor, q: Tensor, k: Tensor, v: Tensor, beta: Tensor, decay: Tensor
    ) -> tuple[Tensor, Tensor]:
        held, read = state.double(), []
        rows = zip(*(one.double() for one in (q * q.shape[-1] ** -0.5, k, v, beta, decay)), strict=True)
        for query, key, value, rate, left in rows:
            held = held * left.exp()[:, None, None]
            wrong = rate[:, None] * (value - (key.unsqueeze(1) @ held).squeeze(1))
            held = held + key.unsqueeze(2) * wrong.unsqueeze(1)
            read.append((query.unsqueeze(1) @ held).squeeze(1))
        return torch.stack(read).float(), held.float()

    p.rules(delta_rule=rule)


@control("mamba", model="bamba", tp=2, ep=1)
def rates_of_mamba_are_powers_of_two(p: Spoilt) -> None:
    p.rules(ssm_rate=lambda a_log: -(a_log.float() * math.log2(math.e)).exp2())


@control("mamba", model="nemotron-h", tp=2, ep=1)
def gated_norm_of_mamba_works_in_double_precision(p: Spoilt) -> None:
    def norm(x: Tensor, gate: Tensor, weight: Tensor, normalised: Callable[[Tensor], Tensor]) -> Tensor:
        return (weight.double() * normalised(x.double() * F.silu(gate.double()))).to(x.dtype)

    p.rules(ssm_norm=norm)


@control("output gate", model="qwen3.5-moe", dtype="bfloat16", tp=2, ep=2)
def output_gate_of_attention_is_rounded_once(p: Spoilt) -> None:
    p.rules(output_gate=lambda x, gate: (x.float() * gate.float().sigmoid()).to(x.dtype))


@control("sinks", model="gpt-oss", tp=2, ep=1)
def softmax_with_sinks_works_in_double_precision(p: Spoilt) -> None:
    def softmax(scores: Tensor, sinks: Tensor, dtype: torch.dtype) -> Tensor:
        beside = sinks.double().expand(*scores.shape[:-1], 1)
        return torch.cat((scores.double(), beside), -1).softmax(-1)[..., :-1].to(dtype)

    p.rules(sinks=softmax)


@control("soft cap", model="vaultgemma", ep=1)
def tanh_of_the_cap_by_a_sigmoid(p: Spoilt) -> None:
    p.rules(soft_cap=lambda x, cap: cap * (2 * (2 * x / cap).sigmoid() - 1))
