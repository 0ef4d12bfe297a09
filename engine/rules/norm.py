"""RMS normalisation (Zhang and Sennrich 2019, arXiv:1910.07467)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from lockstep.engine.config.model import NormForm


def rms_norm(x: Tensor, weight: Tensor, eps: float, form: NormForm = "rms") -> Tensor:
    """x / rms(x) * weight over the last dimension: [..., D], [D] -> [..., D].

    Normalised in float32 and rounded to x's dtype *before* the weight is applied (`wide`: after): the order of the
    models' own training code. The other one moves every norm by an ulp in bfloat16.
    """
    if x.dtype == torch.float32:  # nothing to round: one fused operation does the same
        return F.rms_norm(x, x.shape[-1:], weight, eps)
    return weighted(F.rms_norm(x.float(), x.shape[-1:], None, eps), weight, form, x.dtype)


def weighted(x: Tensor, weight: Tensor, form: NormForm, dtype: torch.dtype) -> Tensor:
    """What was normalised in float32, times the weight, in `dtype`."""
    if form == "wide":
        return (x * weight.float()).to(dtype)
    return weight * x.to(dtype)
