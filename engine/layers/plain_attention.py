"""Attention of one sequence as torch computes it, whole and in a wide dtype: what kernels are tried against."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def attended(q: Tensor, keys: Tensor, values: Tensor, dtype: torch.dtype) -> Tensor:
    """Queries [T, heads, D] of the last T of K rows over keys and values [K, kv_heads, D], causal and scaled by
    the root of D: [T, heads, D] in `dtype`."""
    group = q.shape[1] // keys.shape[1]
    k, v = (rows.to(dtype).transpose(0, 1).repeat_interleave(group, 0) for rows in (keys, values))
    seen = torch.ones(len(q), len(keys), dtype=torch.bool, device=q.device).tril(len(keys) - len(q))
    return F.scaled_dot_product_attention(q.to(dtype).transpose(0, 1), k, v, attn_mask=seen).transpose(0, 1)
