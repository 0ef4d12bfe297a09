"""What routing to experts computes, in float64 (torch-free). N tokens, S experts for each, E in all."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def sigmoid(x: Array) -> Array:
    """1 / (1 + exp(-x))."""
    return np.asarray(1 / (1 + np.exp(-np.clip(x, -700, 700))))


def candidates(
    scores: Array, groups: float = 1, top_groups: float = 1, group_best: float = 2, outside: float = -np.inf
) -> Array:
    """Scores [N, E], `outside` of each token's best groups another number: of those whose so many best experts have the
    highest sum (DeepSeek-V3, arXiv:2412.19437: two; DeepSeek-V2, arXiv:2405.04434: one)."""
    if groups == 1:
        return scores
    by_group = scores.reshape(len(scores), int(groups), -1)
    sums = np.sort(by_group, -1)[..., -int(group_best) :].sum(-1)
    best = np.argsort(-sums, -1, kind="stable")[:, : int(top_groups)]
    kept = np.zeros_like(sums, dtype=bool)
    np.put_along_axis(kept, best, True, -1)
    return np.where(kept[..., None], by_group, outside).reshape(scores.shape)


def chosen(
    scores: Array, top_k: float, groups: float = 1, top_groups: float = 1, group_best: float = 2
) -> Array:
    """The numbers [N, S], ascending, of the experts with the highest scores [N, E]."""
    best = np.argsort(-candidates(scores, groups, top_groups, group_best), -1, kind="stable")[:, : int(top_k)]
    return np.sort(best, -1).astype(np.float64)


def taken(scores: Array, ids: Array) -> Array:
    """The scores [N, S] of those experts."""
    return np.take_along_axis(scores, ids.astype(np.int64), -1)


def mixed(logits: Array, ids: Array, jitter: float) -> Array:
    """The weights [N, S] of those experts by SparseMixer (arXiv:2409.12136): of each, the highest first, its share in a
    softmax of the logits [N, E] without higher chosen ones' and those that are more than 2 jitter lower, relative."""
    left, weights = logits.copy(), np.zeros(ids.shape)
    rows, slots = np.arange(len(ids)), np.argsort(-taken(logits, ids), -1, kind="stable")
    for slot in slots.T:
        expert = ids[rows, slot].astype(np.int64)
        top = logits[rows, expert][:, None]
        near = (top - logits) / np.maximum(np.abs(logits), top) <= 2 * jitter
        sums = np.exp(np.where(near, left, -np.inf) - top).sum(-1)
        weights[rows, slot] = 1 / sums
        left[rows, expert] = -np.inf
    return weights


def shares(x: Array, eps: float = 0.0) -> Array:
    """Each over the sum of its row and eps."""
    return np.asarray(x / (x.sum(-1, keepdims=True) + eps))


def routed(x: Array, weight: Mapping[int, NDArray[Any]], ids: Array) -> Array:
    """x [N, in], or [N, S, in], through the matrices [out, in] of the experts `ids` [N, S]: [N, S, out]. Zeros of those
    that `weight`, by their numbers, lacks."""
    width = next((len(one) for one in weight.values()), 0)
    rows = np.broadcast_to(x[:, None], (*ids.shape, x.shape[-1])) if x.ndim == 2 else x
    out = np.zeros((*ids.shape, width))
    for expert, matrix in weight.items():
        here = ids == expert
        if here.any():
            out[here] = rows[here] @ matrix.astype(np.float64).T
    return out


def added_to_rows(x: Array, bias: Mapping[int, NDArray[Any]], ids: Array) -> Array:
    """x [N, S, out] with the vectors [out] of the experts `ids` [N, S]; of those that `bias` lacks as they are."""
    out = x.copy()
    for expert, vector in bias.items():
        out[ids == expert] += vector.astype(np.float64)
    return out


def weighed_sum(x: Array, weights: Array) -> Array:
    """The sum over S of x [N, S, H] times weights [N, S]: [N, H]."""
    return np.asarray(np.einsum("nsh,ns->nh", x, weights, optimize=True))


def weighed(x: Array, weights: Array) -> Array:
    """x [N, in] times each of the weights [N, S]: [N, S, in]."""
    return np.asarray(x[:, None] * weights[..., None])


def plain_sum(x: Array) -> Array:
    """The sum over S of x [N, S, H]."""
    return np.asarray(x.sum(1))
