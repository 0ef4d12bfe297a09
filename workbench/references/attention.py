"""transformers' eager attention with taps: the same operations in the same order, so the same bits.

Of a long prompt scores and probabilities are never held whole: they are made some queries at a time, measured, and the
newest rows are kept. A row is the same then but for the order in which a product of another height is summed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import eager_mask

from lockstep.engine.taps.hub import TapTiles
from lockstep.engine.taps.measure import TiledStatistics
from lockstep.engine.taps.names import is_kept_whole, newest_rows
from lockstep.engine.taps.parts import PARTS
from lockstep.workbench.references import llama4
from lockstep.workbench.references.arrays import NewestRows, Seen
from lockstep.workbench.references.indexer import chosen_rows, with_chosen
from lockstep.workbench.references.scaled_queries import in_pairs, scales_queries

NAME = "lockstep_eager"
#: Scores that are made at a time where not all of them are kept.
TILE = 1 << 20


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
    attention_mask: Tensor | _MaskRows | _WholeMask,
    scaling: float,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    indices: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, Tensor | None]:
    """query [1, heads, T, D], key and value [1, kv_heads, K, D], sinks [heads], what an indexer chose [1, T, S] ->
    context [1, T, heads, D], probs."""
    listener = _listeners.get(id(module))
    keys, values = (_repeat_kv(kv, module.num_key_value_groups) for kv in (key, value))
    if indices is not None:
        assert isinstance(attention_mask, Tensor), "an indexer is given its mask whole"
        if listener is not None:
            own = "index_chosen" if module.indexer is not None else "shared_chosen"
            ids = chosen_rows(indices[0], attention_mask[0, 0], module.config.index_topk)
            listener(module.layer_idx, {own: ids})
        attention_mask = with_chosen(indices, attention_mask)
        if not is_kept_whole(*attention_mask.shape[2:]):
            attention_mask = _WholeMask(attention_mask)
    if isinstance(attention_mask, Tensor):
        context, scores, probs = _whole(query, keys, values, attention_mask, Extras(scaling, softcap, s_aux))
    else:
        context, scores, probs = _by_rows(
            query, keys, values, attention_mask, Extras(scaling, softcap, s_aux)
        )
    context = context.transpose(1, 2).contiguous()
    if listener is not None:
        seen: dict[str, Seen] = {
            **_operands(module, query, key, value),
            "scores": scores,  # [heads, T, K]
            "probs": probs,
            "context": context[0].flatten(1),  # [T, heads * D]
        }
        listener(module.layer_idx, seen)
    return context, None if isinstance(probs, NewestRows) else probs[None]


def _operands(module: Any, query: Tensor, key: Tensor, value: Tensor) -> dict[str, Seen]:
    """The taps of what attention reads, [T or K, heads, D]: of latent attention the rotated channels in the order that
    the checkpoint has them in."""
    new, q, k, v = query.shape[2], *(x[0].transpose(0, 1) for x in (query, key, value))
    if getattr(module, "is_kv_shared_layer", False):  # another layer's keys and values
        return {"q_rope": q, "k_cache": k, "v_cache": v}
    if hasattr(module, "query_layernorm"):  # behind the rotation
        return {"k_cache": k, "v_cache": v}
    if hasattr(module, "attn_temperature_tuning"):
        return {**llama4.attended(module, q, k[-new:]), "k_cache": k, "v_cache": v}
    queries = "q_scaled" if scales_queries(module) else "q_rope"
    if not hasattr(module, "kv_lora_rank"):
        return {queries: q, "k_rope": k[-new:], "k_cache": k, "v_cache": v}
    q, k = (in_pairs(x, module) for x in (q, k))
    shared = k[:, :1, -module.qk_rope_head_dim :]
    return {queries: q, "rope_key": shared[-new:], "rope_cache": shared, "keys": k, "values": v}


class Extras(NamedTuple):
    """What a model's attention has beside queries, keys and values: sinks are [heads]."""

    scaling: float
    softcap: float | None
    sinks: Tensor | None


