"""RMS normalisation (Zhang and Sennrich 2019, arXiv:1910.07467)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from lockstep.engine.config.families import NormForm


def rms_norm(x: Tensor, weight: Tensor, eps: float, form: NormForm = "rms") -> Tensor:
    """x / rms(x) * weight over the last dimension: [..., D], [D] -> [..., D].

    Normalised in float32 and rounded to x's dtype *before* the weight is applied (other forms: after): the order of the
    models' own training code. The other one moves every norm by an ulp in bfloat16.
    """
    if x.dtype == torch.float32:  # nothing to round: one fused operation does the same
        return F.rms_norm(x, x.shape[-1:], effective(weight, form), eps)
    return scaled(F.rms_norm(x.float(), x.shape[-1:], None, eps), weight, form, x.dtype)


def scaled(x: Tensor, weight: Tensor, form: NormForm, dtype: torch.dtype) -> Tensor:
    """What was normalised in float32, times the weight, in `dtype`."""
    if form == "rms":
        return weight * x.to(dtype)
    return (x * effective(weight.float(), form)).to(dtype)


def layer_norm(
    bias: Tensor | None, x: Tensor, weight: Tensor, eps: float, form: NormForm = "layer"
) -> Tensor:
    """(x - mean(x)) / deviation(x) * weight + bias, if there is one, over the last dimension (Ba et al. 2016,
    arXiv:1607.06450)."""
    return F.layer_norm(x, x.shape[-1:], effective(weight, form), bias, eps)


def effective(weight: Tensor, form: NormForm) -> Tensor:
    """What is multiplied by a norm's weight as the checkpoint has it."""
    return 1 + weight if form in ("plus_one", "layer_plus_one") else weight
