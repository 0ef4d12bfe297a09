"""A mixture of experts: how tokens are routed, what the experts' outputs are multiplied by, who computes whose rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from lockstep.engine.config import ModelConfig
from lockstep.engine.config.experts import ExpertsConfig
from lockstep.engine.faults.fault import Fault, Needs, one_seam
from lockstep.engine.faults.needs import all_of, several_experts, several_ranks

if TYPE_CHECKING:
    from torch import Tensor

    from lockstep.engine.parallel.comm import Comm
    from lockstep.engine.parallel.shards import Span


def softmax_scores(logits: Tensor, experts: ExpertsConfig) -> Tensor:
    """Another model's scores."""
    return logits.float().softmax(-1)


def sigmoid_scores(logits: Tensor, experts: ExpertsConfig) -> Tensor:
    """Another model's scores."""
    return logits.float().sigmoid()


def uncorrected(scores: Tensor, correction: Tensor | None, experts: ExpertsConfig) -> Tensor:
    """The bias does not enter the choice."""
    from lockstep.engine.rules.routing import best

    return best(scores, None, experts)


def ungrouped(scores: Tensor, correction: Tensor | None, experts: ExpertsConfig) -> Tensor:
    """Experts are chosen from all groups."""
    corrected = scores if correction is None else scores + correction
    ids: Tensor = corrected.topk(experts.top_k, -1).indices.sort(-1).values
    return ids


def worst(scores: Tensor, correction: Tensor | None, experts: ExpertsConfig) -> Tensor:
    """The lowest scores are chosen."""
    ids: Tensor = scores.topk(experts.top_k, -1, largest=False).indices.sort(-1).values
    return ids


def scaled_twice(scores: Tensor, ids: Tensor, correction: Tensor | None, experts: ExpertsConfig) -> Tensor:
    """The factor is in two places."""
    from lockstep.engine.rules.routing import weights

    return weights(scores, ids, correction, experts) * experts.factor


def unscaled(scores: Tensor, ids: Tensor, correction: Tensor | None, experts: ExpertsConfig) -> Tensor:
    """The factor is in no place."""
    from lockstep.engine.rules.routing import weights

    return weights(scores, ids, correction, experts) / experts.factor


def as_they_are(scores: Tensor, ids: Tensor, correction: Tensor | None, experts: ExpertsConfig) -> Tensor:
    """The weights are no shares of the chosen experts' sum."""
    return scores.gather(-1, ids) * experts.factor


def as_shares(scores: Tensor, ids: Tensor, correction: Tensor | None, experts: ExpertsConfig) -> Tensor:
    """A softmax over the chosen experts alone: the same as shares of their sum."""
    taken = scores.gather(-1, ids)
    return taken / taken.sum(-1, keepdim=True) * experts.factor


def by_softmax(logits: Tensor, ids: Tensor, correction: Tensor | None, experts: ExpertsConfig) -> Tensor:
    """Each expert's share among all of them."""
    return logits.softmax(-1).gather(-1, ids)


def corrected_weights(
    scores: Tensor, ids: Tensor, correction: Tensor | None, experts: ExpertsConfig
) -> Tensor:
    """The bias of the choice is in the weights as well."""
    from lockstep.engine.rules.routing import weights

    return weights(scores if correction is None else scores + correction, ids, None, experts)


def in_reverse(ids: Tensor, held: Span) -> Tensor:
    """A rank has its experts the other way round."""
    return held.start + held.stop - 1 - ids


def without_last(ids: Tensor, held: Span) -> Tensor:
    """The rows of a rank's last expert are nobody's."""
    return ids.masked_fill(ids == held.stop - 1, -1)


