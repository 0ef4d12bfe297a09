"""Which experts a token goes to, and how much each of them counts."""

from __future__ import annotations

from dataclasses import replace

import torch

from lockstep.engine.rules import routing
from tests.workbench.diagnosis.bugs.bug import bug
from tests.workbench.diagnosis.bugs.engine_ranks import Spoilt

WEIGHTS = ("mlp.topk_weights",)
CHOSEN = ("mlp.topk_ids",)


@bug(
    "factor",
    accepted=("choice_weights", "scale"),
    words="factor|scal|twice|again|times|square|2\\.5",
    taps=WEIGHTS,
    layers=(1, 2),
    step=1,
    model="deepseek-v3",
    ep=1,
)
def decode_kernel_applies_the_routed_factor_to_weights_that_have_it(p: Spoilt) -> None:
    """vllm#45037, in the kernel for few tokens alone."""

    def twice(scores, ids, correction, experts):
        return routing.weights(scores, ids, correction, experts) * experts.factor

    p.rules(choice_weights=p.later(routing.weights, twice))


@bug(
    "factor",
    accepted=("choice_weights", "scale", "sharding"),
    words="factor|scal|times|rank|1|0\\.4",
    taps=WEIGHTS,
    layers=(1, 2),
    ranks=(1,),
    model="glm4-moe",
    dtype="bfloat16",
    tp=2,
    ep=2,
)
def second_expert_rank_is_never_given_the_routed_factor(p: Spoilt) -> None:
    """sglang#8511: one of the places that should apply it."""

    def unscaled(scores, ids, correction, experts):
        return routing.weights(scores, ids, correction, replace(experts, factor=1.0))

    if p.rank == 1:
        p.rules(choice_weights=unscaled)


