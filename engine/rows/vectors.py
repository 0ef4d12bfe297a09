"""Norms and rotations of a pass of few rows, each in one call. A dozen operators of torch take longer than the work: by
the time one is called again, the matrices of a layer have driven it from the cache."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from lockstep.engine.compiled import kernels
from lockstep.engine.rows import products
from lockstep.engine.text import first_line

_KERNELS = "lockstep.engine.rows.vector_kernels"


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor | None:
    """x / rms(x) * weight over the last axis, [..., D], [D] -> [..., D], float32; None outside of such a pass."""
    if not products.is_reading() or not x.dtype == weight.dtype == torch.float32 or refusal() is not None:
        return None
    width = x.shape[-1]
    if weight.shape != (width,) or not weight.is_contiguous():
        return None
    return _rms_norm(x.contiguous(), weight, eps)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor | None:
    """Pairs (i, i + D/2) of x [T, heads, D] by angles whose cosine and sine are each [T, 1, D/2], float32, with the
    bits that torch gives; None outside of such a pass, and where something is to be broadcast or converted."""
    if not products.is_reading() or not x.dtype == cos.dtype == sin.dtype == torch.float32:
        return None
    if x.dim() != 3 or x.shape[2] % 2 or x.stride(2) != 1 or refusal() is not None:
        return None
    if not cos.shape == sin.shape == (x.shape[0], 1, x.shape[2] // 2):
        return None
    return _rotate(x, cos, sin) if cos.is_contiguous() and sin.is_contiguous() else None


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    out, width = torch.empty_like(x), x.shape[-1]
    kernels(_KERNELS).rms_norm(
        x.data_ptr(), weight.data_ptr(), out.data_ptr(), x.numel() // width, width, eps
    )
    return out


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    out = torch.empty(x.shape)
    kernels(_KERNELS).rotate(
        x.data_ptr(), cos.data_ptr(), sin.data_ptr(), out.data_ptr(), *x.shape, x.stride(0), x.stride(1)
    )
    return out


@cache
def refusal() -> str | None:
    """Why the kernels cannot be used; None where they have passed their test: as float64 has it."""
    random = torch.Generator().manual_seed(0)
    x, weight = torch.randn(2, 3, 34, generator=random), torch.randn(34, generator=random)
    angles = torch.randn(2, 1, 17, generator=random)
    cos, sin = angles.cos(), angles.sin()
    try:
        normed, rotated = _rms_norm(x, weight, 1e-6), _rotate(x, cos, sin)
    except Exception as error:  # whatever importing or compiling throws
        return first_line("no norms of few rows here", error)
    wide = x.double()
    first, second = wide.chunk(2, -1)
    right = torch.cat((first * cos - second * sin, second * cos + first * sin), -1)
    wide = wide / (wide.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight
    apart = max(
        float((found - expected).abs().max()) for found, expected in ((normed, wide), (rotated, right))
    )
    return None if apart < 1e-4 else "no norms of few rows here: a kernel is wrong on this CPU"
