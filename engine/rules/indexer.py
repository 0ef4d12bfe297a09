"""The correct behaviour of an indexer, which chooses the keys that queries attend to (arXiv:2512.02556).

T queries, K cached rows, heads of D channels.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lockstep.engine.config.indexer import IndexerConfig
from lockstep.engine.rules import defaults
from lockstep.engine.rules.rope import Rotate


def rotated_keys(k: Tensor, rotate: Rotate, cos: Tensor, sin: Tensor) -> Tensor:
    """Index keys [T, 1, D] as they are cached."""
    return rotate(k, cos, sin)


def within_sight(q_positions: Tensor, rows: slice, kv_positions: Tensor) -> Tensor:
    """Which keys each of the queries `rows` may choose, [rows, K] bool: none after it."""
    return defaults.within_window(q_positions, rows, kv_positions, None)


def scores(q: Tensor, k: Tensor, weights: Tensor, indexer: IndexerConfig) -> Tensor:
    """Queries [T, heads, D], keys [K, D] and weights [T, heads] -> [T, K], in float32 at least: of each head what of
    the scaled product is positive, times its weight over the root of their number."""
    wide = torch.promote_types(q.dtype, torch.float32)
    products = q.to(wide) @ k.to(wide).T  # [T, heads, K]
    of_heads = products.mul_(indexer.dim**-0.5).relu_()
    weighed = weights.to(wide) * indexer.heads**-0.5
    found: Tensor = (weighed.unsqueeze(1) @ of_heads).squeeze(1)
    return found


def best_keys(scores: Tensor, top_k: int) -> Tensor:
    """The rows [T, top_k], ascending, of the keys with the highest scores [T, K], after as many -1 as there are fewer
    that are not -inf. Which ones of equal scores is left open."""
    count = min(top_k, scores.shape[-1])
    best, ids = scores.topk(count, -1)
    found = ids.masked_fill(best == -torch.inf, -1).sort(-1).values
    return torch.nn.functional.pad(found, (top_k - count, 0), value=-1)


def chosen_alone(ids: Tensor, keys: int) -> Tensor:
    """Which of so many keys are among the chosen rows `ids` [T, S]: [T, K] bool."""
    there = (ids >= 0) & (ids < keys)
    seen = torch.zeros((len(ids), keys + 1), dtype=torch.bool, device=ids.device)
    return seen.scatter_(-1, torch.where(there, ids, keys), True)[:, :keys]
