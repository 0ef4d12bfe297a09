"""Four bits that choose one of sixteen unevenly spaced values.

Source: ggml-quants.c, `dequantize_row_iq4_nl` and `dequantize_row_iq4_xs`; the values are ggml-common.h's.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from lockstep.engine.checkpoint.dequantise.bits import Scales, half
from lockstep.engine.checkpoint.dequantise.legacy import nibbles

_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
#: The largest distance between two of them.
WIDEST_GAP = max(high - low for low, high in pairwise(_VALUES))


def nl_codes(blocks: Tensor) -> Tensor:
    """32 elements a block, laid out as in Q4_0."""
    return _chosen(blocks[:, 2:])


def xs_codes(blocks: Tensor) -> Tensor:
    """256 elements a block: eight groups, each laid out as in Q4_0."""
    return _chosen(blocks[:, 8:].reshape(-1, 16)).view(-1, 8, 32)


def xs_scales(blocks: Tensor) -> Scales:
    """Eight integers of six bits, minus 32: the two high bits of each in two bytes, the four low ones in four."""
    places = torch.arange(4, dtype=torch.uint8, device=blocks.device)
    high = (blocks[:, 2:4, None] >> 2 * places).flatten(1) << 4 & 48
    low = (blocks[:, 4:8, None] >> 4 * places[:2]).flatten(1) & 15
    return half(blocks, 0) * (low | high).sub_(32).view(torch.int8), None


def _chosen(packed: Tensor) -> Tensor:
    values = torch.tensor(_VALUES, dtype=torch.int8, device=packed.device)
    chosen = nibbles(packed)
    return values.index_select(0, chosen.view(-1).int()).view(chosen.shape)
