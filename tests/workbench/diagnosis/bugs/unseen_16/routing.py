"""Routers: their logits, the choice of experts, the weights of those that are chosen."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from lockstep.engine.config.experts import ExpertsConfig
from lockstep.engine.layers.experts import MixtureOfExperts, Router
from lockstep.engine.model import Decoder
from lockstep.engine.rules import routing
from tests.workbench.diagnosis.bugs.bug import bug
from tests.workbench.diagnosis.bugs.engine_ranks import Spoilt

ROUTER = ("mlp.router",)
IDS = ("mlp.topk_ids",)
WEIGHTS = ("mlp.topk_weights",)


def _mixtures(decoder: Decoder) -> dict[int, MixtureOfExperts]:
    """Those of the layers that have one."""
    return {i: layer.mlp for i, layer in enumerate(decoder.layers) if isinstance(layer.mlp, MixtureOfExperts)}


def _logits(p: Spoilt, product: Callable[[Router, Tensor], Tensor]) -> None:
    """Routers that give what `product` makes of themselves and their input."""

    class Other(Router):
        def __call__(self, x: Tensor) -> Tensor:
            return product(self, x)

    def spoil(decoder: Decoder) -> None:
        for mixture in _mixtures(decoder).values():
            mixture.router.__class__ = Other

    p.loaded(spoil)


# -- logits --------------------------------------------------------------------------------------------------


@bug(
    "router",
    accepted=("linear", "reduce", "scale", "sharding"),
    words=r"twice|doubl|factor|scal|times|sum|reduc|rank|\b2\b",
    taps=ROUTER,
    model="hunyuan-moe",
    tp=2,
    ep=2,
)
def replicated_router_is_finished_by_a_sum_over_the_ranks(p: Spoilt) -> None:
    """The gate is whole on every rank and was made from the class of row-parallel layers, which adds the ranks up."""
    _logits(p, lambda router, x: Router.__call__(router, x) * p.tp)


@bug(
    "router",
    accepted=("precision", "linear", "weight"),
    words="precision|round|bfloat16|half|dtype|bit|coarse|autocast",
    taps=ROUTER,
    layers=(1, 2),
    model="deepseek-v2",
    ep=1,
)
def router_is_computed_in_bfloat16(p: Spoilt) -> None:
    """The call of the gate stands within the block of autocast, where the reference leaves it with float32."""

    def product(router: Router, x: Tensor) -> Tensor:
        (weight,) = router.weight.parts().values()
        return (x.bfloat16() @ weight.bfloat16().T).float()

    _logits(p, product)


@bug(
    "router",
    accepted=("linear", "bias", "weight"),
    words="bias",
    taps=ROUTER,
    model="gpt-oss",
    dtype="bfloat16",
    tp=2,
    ep=1,
)
def router_is_built_without_its_bias(p: Spoilt) -> None:
    """ReplicatedLinear(hidden, experts, bias=False) as in every other mixture; the loader passes over `router.bias`."""
    p.rules(load_bias=lambda name: not name.endswith("router.bias"))


# -- choice --------------------------------------------------------------------------------------------------


@bug(
    "correction",
    accepted=("choice", "bias", "weight"),
    words="correct|bias",
    taps=IDS,
    layers=(1,),
    model="dots1",
    dtype="bfloat16",
    ep=1,
)
def correction_of_the_choice_stays_at_its_initial_zeros(p: Spoilt) -> None:
    """The parameter hangs on the mixture and not on the gate, so that the checkpoint's name for it finds nothing."""
    p.rules(choice=lambda scores, correction, experts: routing.best(scores, None, experts))


@bug(
    "correction",
    accepted=("choice", "bias"),
    words="correct|bias",
    taps=IDS,
    step=1,
    model="minimax-m2",
    tp=2,
    ep=2,
)
def decode_chooses_without_the_correction(p: Spoilt) -> None:
    """The fused kernel for few tokens has no argument for e_score_correction_bias and is taken all the same."""

    def best(scores: Tensor, correction: Tensor | None, experts: ExpertsConfig) -> Tensor:
        return routing.best(scores, None, experts)

    p.rules(choice=p.later(routing.best, best))


