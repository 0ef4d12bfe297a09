"""Grouped-query attention: which KV head a query head reads."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lockstep.engine.config import ModelConfig
from lockstep.engine.faults.fault import Fault
from lockstep.engine.faults.needs import all_of, own_kv, several_kv_heads

if TYPE_CHECKING:
    from torch import Tensor


def repeated_heads(kv: Tensor, group: int) -> Tensor:
    """Every KV head is written to the cache as often as query heads read it."""
    return kv.repeat_interleave(group, dim=1)


def repeated_heads_read(kv: Tensor, kv_heads: int, group: int) -> Tensor:
    """Query head h reads cached head h // group, although the cache holds heads already repeated."""
    import torch

    return _select(kv, torch.arange(kv_heads * group, device=kv.device) // group, group)


def tiled_heads(kv: Tensor, kv_heads: int, group: int) -> Tensor:
    """Query head h reads KV head h % kv_heads."""
    import torch

    return _select(kv, torch.arange(kv_heads * group, device=kv.device) % kv_heads, group)


def _select(kv: Tensor, heads: Tensor, group: int) -> Tensor:
    """kv [K, cached heads, D] -> [kv_heads, group, K, D]: query head h reads cached head `heads[h]`."""
    read: Tensor = kv.transpose(0, 1).index_select(0, heads).unflatten(0, (-1, group))
    return read


def _groups(model: ModelConfig, tp: int) -> str | None:
    if model.num_heads == model.num_kv_heads:
        return "the model has as many KV heads as heads"
    alone = model.num_heads // tp == 1
    return "each rank holds a single head, with its own copy of the KV head" if alone else None


def first_head_alone(kv: Tensor, group: int) -> Tensor:
    """The first KV head is copied to all."""
    return kv[:, :1].expand_as(kv)


def float8_rows(kv: Tensor, group: int) -> Tensor:
    """Rows are rounded to float8 (e4m3), without a scale."""
    import torch

    return kv.to(torch.float8_e4m3fn).to(kv.dtype)


def first_kv_head(kv: Tensor, kv_heads: int, group: int) -> Tensor:
    """Every query head reads KV head 0."""
    import torch

    return _select(kv, torch.zeros(kv_heads * group, dtype=torch.int64, device=kv.device), group)


def next_kv_head(kv: Tensor, kv_heads: int, group: int) -> Tensor:
    """Query heads read the KV head after their own."""
    import torch

    return _select(kv, (torch.arange(kv_heads * group, device=kv.device) // group + 1) % kv_heads, group)


FAULTS = (
    Fault(
        id="repeated-heads-cached",
        seam="cache_heads",
        value="repeated",
        correct="kv",
        title="GQA-repeated heads stored in the cache",
        group="gqa",
        level="build",
        first_tap="layers.*.attn.k_cache",
        symptom="the cache holds every KV head as often as it is read, and is read as if it did not",
        patch={"cache_heads": repeated_heads, "kv_expand": repeated_heads_read},
        needs=_groups,
    ),
    Fault(
        id="kv-tiled",
        seam="kv_expand",
        value="tiled",
        correct="interleaved",
        title="KV heads tiled instead of interleaved",
        group="gqa",
        level="step",
        first_tap="layers.*.attn.scores",
        symptom="query head h reads KV head h % n instead of h // group",
        source="onnx/onnx#7274",
        patch={"kv_expand": tiled_heads},
        needs=all_of(_groups, several_kv_heads),
    ),
    Fault(
        id="cache-first-head-alone",
        seam="cache_heads",
        value="first",
        correct="kv",
        title="one KV head copied to the others in the cache",
        group="gqa",
        level="step",
        first_tap="layers.*.attn.k_cache",
        symptom="cached heads are all the first one",
        source="vllm-project/vllm#52516",
        patch={"cache_heads": first_head_alone},
        needs=all_of(own_kv, several_kv_heads),
    ),
    Fault(
        id="cache-float8",
        seam="cache_heads",
        value="float8",
        correct="kv",
        title="the cache rounded to float8 without a scale",
        group="cache",
        level="step",
        first_tap="layers.*.attn.k_cache",
        symptom="cached rows are right to one digit; rows beyond 448 are cut off",
        patch={"cache_heads": float8_rows},
    ),
    Fault(
        id="kv-first-head",
        seam="kv_expand",
        value="first",
        correct="interleaved",
        title="every query head reads KV head 0",
        group="gqa",
        level="step",
        first_tap="layers.*.attn.scores",
        symptom="the first group of heads is right, the others are not",
        patch={"kv_expand": first_kv_head},
        needs=several_kv_heads,
    ),
    Fault(
        id="kv-next-head",
        seam="kv_expand",
        value="next",
        correct="interleaved",
        title="query heads read the next group's KV head",
        group="gqa",
        level="step",
        first_tap="layers.*.attn.scores",
        symptom="no head is right; each is as it should be for another group's keys",
        source="sgl-project/sglang#19086",
        patch={"kv_expand": next_kv_head},
        needs=several_kv_heads,
    ),
)