@bug(
    "renormalisation",
    accepted=("choice_weights", "sharding", "scale"),
    words="renormal|normal|share|sum|rank|own|local",
    taps=WEIGHTS,
    layers=(0, 2),
    model="qwen3-moe",
    tp=2,
    ep=2,
)
def each_expert_rank_renormalises_over_its_own_experts(p: Spoilt) -> None:
    def own(scores, ids, correction, experts):
        half = experts.count // 2
        taken = scores.gather(-1, ids)
        there = (ids // half == p.rank).to(taken.dtype)
        own_sum = (taken * there).sum(-1, keepdim=True)
        return taken / own_sum.where(own_sum > 0, taken.sum(-1, keepdim=True))

    p.rules(choice_weights=own)


@bug(
    "renormalisation",
    accepted=("choice_weights", "scale"),
    words="renormal|normal|share|sum|divid|as they are",
    taps=WEIGHTS,
    layers=(2,),
    model="qwen3-moe",
    dtype="bfloat16",
    ep=1,
)
def last_layer_is_not_told_of_norm_topk_prob(p: Spoilt) -> None:
    """flashinfer#2889: the argument is not passed on by the wrapper of one layer."""

    def plain(scores, ids, correction, experts):
        return scores.gather(-1, ids)

    p.rules((2,), choice_weights=plain)


@bug(
    "renormalisation",
    accepted=("choice_weights", "softmax"),
    words="softmax|twice|again|share|normal|exponential",
    taps=WEIGHTS,
    model="mixtral",
    dtype="bfloat16",
    tp=2,
    ep=1,
)
def probabilities_of_the_chosen_go_through_another_softmax(p: Spoilt) -> None:
    def again(scores, ids, correction, experts):
        return scores.gather(-1, ids).softmax(-1)

    p.rules(choice_weights=again)


@bug(
    "renormalisation",
    accepted=("choice_weights", "scale"),
    words="renormal|normal|share|sum|divid",
    taps=WEIGHTS,
    step=1,
    model="olmoe",
    ep=1,
)
def decode_renormalises_where_the_model_does_not(p: Spoilt) -> None:
    def shares(scores, ids, correction, experts):
        return routing.weights(scores, ids, correction, replace(experts, renormalised=True))

    p.rules(choice_weights=p.later(routing.weights, shares))


@bug(
    "choice",
    accepted=("choice",),
    words="correct|bias|sigmoid|chos|choice|before|expert",
    taps=CHOSEN,
    layers=(1, 2),
    model="deepseek-v3",
    tp=2,
    ep=2,
)
def correction_is_added_to_the_logits_and_not_to_their_sigmoid(p: Spoilt) -> None:
    def choice(scores, correction, experts):
        return routing.best((scores.logit() + correction).sigmoid(), None, experts)

    p.rules(choice=choice)


@bug(
    "choice",
    accepted=("choice",),
    words="group|best|sum|max|two|chos",
    taps=CHOSEN,
    layers=(1, 2),
    model="glm4-moe",
    ep=1,
)
def groups_are_ranked_by_their_best_expert_and_not_the_best_two(p: Spoilt) -> None:
    """DeepSeek-V2's way in a model of V3's kind."""
    p.rules(
        choice=lambda scores, correction, experts: routing.best(
            scores, correction, replace(experts, group_best=1)
        )
    )


@bug(
    "choice",
    accepted=("choice", "sharding"),
    words="correct|bias|rank|chos|choice",
    taps=CHOSEN,
    layers=(1, 2),
    ranks=(1,),
    model="glm4-moe",
    tp=2,
    ep=2,
)
def second_expert_rank_chooses_without_the_correction(p: Spoilt) -> None:
    """Its buffer was left at zero by the loader, which gives it to the first rank of the group alone."""
    if p.rank == 1:
        p.rules(choice=lambda scores, correction, experts: routing.best(scores, None, experts))


@bug(
    "choice",
    accepted=("choice", "choice_weights"),
    words="group|best|fewer|other|chos|choice|expert",
    taps=CHOSEN,
    layers=(2,),
    model="deepseek-v2",
    dtype="bfloat16",
    ep=1,
)
def groups_are_of_neighbours_by_stride_in_the_last_layer(p: Spoilt) -> None:
    """Expert e is counted to group e % groups."""

    def choice(scores, correction, experts):
        groups = experts.groups
        order = torch.arange(experts.count).view(-1, groups).T.flatten()
        corrected = scores if correction is None else scores + correction
        dealt = routing.within_groups(corrected[:, order], experts)
        back = torch.empty_like(dealt)
        back[:, order] = dealt
        return back.topk(experts.top_k, -1).indices.sort(-1).values

    p.rules((2,), choice=choice)


@bug(
    "choice",
    accepted=("choice", "choice_weights", "softmax", "scores"),
    words="softmax|token|batch|dimension|axis|row|logit|chos|weight",
    taps=(*CHOSEN, *WEIGHTS),
    layers=(1,),
    model="mixtral",
    ep=1,
)
def one_router_takes_its_softmax_over_the_tokens(p: Spoilt) -> None:
    """The tensor has another dimension in front in the path of one layer, and `dim=0` is what it was."""
    p.rules((1,), router_scores=lambda logits, experts: logits.float().softmax(0))


@bug(
    "dtype",
    accepted=("choice_weights", "choice", "precision", "scores", "softmax"),
    words="dtype|precis|bits|read|float16|round|logit|softmax|weight|chos",
    taps=(*CHOSEN, *WEIGHTS),
    layers=(0, 2),
    model="qwen3-moe",
    dtype="bfloat16",
    ep=1,
)
def logits_in_bfloat16_are_read_as_float16(p: Spoilt) -> None:
    """flashinfer#2889."""
    p.rules(router_scores=lambda logits, experts: logits.view(torch.float16).float().softmax(-1))


@bug(
    "dtype",
    accepted=("precision", "choice_weights", "choice", "linear"),
    words="precis|round|bfloat16|dtype|bits|float32|float16",
    taps=("mlp.router",),
    layers=(1, 2),
    model="deepseek-v3",
    tp=2,
    ep=1,
)
def router_computes_in_bfloat16(p: Spoilt) -> None:
    """The autocast of the layer around it holds for the router as well."""

    def spoil(decoder):
        for layer in decoder.layers[1:]:
            router = layer.mlp.router
            weight = router.weight
            product = weight.product

            def rounded(x, bias=None, product=product):
                return product(x.bfloat16().to(x.dtype), bias).bfloat16().to(x.dtype)

            weight.product = rounded

    p.loaded(spoil)


@bug(
    "order",
    accepted=("choice_weights",),
    words="order|sort|other|slot|permut|swap|exchang|expert",
    taps=WEIGHTS,
    model="olmoe",
    dtype="bfloat16",
    tp=2,
    ep=2,
)
def ids_are_sorted_and_their_weights_stay_by_size(p: Spoilt) -> None:
    def by_size(scores, ids, correction, experts):
        return routing.weights(scores, ids, correction, experts).sort(-1, descending=True).values

    p.rules(choice_weights=by_size)


@bug(
    "order",
    accepted=("choice_weights", "input"),
    words="token|row|before|shift|neighbour|other|position",
    taps=WEIGHTS,
    layers=(2,),
    model="minimax-m2",
    ep=1,
)
def weights_are_those_of_the_token_before(p: Spoilt) -> None:
    """The buffer of weights is written one row later than that of the ids."""

    def before(scores, ids, correction, experts):
        return routing.weights(scores, ids, correction, experts).roll(1, 0)

    p.rules((2,), choice_weights=before)


@bug(
    "slots",
    accepted=("choice_weights", "choice", "experts"),
    words="slot|fewer|zero|drop|last|missing|one|small|expert|without",
    taps=WEIGHTS,
    layers=(1, 2),
    step=1,
    model="qwen2-moe",
    dtype="bfloat16",
    ep=1,
)
def decode_gives_the_last_slot_to_the_shared_expert(p: Spoilt) -> None:
    """sglang#36515: top-6 becomes top-5, for the shared expert is counted among the chosen."""

    def fewer(scores, ids, correction, experts):
        weights = routing.weights(scores, ids, correction, experts)
        return weights.masked_fill(weights == weights.amin(-1, keepdim=True), 0.0)

    p.rules(choice_weights=p.later(routing.weights, fewer))