@bug(
    "groups",
    accepted=("choice",),
    words="group",
    taps=IDS,
    layers=(1, 2),
    model="deepseek-v3",
    dtype="bfloat16",
    tp=2,
    ep=1,
)
def groups_are_ranked_by_their_best_expert_alone(p: Spoilt) -> None:
    """V2's rule, `max(dim=-1)`, where V3 adds the two best of each group."""

    def best(scores: Tensor, correction: Tensor | None, experts: ExpertsConfig) -> Tensor:
        return routing.best(scores, correction, replace(experts, group_best=1))

    p.rules(choice=best)


# -- weights -------------------------------------------------------------------------------------------------


@bug(
    "shares",
    accepted=("choice_weights", "scale"),
    words="renorm|normal|sum|share|divid|scal|factor",
    taps=WEIGHTS,
    model="olmoe",
    dtype="bfloat16",
    tp=2,
    ep=2,
)
def weights_are_made_shares_where_the_configuration_says_not_to(p: Spoilt) -> None:
    """`renormalize=True` is the default of the fused mixture, and norm_topk_prob is not handed on."""

    def weigh(scores: Tensor, ids: Tensor, correction: Tensor | None, experts: ExpertsConfig) -> Tensor:
        return routing.weights(scores, ids, correction, replace(experts, renormalised=True))

    p.rules(choice_weights=weigh)


@bug(
    "correction",
    accepted=("choice_weights", "bias"),
    words="correct|bias",
    taps=WEIGHTS,
    layers=(1, 2),
    model="glm4-moe",
    tp=2,
    ep=1,
)
def weights_are_gathered_from_the_corrected_scores(p: Spoilt) -> None:
    """`topk(scores + bias)` returns values and indices, and the values are taken for the weights."""

    def weigh(scores: Tensor, ids: Tensor, correction: Tensor | None, experts: ExpertsConfig) -> Tensor:
        assert correction is not None
        return routing.finished((scores + correction).gather(-1, ids), experts)

    p.rules(choice_weights=weigh)


@bug(
    "order",
    accepted=("choice_weights",),
    words="order|sort|permut|other expert|slot|swap|exchang|descend",
    taps=WEIGHTS,
    model="granitemoe",
    tp=2,
    ep=2,
)
def chosen_numbers_are_sorted_and_their_weights_are_not(p: Spoilt) -> None:
    """Ids are brought into order for the grouped product; the weights stay as topk gave them, the highest first."""

    def weigh(scores: Tensor, ids: Tensor, correction: Tensor | None, experts: ExpertsConfig) -> Tensor:
        return routing.weights(scores, ids, correction, experts).sort(-1, descending=True).values

    p.rules(choice_weights=weigh)


@bug(
    "scores",
    accepted=("choice_weights", "softmax", "sigmoid", "activation"),
    words="sigmoid|softmax",
    taps=WEIGHTS,
    layers=(1, 3),
    model="llama4",
    dtype="bfloat16",
    tp=2,
    ep=2,
)
def chosen_experts_share_a_softmax_as_mixtral_s_do(p: Spoilt) -> None:
    """The mixture's own routing function is used, where the model passes one of sigmoids."""

    def weigh(scores: Tensor, ids: Tensor, correction: Tensor | None, experts: ExpertsConfig) -> Tensor:
        return torch.logit(scores.gather(-1, ids)).softmax(-1)

    p.rules(choice_weights=weigh)


@bug(
    "scores",
    accepted=("choice", "choice_weights", "softmax", "sigmoid", "scores"),
    words="sigmoid|softmax",
    taps=(*IDS, *WEIGHTS),
    model="solar-open",
    ep=1,
)
def scores_are_a_softmax_where_they_are_sigmoids(p: Spoilt) -> None:
    """`scoring_func` is not in the configuration of this family, and its default is that of the first models."""
    p.rules(router_scores=lambda logits, experts: routing.scores(logits, replace(experts, scores="softmax")))


@bug(
    "factor",
    accepted=("choice_weights", "scale"),
    words=r"scal|factor|multipl|times|1\.5",
    taps=WEIGHTS,
    layers=(1,),
    model="nemotron-h-moe",
    tp=2,
    ep=1,
)
def routed_scaling_factor_is_never_applied(p: Spoilt) -> None:
    """The model leaves it to the fused mixture, and the mixture's constructor ignores the argument."""

    def weigh(scores: Tensor, ids: Tensor, correction: Tensor | None, experts: ExpertsConfig) -> Tensor:
        return routing.weights(scores, ids, correction, replace(experts, factor=1.0))

    p.rules(choice_weights=weigh)