def exchanged(gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """The stack is read as up, gate."""
    return up, gate


def halves_of_turns(gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """Rows of gate and up lie in turn, and are read as halves."""
    from torch import stack

    first, second = stack((gate, up), -1).flatten(-2).chunk(2, -1)
    return first, second


def turns_of_halves(gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """Gate lies before up, and their rows are read in turn."""
    from torch import cat

    both = cat((gate, up), -1)
    return both[..., ::2], both[..., 1::2]


def without_bias(term: Tensor, bias: Tensor, first: bool) -> Tensor:
    """The experts' down has no bias."""
    return term


def bias_of_every_rank(term: Tensor, bias: Tensor, first: bool) -> Tensor:
    """Each rank that shares an expert adds down's bias to its term."""
    return term + bias


def unweighted(outputs: Tensor, weights: Tensor) -> Tensor:
    """Each expert counts once."""
    return outputs.float().sum(1).to(outputs.dtype)


def no_shared_expert(routed: Tensor, shared: Tensor, gate: Tensor | None, comm: Comm) -> Tensor:
    """The shared expert is left out."""
    return routed


def shared_expert_on_every_rank(routed: Tensor, shared: Tensor, gate: Tensor | None, comm: Comm) -> Tensor:
    """The whole shared expert was in every rank's term: it counts once a rank."""
    from lockstep.engine.rules.routing import with_shared

    return with_shared(routed, shared * comm.size, gate, comm)


def ungated_shared_expert(routed: Tensor, shared: Tensor, gate: Tensor | None, comm: Comm) -> Tensor:
    """The shared expert's own gate is left out."""
    return routed + shared


def unnormed_routing(stream: Tensor, eps: float) -> Tensor:
    """The router reads the stream as it is."""
    return stream


def without_scale(scale: Tensor, ids: Tensor) -> Tensor:
    """Each expert's number is left out."""
    import torch

    return torch.ones_like(scale)[ids]


def _with(has: Callable[[ExpertsConfig], bool], reason: str) -> Needs:
    """The model has experts of which that is true."""

    def needs(model: ModelConfig, tp: int) -> str | None:
        if model.experts is None:
            return "the model has no experts"
        return None if has(model.experts) else reason

    return needs


_WEIGHTS = {"seam": "choice_weights", "correct": "config", "first_tap": "layers.*.mlp.topk_weights"}
_CHOICE = {"seam": "choice", "correct": "config", "first_tap": "layers.*.mlp.topk_ids"}
_ROWS = {"seam": "own_experts", "correct": "by_number", "first_tap": "layers.*.mlp.experts.gate"}
_SHARED = {"seam": "shared_expert", "correct": "once", "first_tap": "layers.*.mlp.combine.partial"}


def _fault(
    base: dict[str, str], value: str, patch: Callable[..., object], needs: Needs, title: str, symptom: str,
    source: str = "",
) -> Fault:  # fmt: skip
    return one_seam(
        base["seam"], value, base["correct"], patch, base["first_tap"], title, symptom, needs,
        group="mlp", source=source,
    )  # fmt: skip


_SCALED = _with(lambda has: has.factor != 1, "the model's experts have no factor")
_CORRECTED = _with(lambda has: has.correction, "no bias corrects the choice of the model's experts")
_GATED = _with(lambda has: has.shared_gated, "the model has no shared expert with a gate")
_IN_GROUPS = _with(lambda has: has.groups > 1, "the model's experts have no groups")
_SHARED_EXPERT = _with(lambda has: has.shared_width > 0, "the model has no shared expert")
_EXPERTS = _with(lambda has: True, "")
_BIASED = _with(lambda has: has.biased, "the model's experts have no biases")
_WEIGHED = _with(lambda has: not has.weighed_inputs, "the model weighs what goes into its experts")
_BESIDE = _with(lambda has: has.beside_mlp, "the model's experts stand in place of its MLP")
_UNBIASED = _with(lambda has: not has.biased, "gate and up of the model's experts lie in turn")
_STACK = {"seam": "expert_gate_up", "correct": "own", "first_tap": "layers.*.mlp.experts.gate"}
_BIAS = {"seam": "expert_bias", "correct": "once", "first_tap": "layers.*.mlp.experts.down"}

FAULTS = (
    _fault(
        {"seam": "router_scores", "correct": "config", "first_tap": "layers.*.mlp.topk_weights"}, "sigmoid",
        sigmoid_scores, _with(lambda has: has.scores == "softmax", "the model's scores are no softmax"),
        "sigmoids in place of a softmax", "the same experts, every weight is another",
    ),
    _fault(
        {"seam": "router_scores", "correct": "config", "first_tap": "layers.*.mlp.topk_*"}, "softmax",
        softmax_scores, _with(lambda has: has.scores == "sigmoid", "the model's scores are no sigmoids"),
        "a softmax in place of sigmoids", "scores of another size: with a correction other experts are chosen",
    ),
    _fault(
        _CHOICE, "uncorrected", uncorrected, _CORRECTED, "experts chosen without the correction bias",
        "some tokens go to other experts; their weights are right",
    ),
    _fault(
        _CHOICE, "ungrouped", ungrouped, _IN_GROUPS, "experts chosen from all groups",
        "some tokens go to experts outside of the best groups",
    ),
    _fault(
        _CHOICE, "worst", worst, _EXPERTS, "the experts with the lowest scores",
        "every token goes to other experts",
    ),
    _fault(
        _WEIGHTS, "scaled_twice", scaled_twice, _SCALED, "routed_scaling_factor applied twice",
        "the experts' share of the sum is too large by one factor", "vllm-project/vllm#45037",
    ),
    _fault(
        _WEIGHTS, "unscaled", unscaled, _SCALED, "routed_scaling_factor never applied",
        "the experts' share of the sum is too small by one factor", "vllm-project/vllm#43769",
    ),
    _fault(
        _WEIGHTS, "as_they_are", as_they_are,
        _with(lambda has: has.renormalised, "the model's weights are the scores as they are"),
        "weights that are not renormalised", "weights of a token do not add up to one", "flashinfer-ai/flashinfer#2889",
    ),
    _fault(
        _WEIGHTS, "as_shares", as_shares,
        _with(
            lambda has: not has.renormalised and has.jitter is None,
            "the model's weights are shares of a sum already",
        ),
        "softmax over the chosen experts alone", "weights of a token add up to one, as they should not",
    ),
    _fault(
        _WEIGHTS, "softmax", by_softmax, _with(lambda has: has.jitter is not None, "the model has no SparseMixer"),
        "a softmax over all experts in place of SparseMixer", "the same experts, every weight is too small",
    ),
    _fault(
        _WEIGHTS, "corrected", corrected_weights, _CORRECTED, "the correction bias used in the weights",
        "the right experts, their weights are off by the bias",
    ),
    _fault(
        {"seam": "expert_scale", "correct": "applied", "first_tap": "layers.*.mlp.topk_weights"}, "missing",
        without_scale, _BESIDE, "each expert's number left out",
        "the experts are the right ones, every weight is off by its expert's factor",
    ),
    _fault(
        {"seam": "router_norm", "correct": "applied", "first_tap": "layers.*.mlp.router_norm"}, "missing",
        unnormed_routing, _BESIDE, "the router's own norm left out",
        "logits are too large or too small, and some tokens go to other experts",
    ),
    _fault(
        _ROWS, "in_reverse", in_reverse, several_experts,
        "a rank's experts in reverse order", "each token's rows go through another expert than was chosen",
    ),
    _fault(
        _ROWS, "without_last", without_last, _EXPERTS, "a rank's last expert lost",
        "tokens of one expert lack its part of the sum",
    ),
    _fault(
        _STACK, "exchanged", exchanged, _EXPERTS, "the experts' stack read as up, gate",
        "gate is what up should be, and the reverse",
    ),
    _fault(
        _STACK, "halves", halves_of_turns, _BIASED, "gate and up, which lie in turn, read as halves",
        "half of gate's columns are up's", "NVIDIA/Megatron-LM#5844",
    ),
    _fault(
        _STACK, "in_turn", turns_of_halves, _UNBIASED, "gate and up, which lie one behind the other, read in turn",
        "gate and up have every other column of both",
    ),
    _fault(
        _BIAS, "missing", without_bias, _BIASED, "the bias of the experts' down left out",
        "what an expert gives lacks the same vector for every token",
    ),
    _fault(
        _BIAS, "on_every_rank", bias_of_every_rank, all_of(several_ranks, _BIASED),
        "the bias of the experts' down added on every rank", "the bias counts tp times",
    ),
    _fault(
        {"seam": "combine", "correct": "weighted", "first_tap": "layers.*.mlp.combine.partial"}, "unweighted",
        unweighted, _WEIGHED, "experts' outputs summed without weights", "each expert counts once",
    ),
    _fault(
        _SHARED, "missing", no_shared_expert, _SHARED_EXPERT, "the shared expert left out",
        "the sum lacks the part that every token has", "vllm-project/vllm#37856",
    ),
    _fault(
        _SHARED, "on_every_rank", shared_expert_on_every_rank, all_of(several_ranks, _SHARED_EXPERT),
        "the shared expert added once per rank", "the shared part counts tp times", "vllm-project/vllm-ascend#6710",
    ),
    _fault(
        _SHARED, "ungated", ungated_shared_expert, _GATED, "the shared expert's gate left out",
        "the shared part is too large, for each token by another factor",
    ),
)  # fmt: skip
