"""The correct behaviour of activations that have numbers or a kernel of their own."""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from lockstep.engine.rules.self_test import agrees

#: Elements of a row that one program of the kernel takes.
_BLOCK = 1024


def xielu(x: Tensor, alpha_p: Tensor, alpha_n: Tensor, beta: Tensor, eps: Tensor) -> Tensor:
    """xIELU (arXiv:2411.13010) of x [T, intermediate], in float32 within: p x² + beta x above zero, and n (exp(x) - 1 -
    x) + beta x below, with p = softplus(alpha_p) and n = beta + softplus(alpha_n)."""
    wide = x if x.dtype == torch.float64 else x.float()
    alpha_p, alpha_n, beta, eps = (one.to(wide.dtype) for one in (alpha_p, alpha_n, beta, eps))
    above = F.softplus(alpha_p) * wide.square()
    below = (torch.minimum(wide, eps).expm1() - wide) * (beta + F.softplus(alpha_n))
    return (torch.where(wide > 0, above, below) + beta * wide).to(x.dtype)


def silu_times(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up, each [T, intermediate]."""
    if gate.is_cuda and gate.dim() == 2 and _in_one_kernel(gate.device, gate.dtype):
        return _by_kernel(gate, up)
    return F.silu(gate) * up


def _by_kernel(gate: Tensor, up: Tensor) -> Tensor:
    """The same by one launch, from parts of a packed product as they lie there."""
    from lockstep.engine.rules import kernels

    gate, up = (x if x.stride(-1) == 1 else x.contiguous() for x in (gate, up))
    out = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    rows, width = gate.shape
    if out.numel():
        kernels.silu_times[(rows, -(-width // _BLOCK))](
            gate, up, out, width, gate.stride(0), up.stride(0), BLOCK=_BLOCK, enable_fp_fusion=False
        )
    return out


@cache
def _in_one_kernel(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether Triton is there, compiles, and gives what torch's own kernels give, but for an ulp."""
    if dtype not in (torch.bfloat16, torch.float16):
        return False
    packed = 4 * torch.randn(3, 2 * 72, generator=torch.Generator().manual_seed(0)).to(dtype)
    gate, up = packed.to(device).split(72, -1)
    return agrees(lambda: _by_kernel(gate, up), F.silu(gate) * up, 2 * torch.finfo(dtype).eps)
