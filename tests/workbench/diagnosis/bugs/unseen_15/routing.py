"""Routers: their logits, which experts are chosen, and by what their outputs are weighed."""

from __future__ import annotations

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


# -- logits --------------------------------------------------------------------------------------------------


@bug(
    "router",
    accepted=("linear", "weight", "precision"),
    words="quanti|round|bit|weight|precision|matrix|coarse",
    taps=ROUTER,
    layers=(2,),
    model="qwen3-moe",
    ep=1,
)
def router_of_the_last_layer_is_quantised_with_the_experts(p: Spoilt) -> None:
    """`mlp.gate` of one layer is not among the modules left alone (vllm #25923), and has four bits as experts do."""

    def spoil(decoder: Decoder) -> None:
        mlp = decoder.layers[2].mlp
        assert isinstance(mlp, MixtureOfExperts)
        (weight,) = mlp.router.weight.parts().values()
        scale = weight.abs().amax(-1, keepdim=True) / 7
        weight.copy_((weight / scale).round() * scale)

    p.loaded(spoil)


class _Gathered(Router):
    """Each rank makes the logits of its part of the tokens; the second rank's are put first."""

    def __call__(self, x: Tensor) -> Tensor:
        logits = super().__call__(x)
        half = (len(logits) + 1) // 2
        return torch.cat((logits[half:], logits[:half]))


@bug(
    "sequence parallel",
    accepted=("linear", "input", "sharding", "positions"),
    words="row|token|order|rank|other|shift|exchang|chunk|gather|half",
    taps=ROUTER,
    layers=(1, 2),
    model="qwen2-moe",
    tp=2,
    ep=2,
)
def logits_of_the_router_are_gathered_with_the_second_rank_first(p: Spoilt) -> None:
    """Tokens are shared out to the ranks for the router; the gather goes by the ranks' order in another group."""

    def spoil(decoder: Decoder) -> None:
        for layer in decoder.layers:
            if isinstance(layer.mlp, MixtureOfExperts):
                layer.mlp.router.__class__ = _Gathered

    p.loaded(spoil)


@bug(
    "input of the router",
    accepted=("channel_scale", "weight", "scale"),
    words="scale|channel|weight|ones|multipl|number|load|vector",
    taps=("mlp.router_input",),
    ranks=(1,),
    model="gemma4-moe",
    dtype="bfloat16",
    tp=2,
    ep=2,
)
def second_rank_never_loads_the_numbers_of_the_router_s_channels(p: Spoilt) -> None:
    """`router.scale` has no shape that is split, and the loader of further ranks looks for those: it stays at ones."""

    def spoil(decoder: Decoder) -> None:
        for layer in decoder.layers:
            assert layer.beside is not None
            layer.beside.scale.fill_(1)

    if p.rank == 1:
        p.loaded(spoil)


# -- choice --------------------------------------------------------------------------------------------------


@bug(
    "groups",
    accepted=("choice",),
    words="group|best|highest|two",
    taps=IDS,
    layers=(1, 2),
    model="deepseek-v2",
    tp=2,
    ep=2,
)
def groups_of_an_older_model_are_ranked_by_two_experts(p: Spoilt) -> None:
    """group_limited_greedy of DeepSeek-V2 goes by a group's best expert; one code serves it and V3, by the best two."""

    def choose(scores: Tensor, correction: Tensor | None, experts: ExpertsConfig) -> Tensor:
        return routing.best(scores, correction, replace(experts, group_best=2))

    p.rules(choice=choose)


@bug(
    "choice",
    accepted=("choice",),
    words=r"never|last|first|only|missing|left out|beyond|six|\b[67]\b",
    taps=IDS,
    step=1,
    model="granitemoe",
    dtype="bfloat16",
    ep=1,
)
def kernel_of_decode_chooses_among_the_first_six_experts(p: Spoilt) -> None:
    """The top-k kernel for few tokens has a tile of another model's number of experts."""

    def choose(scores: Tensor, correction: Tensor | None, experts: ExpertsConfig) -> Tensor:
        return routing.best(scores[:, :6], correction, experts)

    p.rules(choice=p.later(routing.best, choose))


