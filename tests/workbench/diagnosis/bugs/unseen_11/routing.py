"""Which experts a token goes to, and with which weights."""

from __future__ import annotations

from dataclasses import replace

import torch

from lockstep.engine.rules import routing
from tests.workbench.diagnosis.bugs.bug import bug
from tests.workbench.diagnosis.bugs.engine_ranks import Spoilt

IDS = ("mlp.topk_ids",)
WEIGHTS = ("mlp.topk_weights",)
GROUPS = "group|expert|choos|chose|choice|correct|bias|other|rout"


@bug(
    "renormalisation",
    accepted=("choice_weights", "softmax"),
    words="renorm|normal|sum|share|softmax|all|before|without|divid|chosen",
    taps=WEIGHTS,
    model="granitemoe",
    tp=2,
    ep=1,
)
def softmax_goes_over_all_experts_where_it_goes_over_the_chosen(p: Spoilt) -> None:
    """The softmax stands before the top-k, as in Qwen3-MoE, and nothing is divided behind it."""
    p.rules(choice_weights=lambda scores, ids, correction, experts: scores.gather(-1, ids))


@bug(
    "correction",
    accepted=("choice_weights", "bias"),
    words="correct|bias|score",
    taps=WEIGHTS,
    layers=(2,),
    model="lfm2-moe",
    tp=2,
    ep=2,
)
def last_layer_weighs_by_the_corrected_scores(p: Spoilt) -> None:
    """The values of the top-k are taken along, and they have the bias of the choice in them."""

    def corrected(scores, ids, correction, experts):
        return routing.finished((scores + correction).gather(-1, ids), experts)

    p.rules((2,), choice_weights=corrected)


@bug(
    "scale",
    accepted=("choice_weights", "scale"),
    words="factor|twice|scal|times|squar|again|1\\.8|3\\.24",
    taps=WEIGHTS,
    layers=(1, 2),
    model="glm4-moe-lite",
    dtype="bfloat16",
    ep=1,
)
def router_and_its_caller_both_apply_the_routed_factor(p: Spoilt) -> None:
    """vllm#45037."""

    def twice(scores, ids, correction, experts):
        return experts.factor * routing.weights(scores, ids, correction, experts)

    p.rules(choice_weights=twice)


@bug(
    "scale",
    accepted=("choice_weights", "scale"),
    words="factor|scal|times|without|missing|never|1\\.5|divid",
    taps=WEIGHTS,
    layers=(1,),
    step=1,
    model="dots1",
    tp=2,
    ep=2,
)
def decode_backend_is_not_given_the_routed_factor(p: Spoilt) -> None:
    """vllm#43769."""

    def never(scores, ids, correction, experts):
        return routing.weights(scores, ids, correction, replace(experts, factor=1.0))

    p.rules(choice_weights=p.later(routing.weights, never))


@bug(
    "choice", accepted=("choice", "bias"), words=GROUPS, taps=IDS, layers=(1,), model="exaone-moe", tp=2, ep=1
)
def groups_are_ranked_before_the_correction_is_added(p: Spoilt) -> None:
    def best(scores, correction, experts):
        kept = routing.within_groups(scores, experts).isfinite()
        corrected = (scores + correction).masked_fill(~kept, -torch.inf)
        return corrected.topk(experts.top_k, -1).indices.sort(-1).values

    p.rules(choice=best)


@bug("choice", accepted=("choice",), words=GROUPS, taps=IDS, layers=(1,), model="solar-open", ep=1)
def last_layer_chooses_from_all_groups(p: Spoilt) -> None:
    """Its router was made with the default of n_group."""

    def best(scores, correction, experts):
        return routing.best(scores, correction, replace(experts, groups=1, top_groups=1))

    p.rules((1,), choice=best)


@bug(
    "renormalisation",
    accepted=("choice_weights", "scale"),
    words="renorm|normal|sum|share|divid|one",
    taps=WEIGHTS,
    layers=(1, 2),
    model="deepseek-v2",
    tp=2,
    ep=2,
)
def weights_are_made_shares_as_in_the_next_version(p: Spoilt) -> None:
    """One router serves DeepSeek-V2 and V3; norm_topk_prob of V2 is false."""

    def shares(scores, ids, correction, experts):
        return routing.weights(scores, ids, correction, replace(experts, renormalised=True))

    p.rules(choice_weights=shares)


@bug(
    "renormalisation",
    accepted=("choice_weights", "softmax"),
    words="softmax|share|all|jitter|mask|mix|normal|weight",
    taps=WEIGHTS,
    model="phimoe",
    tp=2,
    ep=2,
)
def sparse_mixer_is_taken_for_a_plain_softmax(p: Spoilt) -> None:
    p.rules(choice_weights=lambda logits, ids, correction, experts: logits.softmax(-1).gather(-1, ids))


@bug(
    "scores",
    accepted=("choice", "choice_weights", "softmax", "sigmoid"),
    words="softmax|sigmoid|score",
    taps=(*IDS, *WEIGHTS),
    model="minimax-m2",
    dtype="bfloat16",
    tp=2,
    ep=1,
)
def scoring_function_is_left_at_softmax(p: Spoilt) -> None:
    p.rules(router_scores=lambda logits, experts: logits.float().softmax(-1))


@bug(
    "correction",
    accepted=("choice", "bias"),
    words="correct|bias|sign|negat|minus|subtract",
    taps=IDS,
    layers=(1,),
    model="ernie4-5-moe",
    ep=1,
)
def correction_of_the_choice_has_the_other_sign(p: Spoilt) -> None:
    p.rules(choice=lambda scores, correction, experts: routing.best(scores, -correction, experts))


@bug(
    "scale",
    accepted=("choice_weights", "scale", "experts", "weight"),
    words="scale|factor|slot|expert|index|order|other|number|times",
    taps=WEIGHTS,
    model="gemma4-moe",
    ep=1,
)
def scale_of_each_expert_is_read_by_the_slot(p: Spoilt) -> None:
    p.rules(expert_scale=lambda scale, ids: scale[: ids.shape[1]].expand(ids.shape))


@bug(
    "dtype",
    accepted=("precision", "choice_weights", "choice"),
    words="precis|round|bfloat16|bits|dtype|float16|half",
    taps=(*IDS, *WEIGHTS),
    model="hunyuan-moe",
    ep=1,
)
def softmax_of_the_router_is_made_in_bfloat16(p: Spoilt) -> None:
    p.rules(router_scores=lambda logits, experts: logits.bfloat16().softmax(-1).float())
