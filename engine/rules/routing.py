"""The correct behaviour of a mixture of experts: which experts a token goes to, and what becomes of what they give.

T tokens, E experts, S of them for each token.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lockstep.engine.config.experts import ExpertsConfig
from lockstep.engine.parallel.comm import Comm
from lockstep.engine.parallel.shards import Span

#: Elements of the experts' outputs that are widened to float32 at a time.
_WIDENED = 1 << 22


def scores(logits: Tensor, experts: ExpertsConfig) -> Tensor:
    """[T, E] -> the same in float32 at least."""
    wide = logits if logits.dtype == torch.float64 else logits.float()
    if experts.scores == "logits":
        return wide
    return wide.softmax(-1) if experts.scores == "softmax" else wide.sigmoid()


def best(scores: Tensor, correction: Tensor | None, experts: ExpertsConfig) -> Tensor:
    """The numbers [T, S], ascending, of the experts with the highest scores [T, E] and corrections [E]."""
    corrected = scores if correction is None else scores + correction
    if experts.groups > 1:
        corrected = within_groups(corrected, experts)
    ids: Tensor = corrected.topk(experts.top_k, -1).indices.sort(-1).values
    return ids


def within_groups(scores: Tensor, experts: ExpertsConfig) -> Tensor:
    """Scores [T, E], -inf outside of each token's best groups: those whose so many best experts have the highest
    sum (DeepSeek-V3, arXiv:2412.19437)."""
    by_group = scores.unflatten(-1, (experts.groups, -1))  # [T, groups, E / groups]
    sums = by_group.topk(experts.group_best, -1).values.sum(-1)
    kept = torch.zeros_like(sums, dtype=torch.bool).scatter_(
        -1, sums.topk(experts.top_groups, -1).indices, True
    )
    within: Tensor = by_group.masked_fill(~kept.unsqueeze(-1), -torch.inf)
    return within.flatten(-2)


def weights(scores: Tensor, ids: Tensor, correction: Tensor | None, experts: ExpertsConfig) -> Tensor:
    """What is multiplied by what the experts `ids` [T, S] give: their scores without the correction, [T, S]."""
    if experts.jitter is not None:
        return mixed(scores, ids, experts.jitter)
    return finished(scores.gather(-1, ids), experts)


def mixed(logits: Tensor, ids: Tensor, jitter: float) -> Tensor:
    """SparseMixer's weights [T, S] of those experts (arXiv:2409.12136): of each, the highest first, its share in a
    softmax of the logits [T, E] without higher chosen ones' and those that are more than 2 jitter lower, relative."""
    own, weights, left = logits.gather(-1, ids), torch.empty_like(logits[:, : ids.shape[1]]), logits
    for slot in own.argsort(-1, descending=True).unbind(-1):
        slot = slot.unsqueeze(-1)
        expert, top = ids.gather(-1, slot), own.gather(-1, slot)
        far = (top - logits) / logits.abs().maximum(top) > 2 * jitter
        weights = weights.scatter(-1, slot, left.masked_fill(far, -torch.inf).softmax(-1).gather(-1, expert))
        left = left.scatter(-1, expert, -torch.inf)
    return weights


def finished(taken: Tensor, experts: ExpertsConfig) -> Tensor:
    """The chosen experts' scores [T, S], as shares of their sum and scaled where the model does so."""
    if experts.renormalised:
        taken = taken / (taken.sum(-1, keepdim=True) + experts.shares_eps)
    return taken if experts.factor == 1 else taken * experts.factor


def as_stacked(gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """What counts as gate and up [T, S, I / tp] of the product with both matrices: each its own."""
    return gate, up


def bias_once(term: Tensor, bias: Tensor, first: bool) -> Tensor:
    """A rank's term [N, H] of an expert's down, with its bias on the first of the ranks that share the expert."""
    return term + bias if first else term


def of_experts(scale: Tensor, ids: Tensor) -> Tensor:
    """What the weights of the experts `ids` [T, S] are multiplied by, of a number of each expert [E]."""
    return scale[ids]


def by_number(ids: Tensor, held: Span) -> Tensor:
    """Through which of the experts that the rank has (`held`) the rows of the experts `ids` [T * S] go: their own. The
    numbers of others are anything else."""
    return ids


def weighed_sum(outputs: Tensor, weights: Tensor) -> Tensor:
    """The sum over S of outputs [T, S, H] times weights [T, S], made in float32 and rounded once: [T, H]."""
    wide = torch.float64 if outputs.dtype == torch.float64 else torch.float32
    rows = max(1, _WIDENED // max(1, outputs[0].numel()))
    parts = zip(outputs.split(rows), weights.split(rows), strict=True)
    sums = [(some.to(wide) * weight.unsqueeze(-1)).sum(1).to(outputs.dtype) for some, weight in parts]
    return sums[0] if len(sums) == 1 else torch.cat(sums)


def weighed_inputs(x: Tensor, weights: Tensor) -> Tensor:
    """What each of a token's experts reads: the token's row [T, H] times its weight [T, S], [T, S, H]."""
    return x.unsqueeze(1) * weights.unsqueeze(-1)


def with_shared(routed: Tensor, shared: Tensor, gate: Tensor | None, comm: Comm) -> Tensor:
    """A rank's term [T, H] with its term of the shared expert, times the sigmoid of its gate's logits [T, 1]."""
    return routed + (shared if gate is None else gate.sigmoid() * shared)
