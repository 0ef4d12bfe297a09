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
    "correction",
    accepted=("choice", "bias", "weight"),
    words="correct|bias|layer|before|other|choos|chose|choice",
    taps=IDS,
    layers=(2,),
    model="glm4-moe",
    dtype="bfloat16",
    tp=2,
    ep=1,
)
def correction_of_the_last_layer_is_that_of_the_layer_before(p: Spoilt) -> None:
    """The buffers are counted without the dense layer in the file of corrections, and with it in the model."""

    def spoil(decoder):
        before, last = (decoder.layers[i].mlp.router.correction for i in (1, 2))
        last.copy_(before)

    p.loaded(spoil)


@bug(
    "scores",
    accepted=("choice_weights", "softmax", "scale", "activation"),
    words="cap|tanh|clip|clamp|limit|logit|softmax|scor|scal|weight",
    taps=WEIGHTS,
    model="olmoe",
    ep=1,
)
def logits_of_the_router_are_capped_at_thirty(p: Spoilt) -> None:
    """router_logit_softcapping of Grok is the default of the shared kernel."""

    def capped(logits, experts):
        return routing.scores(30 * (logits / 30).tanh(), experts)

    p.rules(router_scores=capped)


@bug(
    "renormalisation",
    accepted=("choice_weights", "scale"),
    words="renorm|normal|sum|share|divid|slot|scal|factor|small",
    taps=WEIGHTS,
    layers=(1,),
    model="dots1",
    tp=2,
    ep=2,
)
def sum_of_the_weights_counts_the_slot_of_the_shared_expert(p: Spoilt) -> None:
    """The shared expert is fused as one slot more, of weight 1 / factor, before the weights are made shares."""

    def shares(scores, ids, correction, experts):
        taken = scores.gather(-1, ids)
        return taken / (taken.sum(-1, keepdim=True) + 1 / experts.factor) * experts.factor

    p.rules(choice_weights=shares)


@bug(
    "input",
    accepted=("channel_scale", "scale", "input"),
    words="root|width|hidden|factor|scal|times|divid",
    taps=("mlp.router_input",),
    model="gemma4-moe",
    tp=2,
    ep=2,
)
def input_of_the_router_is_not_divided_by_the_root_of_the_width(p: Spoilt) -> None:
    """The factor was to be folded into the numbers of its channels by the converter, and was not."""

    def spoil(decoder):
        for layer in decoder.layers:
            layer.beside.factor = 1.0

    p.loaded(spoil)


@bug(
    "dtype",
    accepted=("precision", "choice_weights"),
    words="precis|round|bfloat16|bits|dtype|float16|half",
    taps=WEIGHTS,
    layers=(1, 2),
    step=1,
    model="lfm2-moe",
    tp=2,
    ep=1,
)
def decode_rounds_the_weights_to_bfloat16_before_the_sum(p: Spoilt) -> None:
    """Its kernel packs a weight and the number of its expert into one word."""

    def rounded(scores, ids, correction, experts):
        return routing.weights(scores, ids, correction, experts).bfloat16().float()

    p.rules(choice_weights=p.later(routing.weights, rounded))


@bug(
    "scores",
    accepted=("choice_weights", "sigmoid", "activation"),
    words="sigmoid|twice|again|scor|activat|weight",
    taps=WEIGHTS,
    layers=(1, 3),
    step=1,
    model="llama4",
    dtype="bfloat16",
    ep=1,
)
def decode_takes_the_sigmoid_of_the_weights_once_more(p: Spoilt) -> None:
    """The routing function of the model has taken it, and the fused kernel for few tokens takes it by itself."""

    def again(scores, ids, correction, experts):
        return routing.weights(scores, ids, correction, experts).sigmoid()

    p.rules(choice_weights=p.later(routing.weights, again))


@bug(
    "replay",
    accepted=("choice", "input", "layer"),
    words="layer|before|other|replay|choos|chose|choice|expert|rout|same",
    taps=IDS,
    layers=(2,),
    model="deepseek-v3",
    tp=2,
    ep=1,
)
def replayed_choice_of_the_last_layer_is_that_of_the_layer_before(p: Spoilt) -> None:
    """Recorded choices are indexed by the layer's number, the recording has none of the dense layer."""
    held = []

    def first(scores, correction, experts):
        held.append(routing.best(scores, correction, experts))
        return held[-1]

    p.rules((1,), choice=first)
    p.rules((2,), choice=lambda scores, correction, experts: held[-1].clone())


@bug(
    "renormalisation",
    accepted=("choice_weights", "softmax"),
    words="softmax|share|first|second|slot|mask|mix|normal|weight|without|jitter",
    taps=WEIGHTS,
    model="phimoe",
    dtype="bfloat16",
    ep=1,
)
def second_of_the_sparse_mixer_has_its_share_beside_the_first(p: Spoilt) -> None:
    """The logit of the expert that was chosen first is not taken out before the second softmax."""

    def mixed(logits, ids, correction, experts):
        weights = torch.empty_like(logits[:, : ids.shape[1]])
        for slot in range(ids.shape[1]):
            expert = ids[:, slot : slot + 1]
            top = logits.gather(-1, expert)
            far = (top - logits) / logits.abs().maximum(top) > 2 * experts.jitter
            weights[:, slot] = logits.masked_fill(far, -torch.inf).softmax(-1).gather(-1, expert)[:, 0]
        return weights

    p.rules(choice_weights=mixed)


@bug(
    "weights",
    accepted=("weight", "linear", "sharding"),
    words="weight|rank|other|layer|before|stale|sync|router|wrong|differ",
    taps=ROUTER,
    layers=(2,),
    ranks=(1,),
    model="qwen3.5-moe",
    tp=2,
    ep=2,
)
def one_rank_has_the_router_of_the_layer_before(p: Spoilt) -> None:
    """Replicated weights are broadcast by name after an update, and one rank counts its layers from one."""

    def spoil(decoder):
        (before,), (own,) = (decoder.layers[i].mlp.router.parameters().values() for i in (1, 2))
        own.copy_(before)

    if p.rank == 1:
        p.loaded(spoil)


@bug(
    "stale",
    accepted=("choice", "input"),
    words="stale|step|before|token|old|other|choos|chose|choice|expert|rout",
    taps=IDS,
    step=2,
    model="mixtral",
    tp=4,
    ep=2,
)
def decode_goes_to_the_experts_of_the_step_before(p: Spoilt) -> None:
    """The captured graph reads the buffer of choices before the router's stream has written it."""

    def stale():
        held = []

        def choice(scores, correction, experts):
            held.append(routing.best(scores, correction, experts))
            return held[-2] if p.comm.step > 1 else held[-1]

        return choice

    for layer in range(3):
        p.rules((layer,), choice=stale())


@bug(
    "bias",
    accepted=("bias", "linear"),
    words="bias|missing|without|constant|zero|offset",
    taps=ROUTER,
    step=1,
    model="gpt-oss",
    dtype="bfloat16",
    tp=2,
    ep=2,
)
def small_product_of_the_router_in_decode_knows_no_bias(p: Spoilt) -> None:
    """Few rows go through a kernel of their own, which takes a weight alone."""

    def spoil(decoder):
        for layer in decoder.layers:
            weight = layer.mlp.router.weight
            product = weight.product

            def without(x, bias=None, product=product):
                return product(x, None if p.decode else bias)

            weight.product = without

    p.loaded(spoil)
