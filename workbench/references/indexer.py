"""transformers' indexers of sparse attention with taps: the same operations in the same order, so the same bits.

What its modules give is heard at these; here, what is made of it. transformers' attention gets the choice as it is;
taps have it ascending, after -1 for what the mask hides, which transformers chooses where there is nothing else.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lockstep.engine.config.indexer import IndexerConfig

#: What one layer's indexer saw: a tap within the layer, and its tensor.
See = Callable[[str, Tensor], None]


@contextmanager
def indexing(module: Any, config: IndexerConfig, see: See) -> Iterator[None]:
    """Within the block `see` hears the indexer `module` (batch of one)."""
    module.forward = partial(_with_taps, module, config, see)
    try:
        yield
    finally:
        del module.forward


def _with_taps(
    module: Any,
    config: IndexerConfig,
    see: See,
    hidden_states: Tensor,
    q_resid: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    attention_mask: Tensor,
    position_ids: Tensor | None = None,
    cache: Any = None,
    past_key_values: Any = None,  # what transformers calls the cache before 5.24
) -> Tensor:
    """hidden_states [1, T, hidden], q_resid [1, T, q_rank], mask [1, T, K] -> the chosen keys [1, T, S]."""
    cache = past_key_values if cache is None else cache
    width, heads = module.qk_rope_head_dim, (-1, module.head_dim)
    q = module.wq_b(q_resid).unflatten(-1, heads)
    k = module.k_norm(module.wk(hidden_states)).unsqueeze(2)
    name = "apply_rotary_pos_emb_interleave" if config.neighbours else "apply_rotary_pos_emb"
    rotate = vars(sys.modules[type(module).__module__])[name]
    turned = rotate(q[..., :width], k[..., :width], *position_embeddings, unsqueeze_dim=2)
    q, k = (torch.cat((one, x[..., width:]), -1) for one, x in zip(turned, (q, k), strict=True))
    k = k.squeeze(2)
    pairs = partial(_in_pairs, width=width) if config.neighbours else _same
    see("attn.index_q_rope", pairs(q[0]))
    see("attn.index_k_rope", pairs(k[0].unsqueeze(1)))
    if cache is not None:
        k = cache.update_indexer(k, module.layer_idx)
    see("attn.index_k_cache", pairs(k[0].unsqueeze(1)))
    scores = torch.matmul(q.float(), k.transpose(-1, -2).float().unsqueeze(1)) * module.softmax_scale
    scores = torch.nn.functional.relu(scores)
    weights = module.weights_proj(hidden_states.to(module.weights_proj.weight.dtype)).float()
    weights = weights * (module.n_heads**-0.5)
    of_keys = torch.matmul(weights.unsqueeze(-2), scores).squeeze(-2) + attention_mask
    see("attn.index_scores", of_keys.masked_fill(attention_mask != 0, -torch.inf))
    return of_keys.topk(min(module.index_topk, of_keys.shape[-1]), dim=-1).indices.to(torch.int32)


def _same(x: Tensor) -> Tensor:
    return x


def _in_pairs(x: Tensor, width: int) -> Tensor:
    """[N, heads, D], whose first `width` channels were rotated, in the order that the checkpoint has them."""
    pairs = x[..., :width].unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)
    return torch.cat((pairs, x[..., width:]), -1)


def chosen_rows(chosen: Tensor, mask: Tensor, top_k: int) -> Tensor:
    """What was chosen [T, S] as taps have it, [T, top_k]; `mask` [T, K] is not 0 where it hides a key."""
    ids = chosen.long()
    ids = ids.masked_fill(mask.gather(-1, ids) != 0, -1).sort(-1).values
    return torch.nn.functional.pad(ids, (top_k - ids.shape[-1], 0), value=-1)


def with_chosen(chosen: Tensor, mask: Tensor) -> Tensor:
    """The mask [1, 1, T, K] with all keys hidden that are not among the chosen ones [1, T, S]."""
    hidden = torch.ones(mask.shape[2:], dtype=torch.bool, device=mask.device).scatter_(
        -1, chosen[0].long(), False
    )
    return mask.masked_fill(hidden, torch.finfo(mask.dtype).min)
