"""transformers' eager attention with taps: the same operations in the same order, so the same bits.

Of a long prompt scores and probabilities are never held whole: they are made some queries at a time, measured, and the
newest rows are kept. A row is the same then but for the order in which a product of another height is summed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import eager_mask

from lockstep.engine.taps.hub import TapTiles
from lockstep.engine.taps.measure import TiledStatistics
from lockstep.engine.taps.parts import PARTS
from lockstep.workbench.references.arrays import NewestRows, Seen

NAME = "lockstep_eager"
#: Queries times keys up to which scores are held whole: a prompt of 1,024 tokens.
WHOLE = 1 << 20
#: Scores that are made at a time of more, and elements of those that are kept.
TILE, KEPT = 1 << 20, 1 << 21


#: What one layer's attention saw: the taps of the attention interface by their short names.
OnAttention = Callable[[int, dict[str, Seen]], None]

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
    attention_mask: Tensor | _MaskRows,
    scaling: float,
    **_: Any,
) -> tuple[Tensor, Tensor | None]:
    """query [1, heads, T, D], key and value [1, kv_heads, K, D] -> context [1, T, heads, D], probs."""
    listener, new = _listeners.get(id(module)), query.shape[2]
    keys, values = (_repeat_kv(kv, module.num_key_value_groups) for kv in (key, value))
    if isinstance(attention_mask, Tensor):
        context, scores, probs = _whole(query, keys, values, attention_mask, scaling)
    else:
        context, scores, probs = _by_rows(query, keys, values, attention_mask, scaling)
    context = context.transpose(1, 2).contiguous()
    if listener is not None:
        seen: dict[str, Seen] = {
            "q_rope": query[0].transpose(0, 1),  # [T, heads, D]
            "k_rope": key[0, :, -new:].transpose(0, 1),  # [T, kv_heads, D]
            "k_cache": key[0].transpose(0, 1),  # [K, kv_heads, D]
            "v_cache": value[0].transpose(0, 1),
            "scores": scores,  # [heads, T, K]
            "probs": probs,
            "context": context[0].flatten(1),  # [T, heads * D]
        }
        listener(module.layer_idx, seen)
    return context, None if isinstance(probs, NewestRows) else probs[None]


def _softmax(query: Tensor, keys: Tensor, mask: Tensor, scaling: float) -> tuple[Tensor, Tensor]:
    """Scores and probabilities [1, heads, T, K]; `mask` is 0, or the dtype's most negative number where masked."""
    scores = torch.matmul(query, keys.transpose(2, 3)) * scaling
    scores = scores + mask
    probs = nn.functional.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
    # -inf where masked, as engines have it, and not float32's -3.4e38
    return scores.masked_fill_(mask != 0, -math.inf), probs


def _whole(
    query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scaling: float
) -> tuple[Tensor, Seen, Seen]:
    """Context [1, heads, T, D], scores and probabilities."""
    scores, probs = _softmax(query, keys, mask, scaling)
    return torch.matmul(probs, values), scores[0], probs[0]


def _by_rows(
    query: Tensor, keys: Tensor, values: Tensor, mask: _MaskRows, scaling: float
) -> tuple[Tensor, Seen, Seen]:
    """The same, some queries at a time."""
    (heads, new), count = query.shape[1:3], keys.shape[2]
    size = max(1, TILE // (heads * count))
    kept = min(new, max(1, KEPT // (heads * count)))
    shape, context, masked = (heads, new, count), torch.empty_like(query), 0
    taps = []
    for outside in (-math.inf, 0.0):
        measured = TiledStatistics(shape, outside, query.dtype, query.device)
        taps.append((measured, TapTiles(measured, query.new_empty(heads, kept, count), new - kept)))
    for start in range(0, new, size):
        rows = slice(start, min(start + size, new))
        bias = mask.rows(rows)
        seen = _softmax(query[:, :, rows], keys, bias, scaling)
        context[:, :, rows] = torch.matmul(seen[1], values)
        for (_, tiles), tensor in zip(taps, seen, strict=True):
            tiles.add(tensor[0], 0, start, 0)
        masked += heads * int((bias != 0).sum())
    found = []
    for (measured, tiles), hidden in zip(taps, (masked, 0), strict=True):
        parts, _ = measured.close()
        parts[:, PARTS.index("inf")] -= hidden
        assert tiles.tail is not None
        found.append(NewestRows(tiles.tail, new, parts))
    return context, found[0], found[1]


@dataclass(frozen=True, slots=True)
class _MaskRows:
    """The mask [1, 1, T, K] of a long prompt, some rows at a time; `settings` are those of `eager_mask`."""

    offset: int
    settings: dict[str, Any]

    def rows(self, rows: slice) -> Tensor:
        """[1, 1, rows, K]."""
        length = rows.stop - rows.start
        mask: Tensor = eager_mask(q_length=length, q_offset=self.offset + rows.start, **self.settings)
        return mask


def _mask(*, q_length: int, kv_length: int, q_offset: int = 0, **settings: Any) -> Tensor | _MaskRows:
    settings["kv_length"] = kv_length
    if q_length * kv_length > WHOLE:
        return _MaskRows(q_offset, settings)
    mask: Tensor = eager_mask(q_length=q_length, q_offset=q_offset, **settings)
    return mask


def register() -> str:
    """Make the attention known to transformers; returns the name for `attn_implementation`."""
    AttentionInterface.register(NAME, _eager_with_taps)
    AttentionMaskInterface.register(NAME, _mask)
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
