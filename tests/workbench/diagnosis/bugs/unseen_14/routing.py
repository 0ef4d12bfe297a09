"""Which experts a token goes to, and how much each of them counts."""

from __future__ import annotations

import torch

from lockstep.engine.rules import routing
from tests.workbench.diagnosis.bugs.bug import bug
from tests.workbench.diagnosis.bugs.engine_ranks import Spoilt

ROUTER = ("mlp.router",)
IDS = ("mlp.topk_ids",)
WEIGHTS = ("mlp.topk_weights",)


@bug(
    "renormalisation",
    accepted=("choice_weights", "scale"),
    words="renorm|normal|sum|share|divid|token|axis|scal|small|weight",
    taps=WEIGHTS,
    layers=(0, 2),
    model="qwen3-moe",
    tp=2,
    ep=2,
)
def shares_are_of_the_sum_over_tokens_in_place_of_slots(p: Spoilt) -> None:
    """megablocks#87: the shape was not what the normalisation took it for, which went along the wrong
    axis.
    """

    def shares(scores, ids, correction, experts):
        taken = scores.gather(-1, ids)
        return taken / taken.sum(0, keepdim=True)

    p.rules(choice_weights=shares)


@bug(
    "scores",
    accepted=("choice", "choice_weights", "softmax", "scores", "scale"),
    words="sigmoid|softmax|score|choos|chose|choice|expert|rout|weight",
    taps=(*IDS, *WEIGHTS),
    layers=(1,),
    model="ernie4-5-moe",
    ep=1,
)
def correction_of_the_choice_is_taken_to_mean_sigmoids(p: Spoilt) -> None:
    """A checkpoint with e_score_correction_bias was taken for one like DeepSeek-V3, whose scores are no
    softmax.
    """
    p.rules(router_scores=lambda logits, experts: logits.float().sigmoid())


@bug(
    "groups",
    accepted=("choice",),
    words="group|choos|chose|choice|expert|rout",
    taps=IDS,
    model="solar-open",
    tp=2,
    ep=2,
)
def experts_are_dealt_out_to_groups_in_turn(p: Spoilt) -> None:
    """Experts are placed round robin on ranks, and groups of the router are counted in the same way."""

    def choice(scores, correction, experts):
        order = torch.arange(experts.count).view(-1, experts.groups).T.flatten()
        kept = routing.within_groups((scores + correction)[:, order], experts)[:, order.argsort()]
        return kept.topk(experts.top_k, -1).indices.sort(-1).values

    p.rules(choice=choice)


@bug(
    "renormalisation",
    accepted=("choice_weights", "scale"),
    words="renorm|normal|factor|scal|times|1\\.5|missing|without|small|sum|share",
    taps=WEIGHTS,
    layers=(1,),
    model="nemotron-h-moe",
    dtype="bfloat16",
    tp=2,
    ep=1,
)
def shares_are_made_once_more_behind_the_factor(p: Spoilt) -> None:
    """vllm-ascend#9692, PaddleFleet#1299: the fused operation has done it, and what calls it does it
    again.
    """

    def twice(scores, ids, correction, experts):
        found = routing.weights(scores, ids, correction, experts)
        return found / found.sum(-1, keepdim=True)

    p.rules(choice_weights=twice)


@bug(
    "mixer",
    accepted=("choice_weights", "softmax", "scale"),
    words="mixer|softmax|second|first|chosen|higher|mask|share|weight|expert|small",
    taps=WEIGHTS,
    model="phimoe",
    ep=1,
)
def weight_of_the_second_expert_is_a_share_beside_the_first_one(p: Spoilt) -> None:
    """Sparsemixer masks the best expert before it takes the second one, and its weight is of the unmasked
    logits.
    """

    def weights(scores, ids, correction, experts):
        found = []
        for expert in ids.unbind(-1):
            top = scores.gather(-1, expert.unsqueeze(-1))
            far = (top - scores) / scores.abs().maximum(top) > 2 * experts.jitter
            shares = scores.masked_fill(far, -torch.inf).softmax(-1)
            found.append(shares.gather(-1, expert.unsqueeze(-1)))
        return torch.cat(found, -1)

    p.rules(choice_weights=weights)


@bug(
    "scale",
    accepted=("choice_weights", "scale", "weight", "experts", "choice"),
    words="scale|expert|slot|number|other|weight|index",
    taps=WEIGHTS,
    model="gemma4-moe",
    dtype="bfloat16",
    tp=2,
    ep=2,
)
def scale_of_each_expert_is_taken_by_the_slot(p: Spoilt) -> None:
    """per_expert_scale is multiplied as it lies: its first numbers meet the slots."""
    p.rules(expert_scale=lambda scale, ids: scale[: ids.shape[1]].expand(ids.shape))


@bug(
    "weight",
    accepted=("weight", "linear", "layer", "layers"),
    words="weight|layer|router|other|matri|load|product",
    taps=ROUTER,
    layers=(2,),
    model="deepseek-v2-lite",
    tp=2,
    ep=1,
)
def router_is_looked_up_by_the_count_of_layers_with_experts(p: Spoilt) -> None:
    """Routers are in a list without one of the dense layer: the last layer takes what lies before its own."""

    def spoil(decoder):
        before, own = (decoder.layers[i].mlp.router.weight.parts().values() for i in (1, 2))
        for taken, wrong in zip(own, before, strict=True):
            taken.copy_(wrong)

    p.loaded(spoil)


@bug(
    "renormalisation",
    accepted=("choice_weights", "softmax", "scale"),
    words="renorm|normal|softmax|sum|share|divid|all|scal|small|chosen",
    taps=WEIGHTS,
    step=1,
    model="gpt-oss",
    tp=2,
    ep=2,
)
def decode_kernel_makes_the_softmax_before_it_chooses(p: Spoilt) -> None:
    """And has no flag for shares: the weights of a token no longer sum up to one."""

    def taken(scores, ids, correction, experts):
        return scores.gather(-1, ids)

    p.rules(choice_weights=p.later(routing.weights, taken))
