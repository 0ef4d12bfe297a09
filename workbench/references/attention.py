"""transformers' eager attention with taps: the same operations in the same order, so the same bits."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import eager_mask

NAME = "lockstep_eager"

#: What one layer's attention saw: the six taps of the attention interface by their short names.
OnAttention = Callable[[int, dict[str, Tensor]], None]

_listeners: dict[int, OnAttention] = {}  # by id of the attention module


def _repeat_kv(kv: Tensor, groups: int) -> Tensor:
    """[B, kv_heads, K, D] -> [B, heads, K, D]; query head h reads KV head h // groups."""
    if groups == 1:
        return kv
    batch, heads, keys, dim = kv.shape
    return kv[:, :, None].expand(batch, heads, groups, keys, dim).reshape(batch, heads * groups, keys, dim)


def _eager_with_taps(
    module: Any,  # the model's attention
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor,
    scaling: float,
    softcap: float | None = None,
    **_: Any,
) -> tuple[Tensor, Tensor]:
    """query [1, heads, T, D], key and value [1, kv_heads, K, D] -> context [1, T, heads, D], probs."""
    groups = module.num_key_value_groups
    scores = torch.matmul(query, _repeat_kv(key, groups).transpose(2, 3)) * scaling
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores + attention_mask  # 0, or the dtype's most negative number where masked
    probs = nn.functional.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
    context = torch.matmul(probs, _repeat_kv(value, groups)).transpose(1, 2).contiguous()
    listener = _listeners.get(id(module))
    if listener is not None:
        new = query.shape[2]
        seen = {
            "q_rope": query[0].transpose(0, 1),  # [T, heads, D]
            "k_rope": key[0, :, -new:].transpose(0, 1),  # [T, kv_heads, D]
            "k_cache": key[0].transpose(0, 1),  # [K, kv_heads, D]
            "v_cache": value[0].transpose(0, 1),
            # -inf where masked, as engines have it, and not float32's -3.4e38
            "scores": scores[0].masked_fill(attention_mask[0] != 0, -math.inf),  # [heads, T, K]
            "probs": probs[0],
            "context": context[0].flatten(1),  # [T, heads * D]
        }
        listener(module.layer_idx, seen)
    return context, probs


def register() -> str:
    """Make the attention known to transformers; returns the name for `attn_implementation`."""
    AttentionInterface.register(NAME, _eager_with_taps)
    AttentionMaskInterface.register(NAME, eager_mask)
    return NAME


class listening:
    """Within the block, `on_attention` hears every attention of the given modules."""

    def __init__(self, modules: list[Any], on_attention: OnAttention) -> None:
        self.modules, self.on_attention = modules, on_attention

    def __enter__(self) -> None:
        _listeners.update({id(module): self.on_attention for module in self.modules})

    def __exit__(self, *_: object) -> None:
        for module in self.modules:
            _listeners.pop(id(module), None)
