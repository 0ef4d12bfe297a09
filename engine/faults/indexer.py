"""Sparse attention: what an indexer scores, how many keys it chooses, and whether that counts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lockstep.engine.config import ModelConfig
from lockstep.engine.faults.fault import one_seam

if TYPE_CHECKING:
    from torch import Tensor

    from lockstep.engine.config.families import NormForm
    from lockstep.engine.rules.rope import Rotate


def _indexer(model: ModelConfig, tp: int) -> str | None:
    return None if model.indexer is not None else "the model has no indexer of keys"


def unrotated(k: Tensor, rotate: Rotate, cos: Tensor, sin: Tensor) -> Tensor:
    """The rotation is left out."""
    return k


def unbiased(bias: Tensor | None, x: Tensor, weight: Tensor, eps: float, form: NormForm) -> Tensor:
    """The bias is left out."""
    from lockstep.engine.rules.norm import layer_norm

    return layer_norm(None, x, weight, eps, form)


def everything(q_positions: Tensor, rows: slice, kv_positions: Tensor) -> Tensor:
    """Keys after the query may be chosen as well."""
    import torch

    queries = len(q_positions[rows])
    return torch.ones((queries, len(kv_positions)), dtype=torch.bool, device=kv_positions.device)


def one_fewer(scores: Tensor, top_k: int) -> Tensor:
    """One key fewer is chosen."""
    import torch

    from lockstep.engine.rules.indexer import best_keys

    return torch.nn.functional.pad(best_keys(scores, max(1, top_k - 1)), (min(1, top_k - 1), 0), value=-1)


def all_keys(ids: Tensor, keys: int) -> Tensor:
    """All keys are attended to, chosen or not."""
    import torch

    return torch.ones((len(ids), keys), dtype=torch.bool, device=ids.device)


FAULTS = (
    one_seam(
        "index_norm", "unbiased", "biased", unbiased, "layers.*.attn.index_k_norm",
        "the bias of the norm of index keys dropped",
        "index keys are off by the same in each token: other keys are chosen beyond index_topk", _indexer, group="norm",
    ),
    one_seam(
        "index_keys", "unrotated", "rotated", unrotated, "layers.*.attn.index_k_rope",
        "index keys cached without the rotation",
        "position 0 is right; other keys are chosen beyond index_topk", _indexer, group="rope",
    ),
    one_seam(
        "index_sight", "bidirectional", "causal", everything, "layers.*.attn.index_scores",
        "the indexer's scores of a prompt without a causal mask",
        "keys that a query may not see take the places of those that it may; decode steps are right", _indexer,
        group="attention", source="ml-explore/mlx-lm#1443",
    ),
    one_seam(
        "key_choice", "one_fewer", "top_k", one_fewer, "layers.*.attn.index_chosen",
        "the indexer chooses one key fewer than index_topk",
        "nothing up to index_topk - 1 tokens, from there on a key is missing", _indexer, group="attention",
    ),
    one_seam(
        "chosen_keys", "ignored", "chosen", all_keys, "layers.*.attn.scores",
        "what the indexer chose is ignored: attention is dense",
        "nothing up to index_topk tokens; beyond, fluent text that drifts from the reference", _indexer,
        group="attention",
    ),
)  # fmt: skip