def _softmax(query: Tensor, keys: Tensor, mask: Tensor, extras: Extras) -> tuple[Tensor, Tensor]:
    """Scores and probabilities [1, heads, T, K]; `mask` is 0, or the dtype's most negative number where masked."""
    scores = torch.matmul(query, keys.transpose(2, 3)) * extras.scaling
    if (softcap := extras.softcap) is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores + mask
    if extras.sinks is None:
        probs = nn.functional.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
    else:
        probs = _softmax_beside(scores, extras.sinks)
    # -inf where masked, as engines have it, and not float32's -3.4e38
    return scores.masked_fill_(mask != 0, -math.inf), probs


def _softmax_beside(scores: Tensor, sinks: Tensor) -> Tensor:
    """With one column more, of which nothing is weighed; the maximum is taken off in the scores' own dtype."""
    beside = sinks.reshape(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
    combined = torch.cat([scores, beside], dim=-1)
    combined = combined - combined.max(dim=-1, keepdim=True).values
    probs = nn.functional.softmax(combined, dim=-1, dtype=combined.dtype)
    return probs[..., :-1]


def _whole(
    query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, extras: Extras
) -> tuple[Tensor, Seen, Seen]:
    """Context [1, heads, T, D], scores and probabilities."""
    scores, probs = _softmax(query, keys, mask, extras)
    return torch.matmul(probs, values), scores[0], probs[0]


def _by_rows(
    query: Tensor, keys: Tensor, values: Tensor, mask: _MaskRows | _WholeMask, extras: Extras
) -> tuple[Tensor, Seen, Seen]:
    """The same, some queries at a time."""
    (heads, new), count = query.shape[1:3], keys.shape[2]
    size = max(1, TILE // (heads * count))
    of_scores = _ByRows.starting((heads, new, count), -math.inf, query)
    of_probs = _ByRows.starting((heads, new, count), 0.0, query)
    context, masked = query.new_empty(*query.shape[:3], values.shape[-1]), 0
    for start in range(0, new, size):
        rows = slice(start, min(start + size, new))
        bias = mask.rows(rows)
        scores, probs = _softmax(query[:, :, rows], keys, bias, extras)
        context[:, :, rows] = torch.matmul(probs, values)
        of_scores.tiles.add(scores[0], 0, start, 0)
        of_probs.tiles.add(probs[0], 0, start, 0)
        masked += heads * int((bias != 0).sum())
    return context, of_scores.ended(masked), of_probs.ended()


@dataclass(frozen=True, slots=True)
class _ByRows:
    """A tensor [heads, T, K] that comes some rows at a time."""

    measured: TiledStatistics
    newest: Tensor
    tiles: TapTiles

    @classmethod
    def starting(cls, shape: tuple[int, int, int], outside: float, like: Tensor) -> _ByRows:
        """Nothing has come yet."""
        heads, new, keys = shape
        kept = newest_rows(heads, new, keys)
        measured = TiledStatistics(shape, outside, like.dtype, like.device)
        newest = like.new_empty(heads, kept, keys)
        return cls(measured, newest, TapTiles(measured, newest, new - kept))

    def ended(self, masked: int = 0) -> NewestRows:
        """All of it has come; so many infinities are the mask's."""
        parts, _ = self.measured.close()
        parts[:, PARTS.index("inf")] -= masked
        return NewestRows(self.newest, self.measured.shape[1], parts)


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


@dataclass(frozen=True, slots=True)
class _WholeMask:
    """A mask [1, 1, T, K] that is there."""

    mask: Tensor

    def rows(self, rows: slice) -> Tensor:
        """[1, 1, rows, K]."""
        return self.mask[:, :, rows]


def _mask(*, q_length: int, kv_length: int, q_offset: int = 0, **settings: Any) -> Tensor | _MaskRows:
    settings["kv_length"] = kv_length
    if not is_kept_whole(q_length, kv_length) and not hasattr(settings.get("config"), "index_topk"):
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