@bug(
    "choice",
    accepted=("choice",),
    words="group|correct|bias",
    taps=IDS,
    model="solar-open",
    dtype="bfloat16",
    tp=4,
    ep=2,
)
def fallback_chooses_without_groups_and_without_the_correction(p: Spoilt) -> None:
    """Two at once: the fused top-k does not know the model, and the plain one takes the best of the bare scores."""

    def choose(scores: Tensor, correction: Tensor | None, experts: ExpertsConfig) -> Tensor:
        return routing.best(scores, None, replace(experts, groups=1, top_groups=1))

    p.rules(choice=choose)


# -- weights -------------------------------------------------------------------------------------------------


@bug(
    "weights",
    accepted=("choice_weights", "softmax", "scale"),
    words="group|softmax|sum|share|denominator|normal|divid|kept",
    taps=WEIGHTS,
    layers=(1, 2),
    model="deepseek-v2",
    ep=1,
)
def softmax_of_the_router_is_made_behind_the_choice_of_groups(p: Spoilt) -> None:
    """The logits of other groups are masked first, so that scores are shares among the groups that are left."""

    def weigh(scores: Tensor, ids: Tensor, correction: Tensor | None, experts: ExpertsConfig) -> Tensor:
        kept = scores.where(routing.within_groups(scores, experts).isfinite(), 0)
        return routing.weights(kept / kept.sum(-1, keepdim=True), ids, correction, experts)

    p.rules(choice_weights=weigh)


@bug(
    "weights",
    accepted=("choice_weights", "scale"),
    words="share|correct|bias|sum|divid|normal|denominator|scal|factor",
    taps=WEIGHTS,
    layers=(1,),
    step=1,
    model="exaone-moe",
    ep=1,
)
def router_of_decode_divides_by_the_sum_of_corrected_scores(p: Spoilt) -> None:
    """The fused kernel goes on with the scores that it chose by, and takes the correction off the dividend alone."""

    def weigh(scores: Tensor, ids: Tensor, correction: Tensor | None, experts: ExpertsConfig) -> Tensor:
        assert correction is not None
        total = (scores + correction).gather(-1, ids).sum(-1, keepdim=True)
        return scores.gather(-1, ids) / total * experts.factor

    p.rules(choice_weights=p.later(routing.weights, weigh))


@bug(
    "weights",
    accepted=("choice_weights", "softmax", "sigmoid"),
    words="softmax|sigmoid|share|sum|normal|score|function",
    taps=WEIGHTS,
    layers=(1, 3),
    model="llama4",
    dtype="bfloat16",
    tp=2,
    ep=2,
)
def experts_share_a_softmax_where_each_has_a_sigmoid(p: Spoilt) -> None:
    """Llama 4 has a custom_routing_function, which the kernel of one quantisation is not handed on to."""

    def weigh(scores: Tensor, ids: Tensor, correction: Tensor | None, experts: ExpertsConfig) -> Tensor:
        return scores.gather(-1, ids).logit().softmax(-1)

    p.rules(choice_weights=weigh)


@bug(
    "weights",
    accepted=("choice_weights",),
    words=r"jitter|mixer|thresh|softmax|share|0\.0?1|0\.3|lower|mask",
    taps=WEIGHTS,
    model="phimoe",
    ep=1,
)
def jitter_of_the_sparse_mixer_is_the_default(p: Spoilt) -> None:
    """`sparsemixer(gating_output, topk, jitter_eps=0.01)`: nobody passes router_jitter_noise."""

    def weigh(scores: Tensor, ids: Tensor, correction: Tensor | None, experts: ExpertsConfig) -> Tensor:
        return routing.mixed(scores, ids, 0.01)

    p.rules(choice_weights=weigh)
