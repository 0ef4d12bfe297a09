"""What to take of attention to the keys that an indexer chooses (DeepSeek-V3.2, GLM-5), as transformers has it: what
its products give, and the choice, its own or an earlier layer's. Scores are made again of these.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

#: By the module within the layer (`lockstep_names.Names`).
INDEXER: dict[str, dict[str, str]] = {
    ".self_attn.indexer": {"chosen keys": ".attn.index_chosen"},
    ".self_attn.indexer.wq_b": {"out": ".attn.index_q_proj"},
    ".self_attn.indexer.wk": {"out": ".attn.index_k_proj"},
    ".self_attn.indexer.k_norm": {"out": ".attn.index_k_norm"},
    ".self_attn.indexer.weights_proj": {"out": ".attn.index_weights"},
}
#: What is taken of attention without an indexer, beside what is taken of all.
SHARED_CHOICE = {"shared keys": ".attn.shared_chosen"}


def _in_order(shown: Any, owner: Any) -> Tensor:
    """[B, T, index_topk] of a mask [B, T, K] and what was chosen [B, T, S]: ascending positions in the sequence, after
    -1 where a key is hidden or there is none."""
    mask, ids = shown
    config, visible = owner.config, mask if mask.dtype == torch.bool else mask == 0
    ids = ids.long()
    padding = visible[:, -1].int().argmax(-1).view(-1, 1, 1)  # columns before a sequence's first token
    hidden = ~visible.gather(-1, ids)
    found = (ids - padding).masked_fill(hidden, -1).sort(-1).values
    return nn.functional.pad(found, (config.index_topk - found.shape[-1], 0), value=-1)


INDEXER_TAKE: dict[str, Callable[[Any, Any], Any]] = {
    "chosen keys": _in_order,
    "shared keys": lambda shown, layer: _in_order(shown, layer.self_attn),
}


def register_choice(part: Any, take: str, see: Callable[[Any], None]) -> Any:
    """Have a module show the mask and what was chosen; None of one that has nothing to show."""
    if take == "chosen keys":
        return part.register_forward_hook(lambda _, args, out: see((args[3], out)))
    if getattr(part, "indexer", part) is not None:
        return None
    return part.register_forward_hook(
        lambda _, args, kwargs, out: see((kwargs["attention_mask"][:, 0], out[2])), with_kwargs=True
    )
