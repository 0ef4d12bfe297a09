"""RMS normalisation (Zhang and Sennrich 2019, arXiv:1910.07467)."""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from lockstep.engine.config.families import NormForm
from lockstep.engine.rows import vectors
from lockstep.engine.rules.self_test import agrees

#: Forms that a kernel of its own computes, in half precision, and the widest row that one program takes.
_BY_KERNEL: tuple[NormForm, ...] = ("rms", "wide", "plus_one")
_WIDEST = 16_384


def rms_norm(x: Tensor, weight: Tensor, eps: float, form: NormForm = "rms") -> Tensor:
    """x / rms(x) * weight over the last dimension: [..., D], [D] -> [..., D].

    Normalised in float32 and rounded to x's dtype *before* the weight is applied (other forms: after): the order of the
    models' own training code. The other one moves every norm by an ulp in bfloat16.
    """
    if x.dtype == torch.float32:  # nothing to round: one fused operation does the same
        weight = effective(weight, form)
        few = None if x.is_cuda else vectors.rms_norm(x, weight, eps)
        return F.rms_norm(x, x.shape[-1:], weight, eps) if few is None else few
    if x.is_cuda and x.dim() in (2, 3) and _in_one_kernel(x.device, x.dtype, form, x.shape[-1]):
        return _by_kernel(x, weight, eps, form)
    return scaled(F.rms_norm(x.float(), x.shape[-1:], None, eps), weight, form, x.dtype)


def _by_kernel(x: Tensor, weight: Tensor, eps: float, form: NormForm) -> Tensor:
    """The same of x [T, D] or [T, heads, D] by one launch instead of four, but for the order of a sum in float32."""
    from lockstep.engine.rules import kernels

    x = x if x.stride(-1) == 1 else x.contiguous()
    width, heads = x.shape[-1], 1 if x.dim() == 2 else x.shape[1]
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if out.numel():
        kernels.rms_norm[(out.numel() // width,)](
            x, weight, out, heads, width, x.stride(0), x.stride(-2), eps, PLUS_ONE=form == "plus_one",
            ROUNDED_FIRST=form == "rms", BLOCK=1 << (width - 1).bit_length(), num_warps=8 if width > 2048 else 4,
        )  # fmt: skip
    return out


@cache
def _in_one_kernel(device: torch.device, dtype: torch.dtype, form: NormForm, width: int) -> bool:
    """Whether Triton is there, compiles, and gives what float64 gives, but for rounding."""
    if dtype not in (torch.bfloat16, torch.float16) or form not in _BY_KERNEL or width > _WIDEST:
        return False
    random = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(*shape, width, generator=random).to(dtype) for shape in ((3, 2), ()))
    wide = x.double()
    expected = wide / (wide.square().mean(-1, keepdim=True) + 1e-6).sqrt() * effective(weight.double(), form)
    x, weight = x.to(device), weight.to(device)
    return agrees(lambda: _by_kernel(x, weight, 1e-6, form), expected, 2 * torch.finfo(dtype).eps)


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
