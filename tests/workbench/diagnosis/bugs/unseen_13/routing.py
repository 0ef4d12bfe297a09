"""Which experts a token goes to, and how much each of them counts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from lockstep.engine.rules import defaults, routing
from tests.workbench.diagnosis.bugs.bug import bug
from tests.workbench.diagnosis.bugs.engine_ranks import Spoilt

ROUTER = ("mlp.router",)
IDS = ("mlp.topk_ids",)
WEIGHTS = ("mlp.topk_weights",)


def _choice_by_logits(p: Spoilt, choose: Callable[[Tensor, int], Tensor]) -> None:
    """Experts are chosen by the logits themselves and not by what is made of them."""
    held: list[Tensor] = []

    def scores(logits, experts):
        held[:] = [logits.float()]
        return routing.scores(logits, experts)

    def choice(scores, correction, experts):
        return choose(held[0], experts.top_k).sort(-1).values

    p.rules(router_scores=scores, choice=choice)


@bug(
    "bias",
    accepted=("bias", "linear"),
    words="bias|constant|offset|correct|add",
    taps=ROUTER,
    layers=(1, 2),
    model="glm4-moe",
    tp=2,
    ep=2,
)
def correction_is_loaded_as_the_bias_of_the_router(p: Spoilt) -> None:
    """`gate.e_score_correction_bias` matches the name of the product's bias; the buffer of corrections stays zero."""

    def spoil(decoder):
        for i in (1, 2):
            router = decoder.layers[i].mlp.router
            router.bias = router.correction.clone()
            router.correction.zero_()

    p.loaded(spoil)


@bug(
    "renormalisation",
    accepted=("choice_weights", "scale"),
    words="renorm|normal|sum|share|divid|all|scal|small",
    taps=WEIGHTS,
    model="minimax-m2",
    dtype="bfloat16",
    ep=1,
)
def shares_are_of_the_sum_over_all_experts(p: Spoilt) -> None:
    """The scores are divided by their sum where it is a softmax that is meant, before the best ones are taken."""

    def shares(scores, ids, correction, experts):
        whole = scores / scores.sum(-1, keepdim=True)
        return whole.gather(-1, ids) * experts.factor

    p.rules(choice_weights=shares)


@bug(
    "factor",
    accepted=("choice_weights", "scale"),
    words="factor|scal|times|1\\.5|multipl|without|missing|small",
    taps=WEIGHTS,
    layers=(1,),
    model="exaone-moe",
    tp=2,
    ep=2,
)
def factor_is_left_by_the_layer_to_a_kernel_that_does_not_know_it(p: Spoilt) -> None:
    """vllm#43769: routed_scaling_factor is handed on to the backend, whose routing has no such argument."""

    def without(scores, ids, correction, experts):
        return routing.weights(scores, ids, correction, replace(experts, factor=1.0))

    p.rules(choice_weights=without)


@bug(
    "choice",
    accepted=("choice",),
    words="choos|chose|choice|expert|twice|same|again|duplic|rout",
    taps=IDS,
    model="granitemoe",
    tp=2,
    ep=1,
)
def taken_experts_are_marked_by_a_logit_of_zero(p: Spoilt) -> None:
    """The loop over slots takes the largest logit and overwrites it: where all others are negative it comes again."""

    def choose(logits, top_k):
        left, taken = logits.clone(), []
        for _ in range(top_k):
            taken.append(left.argmax(-1, keepdim=True))
            left.scatter_(-1, taken[-1], 0.0)
        return torch.cat(taken, -1)

    _choice_by_logits(p, choose)


@bug(
    "choice",
    accepted=("choice",),
    words="choos|chose|choice|expert|order|negative|sign|rout|best|worst",
    taps=IDS,
    model="olmoe",
    dtype="bfloat16",
    tp=2,
    ep=2,
)
def logits_are_compared_by_their_bits(p: Spoilt) -> None:
    """flashinfer#2822: packed with the expert's number as whole numbers; of negative ones the order is reversed."""
    _choice_by_logits(p, lambda logits, top_k: logits.view(torch.int32).topk(top_k, -1).indices)


@bug(
    "scale",
    accepted=("choice_weights", "scale"),
    words="scale|renorm|normal|share|sum|before|order|expert|weight",
    taps=WEIGHTS,
    model="gemma4-moe",
    ep=1,
)
def scale_of_each_expert_is_applied_before_the_shares_are_made(p: Spoilt) -> None:
    """per_expert_scale is multiplied by the probabilities, whose sum is taken behind it."""

    def shares(layer):
        def weights(scores, ids, correction, experts):
            scale = layers[layer].beside.mixture.router.scale
            return routing.finished(scores.gather(-1, ids) * scale[ids], experts)

        return weights

    layers: list = []
    p.loaded(lambda decoder: layers.extend(decoder.layers))
    for layer in range(3):
        p.rules(
            (layer,),
            choice_weights=shares(layer),
            expert_scale=lambda scale, ids: torch.ones_like(scale[ids]),
        )


@bug(
    "input",
    accepted=("unit_norm", "norm", "input", "channel_scale"),
    words="norm|input|read|stream|weight|other|times|scal|channel",
    taps=("mlp.router_norm",),
    model="gemma4-moe",
    dtype="bfloat16",
    tp=2,
    ep=2,
)
def router_reads_what_the_experts_read(p: Spoilt) -> None:
    """Other families have one norm for both; this one's router has the stream, under a norm without a weight."""
    layers: list = []
    p.loaded(lambda decoder: layers.extend(decoder.layers))

    def normed(layer):
        return lambda x, eps: defaults.unit_heads(layers[layer].beside.experts_norm.normalised(x), eps)

    for layer in range(3):
        p.rules((layer,), router_norm=normed(layer))


@bug(
    "slots",
    accepted=("choice_weights", "choice"),
    words="slot|last|least|weak|small|fewer|zero|lost|missing|drop|top|normal|share|weight",
    taps=WEIGHTS,
    model="qwen3.5-moe",
    tp=2,
    ep=1,
)
def slot_is_kept_free_for_a_shared_expert_that_is_not_fused(p: Spoilt) -> None:
    """sglang#36515: of three experts the worst gives way, and the two others share its weight."""

    def two(scores, ids, correction, experts):
        taken = scores.gather(-1, ids)
        taken = taken.scatter(-1, taken.argmin(-1, keepdim=True), 0.0)
        return routing.finished(taken, experts)

    p.rules(choice_weights=two)


@bug(
    "input",
    accepted=("linear", "input", "norm"),
    words="norm|input|read|stream|residual|before|other",
    taps=ROUTER,
    model="mixtral",
    tp=2,
    ep=2,
)
def router_reads_the_stream_before_its_norm(p: Spoilt) -> None:
    """The block is given both, for a fused kernel, and its router takes the first."""

    def spoil(decoder):
        for layer in decoder.layers:
            weight = layer.mlp.router.weight
            right, norm, held = weight.product, layer.mlp_norm, []

            def normed(x, norm=norm, held=held):
                held[:] = [x]
                return norm(x)

            layer.mlp_norm = normed
            weight.product = lambda x, bias=None, right=right, held=held: right(held[0].to(x.dtype), bias)

    p.loaded(spoil)
