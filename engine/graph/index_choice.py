"""What an indexer computes, in float64, and of what model (torch-free). T queries, K keys."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from lockstep.engine.config import ModelConfig
from lockstep.engine.graph.operation import Operation

Array = NDArray[np.float64]


def as_seen(operation: Operation | None, model: ModelConfig) -> ModelConfig:
    """The model with the heads, norm and rotation that an operation has."""
    return model.as_indexer() if operation is not None and operation.part == "indexer" else model


def summed_heads(of_heads: Array, weights: Array) -> Array:
    """The sum over heads of [heads, T, K] times weights [T, heads]: [1, T, K]."""
    return np.asarray(np.einsum("htk,th->tk", of_heads, weights, optimize=True)[None])


def best_keys(scores: Array, top_k: float) -> Array:
    """The rows [T, S], ascending, of the keys with the highest scores [1, T, K], after as many -1 as there are fewer
    that are not -inf. Of equal scores the first ones."""
    (of_queries,), count = scores, int(top_k)
    best = np.argsort(-of_queries, -1, kind="stable")[:, :count]
    hidden = np.take_along_axis(of_queries, best, -1) == -np.inf
    found = np.sort(np.where(hidden, -1, best), -1)
    return np.pad(found, ((0, 0), (count - found.shape[1], 0)), constant_values=-1).astype(np.float64)
