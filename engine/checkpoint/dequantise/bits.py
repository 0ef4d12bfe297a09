"""Fields of blocks: bytes, half-precision numbers, bits spread over words. Blocks are uint8 [n, bytes per block]."""

from __future__ import annotations

import torch
from torch import Tensor

#: Scale and offset of each group, float32 [n, groups]; the offset None where a type has none.
Scales = tuple[Tensor, Tensor | None]


def half(blocks: Tensor, at: int) -> Tensor:
    """The float16 at byte `at` of each block, as float32 [n, 1]."""
    return blocks[:, at : at + 2].view(torch.float16).float()


def words(blocks: Tensor, start: int, stop: int) -> Tensor:
    """Bytes `start` to `stop` as int64 [n, words]: eight bytes are masked and shifted at a time."""
    return blocks[:, start:stop].contiguous().view(torch.int64)


def every_byte(mask: int) -> int:
    """A word whose eight bytes are all `mask` (below 128)."""
    return mask * 0x0101010101010101


def planes(packed: Tensor, run: int, shifts: tuple[int, ...], mask: int) -> Tensor:
    """Unpack fields of bits: of every `run` words all fields of the first shift, then all of the second, and so on.

    int64 [n, words] -> [n, words / run, shifts, run], each byte `byte >> shift & mask`. A negative shift is to
    the left; what a shift brings over from the neighbouring byte must lie outside the mask.
    """
    runs = packed.unflatten(1, (-1, run))
    shifted = [runs >> shift if shift >= 0 else runs << -shift for shift in shifts]
    return torch.stack(shifted, 2).bitwise_and_(every_byte(mask))


def as_bytes(unpacked: Tensor, group: int) -> Tensor:
    """int64 words of a block to uint8 [n, groups, group]."""
    return unpacked.view(torch.uint8).view(unpacked.shape[0], -1, group)
