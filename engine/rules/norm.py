"""RMS normalisation (Zhang and Sennrich 2019, arXiv:1910.07467)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) * weight over the last dimension: [..., D], [D] -> [..., D].

    Normalised in float32 and rounded to x's dtype *before* the weight is applied: the order of the
    models' own training code. Applying the weight first moves every norm by an ulp in bfloat16.
    """
    if x.dtype == torch.float32:  # nothing to round: one fused operation does the same
        return F.rms_norm(x, x.shape[-1:], weight, eps)
    return weight * F.rms_norm(x.float(), x.shape[-1:], None, eps).to(x.dtype)
