"""Torch tensors as the arrays and parts of statistics that a session holds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lockstep.engine.taps.measure import measured_whole
from lockstep.engine.taps.parts import unmask


@dataclass(frozen=True, slots=True)
class NewestRows:
    """The newest `rows` [heads, n, K] of a tensor that was never held whole, [heads, `of`, K], and the parts [1, 8] of
    the whole (`engine.taps.parts`), the infinities of the mask not counted."""

    rows: Tensor
    of: int
    parts: Tensor


#: A tensor at a tap, or what is left of it.
Seen = Tensor | NewestRows


def array(tensor: Tensor) -> NDArray[Any]:
    """A copy in numpy, exact: bfloat16 as its bits in uint16 (numpy has no such type)."""
    tensor = tensor.detach().to("cpu", copy=True).contiguous()
    if tensor.dtype is torch.bfloat16:
        return tensor.view(torch.uint16).numpy()
    return tensor.numpy()


def dtype_name(tensor: Tensor) -> str:
    """`float32`, `bfloat16`, …: the session's name of the tensor's dtype."""
    return str(tensor.dtype).removeprefix("torch.")


def measured_parts(tensor: Tensor, *, masked: bool = False) -> NDArray[np.float64]:
    """The parts [1, 8] (`engine.taps.parts`) of a tensor. `masked`: its -inf are the mask's, not counted."""
    parts = measured_whole(tensor)[0].cpu().numpy()
    return unmask(parts, [int((tensor == -torch.inf).sum())]) if masked else parts
