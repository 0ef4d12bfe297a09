"""Fields of blocks: bytes, half-precision numbers, bits spread over words. Blocks are uint8 [n, bytes per block]."""

from __future__ import annotations

import torch
from torch import Tensor

#: Scale and offset of each group, float32 [n, groups]; the offset None where a type has none.
Scales = tuple[Tensor, Tensor | None]


def half(blocks: Tensor, at: int) -> Tensor:
    """The float16 at byte `at` of each block, as float32 [n, 1]."""
    return blocks[:, at : at + 2].view(torch.float16).float()


def words(blocks: Tensor, start: int, stop: int, dtype: torch.dtype = torch.int64) -> Tensor:
    """Bytes `start` to `stop` as [n, words]: so eight bytes (int32: four) are masked and shifted at a time."""
    # Not `contiguous`: to that a single block is contiguous, whatever its stride.
    return blocks[:, start:stop].clone(memory_format=torch.contiguous_format).view(dtype)


def every_byte(mask: int, nbytes: int = 8) -> int:
    """A word of `nbytes` bytes that are all `mask` (below 128)."""
    return mask * int.from_bytes(b"\1" * nbytes, "little")


def planes(packed: Tensor, run: int, shifts: tuple[int, ...], mask: int) -> Tensor:
    """Unpack fields of bits: of every `run` words all fields of the first shift, then all of the second, and so on.

    int64 [n, words] -> [n, words / run, shifts, run], each byte `byte >> shift & mask`. A negative shift is to
    the left; what a shift brings over from the neighbouring byte must lie outside the mask.
    """
    runs = packed.unflatten(1, (-1, run))
    fields = packed.new_empty((*runs.shape[:2], len(shifts), run))
    for index, shift in enumerate(shifts):
        move = torch.bitwise_right_shift if shift >= 0 else torch.bitwise_left_shift
        move(runs, abs(shift), out=fields[:, :, index])
    return fields.bitwise_and_(every_byte(mask))


def as_bytes(unpacked: Tensor, group: int) -> Tensor:
    """The words of a block to uint8 [n, groups, group]."""
    return unpacked.view(torch.uint8).view(unpacked.shape[0], -1, group)
