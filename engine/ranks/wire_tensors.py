"""Tensors as `WireArray`s and back, on a rank."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from lockstep.engine.ranks.wire import WireArray


def dtype_name(x: Tensor) -> str:
    """ "float32", "bfloat16", …"""
    return str(x.dtype).removeprefix("torch.")


def to_wire(x: Tensor) -> WireArray:
    """The tensor's values, copied to the host's memory; bfloat16 as its 16 bits."""
    dtype = dtype_name(x)
    x = x.detach().cpu().contiguous()
    return WireArray.of((x.view(torch.int16) if dtype == "bfloat16" else x).numpy(), dtype)


def from_wire(value: WireArray) -> Tensor:
    """A tensor of its own: what arrives is read-only."""
    return torch.from_numpy(np.array(value.numbers))
