"""What is measured as one: a tensor that has passed a tap, or a tile of one, where it lies."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lockstep.engine.taps.parts import ODD

#: As a factor of 64 signed bits.
SIGNED_ODD = ODD - (1 << 64)
#: How the elements of a piece are found.
FLAT, TILE, PREFIX, PAGED, ROWS = range(5)
#: Elements of a piece: the GPU's kernel counts them in 32 bits.
MOST = 1 << 30
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits_of(x: Tensor) -> Tensor:
    """The bits of each element as a whole number, [..., m] -> [..., m]."""
    return x.contiguous().view(_BITS[x.element_size()])


@dataclass(slots=True)  # frozen ones take three times as long to make, and a step has hundreds
class Measurand:
    """A tensor that is measured as one: all of a tap's, or a tile [h, t, keys] of one; contiguous, or columns of some
    rows, [n, m] that lie `pitch` elements from each other.

    The place of an element in its tensor, by which the checksum weighs it, is `base` + head * `apart` + row * `stride`
    + key. `rows` and `keys` are the tile's; 0: its places follow one another."""

    count: ClassVar[int] = 1
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

    count: ClassVar[int] = 1
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


@dataclass(frozen=True, slots=True, eq=False)
class Runs:
    """Where a tensor has what is each of `count` sequences' own: `table` [n, 4], of each run the sequence, in ascending
    order and of each at least one, the first element, how many there are, and the place of the first among all that the
    sequence has; `elements` in all."""

    count: int
    table: NDArray[np.int64]
    elements: int

    @classmethod
    def of(cls, count: int, table: NDArray[np.int64]) -> Runs:
        """Those of a table."""
        return cls(count, table, int(table[:, 2].sum()))


@dataclass(slots=True)
class PerSequence:
    """What each sequence has of one tensor on a CPU, measured as one each. Taps of a step have their runs in common."""

    x: Tensor
    runs: Runs

    @property
    def count(self) -> int:
        """Sequences."""
        return self.runs.count

    @property
    def nbytes(self) -> int:
        """That are read of it."""
        return self.runs.elements * self.x.itemsize

    def parts(self) -> list[Tensor]:
        """A copy of what each has."""
        flat = self.x.reshape(-1)
        found: list[list[Tensor]] = [[] for _ in range(self.count)]
        for sequence, first, elements, _ in self.runs.table.tolist():
            found[sequence].append(flat[first : first + elements])
        return [torch.cat(runs) for runs in found]


Piece = Measurand | Growing | PerSequence


def pieces_of(x: Tensor) -> list[Measurand]:
    """A tensor of any shape, in pieces that the kernel takes. One that is neither contiguous nor columns of one that
    is, as parts of a packed product are, is copied."""
    if x.numel() <= MOST:
        if x.is_contiguous():
            return [Measurand(x)]
        if x.dim() == 2 and x.stride(1) == 1:
            return [Measurand(x, pitch=x.stride(0))]
        return [Measurand(x.contiguous())]
    x = x.contiguous()
    return [Measurand(part, number * MOST) for number, part in enumerate(x.view(-1).split(MOST))]
