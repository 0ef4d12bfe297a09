"""The types of 32 elements a block: one scale, in `_1` types an offset too, both float16 and first in the block.

Element i and element i + 16 share a byte. Source: ggml-quants.c, `dequantize_row_q4_0` to `dequantize_row_q8_0`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lockstep.engine.checkpoint.dequantise.bits import Scales, half


def scale(blocks: Tensor) -> Scales:
    """The float16 that begins the block."""
    return half(blocks, 0), None


def scale_and_offset(blocks: Tensor) -> Scales:
    """The two float16 that begin the block."""
    return half(blocks, 0), half(blocks, 2)


def nibbles(packed: Tensor) -> Tensor:
    """[n, 16] bytes -> [n, 1, 32]: all low halves, then all high ones."""
    return torch.cat((packed & 15, packed >> 4), 1).unsqueeze(1)


def q8_0_codes(blocks: Tensor) -> Tensor:
    """int8 as they are."""
    return blocks[:, 2:].view(torch.int8).unsqueeze(1)


def q4_0_codes(blocks: Tensor) -> Tensor:
    """Four bits, minus 8."""
    return nibbles(blocks[:, 2:]).sub_(8).view(torch.int8)


def q4_1_codes(blocks: Tensor) -> Tensor:
    """Four bits."""
    return nibbles(blocks[:, 4:])


def q5_0_codes(blocks: Tensor) -> Tensor:
    """Five bits, minus 16."""
    return _five_bits(blocks[:, 2:]).sub_(16).view(torch.int8)


def q5_1_codes(blocks: Tensor) -> Tensor:
    """Five bits."""
    return _five_bits(blocks[:, 4:])


def _five_bits(packed: Tensor) -> Tensor:
    """Four bytes whose bit i is the fifth bit of element i, then the nibbles: [n, 20] -> [n, 1, 32]."""
    places = torch.arange(8, dtype=torch.uint8, device=packed.device)
    fifth = (packed[:, :4, None] >> places).bitwise_and_(1).flatten(1).unsqueeze(1)
    return nibbles(packed[:, 4:]).bitwise_or_(fifth << 4)
