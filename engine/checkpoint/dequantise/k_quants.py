"""The K types: 256 elements a block, in groups of 16 or 32 whose scales are small integers times a float16.

Source: ggml-quants.c, `dequantize_row_q2_K` to `dequantize_row_q6_K`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lockstep.engine.checkpoint.dequantise.bits import Scales, as_bytes, every_byte, half, planes, words


def q2_codes(blocks: Tensor) -> Tensor:
    """Two bits; a byte holds elements i, i + 32, i + 64 and i + 96 of half a block."""
    return as_bytes(planes(words(blocks, 16, 80), 4, (0, 2, 4, 6), 3), 16)


def q2_scales(blocks: Tensor) -> Scales:
    """Sixteen bytes: four bits of scale, above them four of offset."""
    packed = blocks[:, :16]
    return half(blocks, 80) * (packed & 15), -(half(blocks, 82) * (packed >> 4))


def q3_codes(blocks: Tensor) -> Tensor:
    """Two low bits as in Q2_K, a third from the mask (bit g of byte i: element 32 g + i), minus 4."""
    low = planes(words(blocks, 32, 96), 4, (0, 2, 4, 6), 3).view(-1, 8, 4)
    high = planes(words(blocks, 0, 32), 4, (-2, -1, 0, 1, 2, 3, 4, 5), 4).view(-1, 8, 4)
    return as_bytes(low.bitwise_or_(high), 16).sub_(4).view(torch.int8)


def q3_scales(blocks: Tensor) -> Scales:
    """Sixteen integers of six bits, minus 32: eight bytes with four low bits of two, then four with two high bits
    of four."""
    low, high = blocks[:, 96:104], blocks[:, 104:108]
    fours = torch.cat((low & 15, low >> 4), 1)
    twos = torch.cat((high << 4, high << 2, high, high >> 2), 1) & 48
    return half(blocks, 108) * (fours | twos).sub_(32).view(torch.int8), None


def q4_codes(blocks: Tensor) -> Tensor:
    """Four bits; a byte holds elements i and i + 32 of a quarter of a block."""
    return as_bytes(planes(words(blocks, 16, 144), 4, (0, 4), 15), 32)


def q4_scales(blocks: Tensor) -> Scales:
    """Eight scales and eight offsets of six bits in twelve bytes (Q5_K's too).

    Bytes 0-3: scales 0-3 and, above them, two high bits of scales 4-7; bytes 4-7 the same of the offsets; bytes
    8-11: four low bits of scales 4-7, above them those of offsets 4-7.
    """
    first, second, third = words(blocks, 4, 16, torch.int32).unbind(1)
    six, four, two = (every_byte(mask, 4) for mask in (63, 15, 48))
    scales = torch.stack((first & six, third & four | first >> 2 & two), 1).view(torch.uint8)
    offsets = torch.stack((second & six, third >> 4 & four | second >> 2 & two), 1).view(torch.uint8)
    return half(blocks, 0) * scales, -(half(blocks, 2) * offsets)


def q5_codes(blocks: Tensor) -> Tensor:
    """Four low bits as in Q4_K, a fifth from 32 bytes before them (bit g of byte i: element 32 g + i)."""
    low = planes(words(blocks, 48, 176), 4, (0, 4), 15).view(-1, 8, 4)
    high = planes(words(blocks, 16, 48), 4, (-4, -3, -2, -1, 0, 1, 2, 3), 16).view(-1, 8, 4)
    return as_bytes(low.bitwise_or_(high), 32)


def q6_codes(blocks: Tensor) -> Tensor:
    """Four low bits (a byte: elements i and i + 64 of half a block), two high ones (a byte: elements i, i + 32,
    i + 64, i + 96), minus 32."""
    low = planes(words(blocks, 0, 128), 8, (0, 4), 15).view(-1, 8, 4)
    high = planes(words(blocks, 128, 192), 4, (-4, -2, 0, 2), 48).view(-1, 8, 4)
    return as_bytes(low.bitwise_or_(high), 16).sub_(32).view(torch.int8)


def q6_scales(blocks: Tensor) -> Scales:
    """Sixteen int8."""
    return half(blocks, 208) * blocks[:, 192:208].view(torch.int8), None
