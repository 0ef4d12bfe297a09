"""What is measured as one: a tensor that has passed a tap, or a tile of one, where it lies."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lockstep.engine.taps.parts import ODD

#: As a factor of 64 signed bits.
SIGNED_ODD = ODD - (1 << 64)
#: How the elements of a piece are found.
FLAT, TILE, PREFIX, PAGED, ROWS = range(5)
#: Elements of a piece: the GPU's kernel counts them in 32 bits.
_MOST = 1 << 30
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits_of(x: Tensor) -> Tensor:
    """The bits of each element as a whole number, [..., m] -> [..., m]."""
    return x.contiguous().view(_BITS[x.element_size()])


@dataclass(frozen=True, slots=True)
class Measurand:
    """A tensor that is measured as one: all of a tap's, or a tile [h, t, keys] of one; contiguous, or columns of some
    rows, [n, m] that lie `pitch` elements from each other.

    The place of an element in its tensor, by which the checksum weighs it, is `base` + head * `apart` + row * `stride`
    + key. `rows` and `keys` are the tile's; 0: its places follow one another."""

    x: Tensor
    base: int = 0
    rows: int = 0
    keys: int = 0
    stride: int = 0
    apart: int = 0
    pitch: int = 0

    @property
    def nbytes(self) -> int:
        """That it keeps from other use."""
        return self.x.nbytes

    @property
    def mode(self) -> int:
        """How its elements are found."""
        if self.pitch:
            return ROWS
        return TILE if self.keys else FLAT

    @property
    def fields(self) -> tuple[int, ...]:
        """Its row of the kernel's table."""
        if self.pitch:
            return self.x.data_ptr(), 0, 0, self.x.shape[1], self.pitch, 0, self.x.numel()
        return self.x.data_ptr(), self.base, self.rows, self.keys, self.stride, self.apart, self.x.numel()


@dataclass(frozen=True, slots=True)
class Growing:
    """What one sequence has `width` elements of a key of: the first `length` [1] int32 * `width` elements of x; or,
    with a `table` of blocks of `page` rows, rows [width] of a pool x. At most `most` keys."""

    x: Tensor
    length: Tensor
    width: int
    most: int
    table: Tensor | None = None
    page: int = 0

    @property
    def nbytes(self) -> int:
        """That it keeps from other use: the pool is there anyhow."""
        return self.x.nbytes if self.table is None else 0

    @property
    def mode(self) -> int:
        """How its elements are found."""
        return PREFIX if self.table is None else PAGED

    @property
    def fields(self) -> tuple[int, ...]:
        """Its row of the kernel's table."""
        table = 0 if self.table is None else self.table.data_ptr()
        return (
            self.x.data_ptr(), 0, self.page, self.width, table, self.length.data_ptr(), self.most * self.width
        )  # fmt: skip


def pieces_of(x: Tensor) -> list[Measurand]:
    """A tensor of any shape, in pieces that the kernel takes. One that is neither contiguous nor columns of one that
    is, as parts of a packed product are, is copied."""
    if x.dim() == 2 and x.stride(1) == 1 and not x.is_contiguous() and x.numel() <= _MOST:
        return [Measurand(x, pitch=x.stride(0))]
    x = x.contiguous()
    if x.numel() <= _MOST:
        return [Measurand(x)]
    return [Measurand(part, number * _MOST) for number, part in enumerate(x.view(-1).split(_MOST))]
