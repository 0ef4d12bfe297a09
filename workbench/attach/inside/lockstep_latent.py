"""What to take of attention whose keys and values are made of latents (DeepSeek's), as transformers has it: queries and
the part of a key that is rotated as its function of attention reads them, and what each new token's latent gives.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

#: In place of what is taken of other attention, which rotates whole heads (`lockstep_modules.Names`).
LATENT: dict[str, dict[str, str]] = {
    ".self_attn": {"attended q": ".attn.q_rope", "attended key": ".attn.rope_key"},
    ".self_attn.kv_b_proj": {"expanded": ".attn.kv_b_proj"},
}
#: Of these all that is cached comes: [B, K, …].
OF_CACHED = ("attended key", "expanded")


def _queries(call: Any, owner: Any) -> Tensor:
    """[B, T, heads, D]."""
    return _as_in_checkpoint(call[0][1].transpose(1, 2), call[0][0])


def _shared_key(call: Any, owner: Any) -> Tensor:
    """The part that all heads share, [B, K, 1, rotated channels], of the first head's."""
    module, key = call[0][0], call[0][2]
    return _as_in_checkpoint(key[:, :1].transpose(1, 2), module)[..., -module.qk_rope_head_dim :]


def _as_in_checkpoint(heads: Tensor, module: Any) -> Tensor:
    """Heads whose last channels were rotated, with these in the order that the checkpoint has them in: pair by pair,
    where the model puts the first ones of all pairs before the second ones."""
    if not (getattr(module.config, "rope_interleave", False) or hasattr(module, "indexer")):
        return heads
    width = module.qk_rope_head_dim
    pairs = heads[..., -width:].unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)
    both: Tensor = heads.clone()
    both[..., -width:] = pairs
    return both


LATENT_TAKE: dict[str, Callable[[Any, Any], Any]] = {
    "attended q": _queries,
    "attended key": _shared_key,
    "expanded": lambda x, owner: x.flatten(1, -2),  # [B, 1, K, …]
}


def new_rows(x: Tensor, before: int | None, new: int) -> Tensor | None:
    """Those of the `new` tokens of a call, behind as many columns as its cache held `before`, of [B, K, …]; where that
    is not known the last. None where they are not all there."""
    start = x.shape[1] - new if before is None else before
    return x[:, start : start + new] if 0 <= start <= x.shape[1] - new else None
