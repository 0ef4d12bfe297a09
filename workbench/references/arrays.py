"""Torch tensors as the arrays and statistics that a session holds."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lockstep.sessions.records import STATISTICS


def array(tensor: Tensor) -> NDArray[Any]:
    """A copy in numpy, exact: bfloat16 as its bits in uint16 (numpy has no such type)."""
    tensor = tensor.detach().to("cpu", copy=True).contiguous()
    if tensor.dtype is torch.bfloat16:
        return tensor.view(torch.uint16).numpy()
    return tensor.numpy()


def dtype_name(tensor: Tensor) -> str:
    """`float32`, `bfloat16`, …: the session's name of the tensor's dtype."""
    return str(tensor.dtype).removeprefix("torch.")


def statistics(tensors: list[Tensor], *, masked: bool = False) -> NDArray[np.float32]:
    """The row `STATISTICS` over all elements of `tensors`. `masked`: their -inf are the mask's, not counted."""
    x = torch.cat([tensor.detach().flatten() for tensor in tensors]).double()
    finite = x[x.isfinite()]
    infinities = int((x == torch.inf).sum() if masked else x.isinf().sum())
    row = dict.fromkeys(STATISTICS, float("nan"))
    row |= {"nan": int(x.isnan().sum()), "inf": infinities, "zeros": int((x == 0).sum())}
    if finite.numel():
        row |= {
            "min": finite.min().item(),
            "max": finite.max().item(),
            "mean": finite.mean().item(),
            "rms": finite.square().mean().sqrt().item(),
            "absmax": finite.abs().max().item(),
        }
    return np.array([row[name] for name in STATISTICS], dtype=np.float32)
