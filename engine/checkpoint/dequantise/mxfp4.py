"""MXFP4 as ggml lays it out: an exponent of 2 in a byte, then 32 codes of four bits, laid out as in Q4_0.

Source: ggml-quants.c, `dequantize_row_mxfp4`: the values are doubled, the scales halved, so that each is finite. (The
blocks of safetensors, in another order, are read by `engine.checkpoint.mxfp4`.)
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from lockstep.engine.checkpoint.dequantise.bits import Scales
from lockstep.engine.checkpoint.dequantise.legacy import nibbles

_DOUBLED = (0, 1, 2, 3, 4, 6, 8, 12)
_VALUES = (*_DOUBLED, *(-value for value in _DOUBLED))
WIDEST_GAP = max(high - low for low, high in pairwise(_DOUBLED))
_BIAS = 128


def codes(blocks: Tensor) -> Tensor:
    """32 elements a block, twice what they mean."""
    values = torch.tensor(_VALUES, dtype=torch.int8, device=blocks.device)
    chosen = nibbles(blocks[:, 1:])
    return values.index_select(0, chosen.view(-1).int()).view(chosen.shape)


def scales(blocks: Tensor) -> Scales:
    """Half of 2 to the power of the exponent minus 127."""
    exponents = blocks[:, :1].int() - _BIAS
    return torch.ldexp(torch.ones_like(exponents, dtype=torch.float32), exponents), None
