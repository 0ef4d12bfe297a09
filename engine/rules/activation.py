"""The correct behaviour of activations that have numbers of their own."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def xielu(x: Tensor, alpha_p: Tensor, alpha_n: Tensor, beta: Tensor, eps: Tensor) -> Tensor:
    """xIELU (arXiv:2411.13010) of x [T, intermediate], in float32 within: p x² + beta x above zero, and n (exp(x) - 1 -
    x) + beta x below, with p = softplus(alpha_p) and n = beta + softplus(alpha_n)."""
    wide = x if x.dtype == torch.float64 else x.float()
    alpha_p, alpha_n, beta, eps = (one.to(wide.dtype) for one in (alpha_p, alpha_n, beta, eps))
    above = F.softplus(alpha_p) * wide.square()
    below = (torch.minimum(wide, eps).expm1() - wide) * (beta + F.softplus(alpha_n))
    return (torch.where(wide > 0, above, below) + beta * wide).to(x.dtype)
