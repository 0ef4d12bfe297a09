"""A tensor of Q8_0 blocks as groups of rows, in the order in which torch multiplies them the fastest.

A Q8_0 block is a float16 scale and 32 int8 (ggml-common.h, `block_q8_0`). Here codes and scales lie apart, and the rows
of a group lie next to each other, so that products run along them; not a bit is added, lost or rounded.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property
from math import ceil

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lockstep.engine.checkpoint.dequantise.legacy import q8_0_codes
from lockstep.engine.checkpoint.gguf.source import Blocks
from lockstep.engine.compiled import kernels, on_threads, runs
from lockstep.engine.text import first_line

BLOCK = 32
#: Rows of a group at most: two lines of a processor's cache.
GROUP = 128
#: Elements, about, that are made float32 at a time: they stay in the cache, and a call costs less than its work.
TILE = 1 << 20
#: Up to so many tokens a kernel multiplies codes; above it they are made float32 and scaled before the product.
FEW = 6
#: Elements of a matrix that is worth loading the kernel, and those that a thread is worth.
WORTH = 1 << 16
_KERNEL = "lockstep.engine.layers.q8_kernels"


@dataclass(frozen=True)
class Q8Tiles:
    """[rows, columns]: `codes` int8 [groups, columns, rows of a group], `scales` float16 [groups, blocks of a row, rows
    of a group]. Rows that fill up the last group are zero."""

    codes: Tensor
    scales: Tensor
    rows: int

    @classmethod
    def of(cls, blocks: Blocks) -> Q8Tiles:
        """Take over whole blocks."""
        rows, columns = len(blocks.raw), blocks.columns.size
        size = ceil(rows / ceil(rows / GROUP))
        groups = ceil(rows / size)
        codes = torch.zeros(groups, columns, size, dtype=torch.int8)
        scales = torch.zeros(groups, columns // BLOCK, size, dtype=torch.float16)
        for index, raw in enumerate(blocks.raw.split(size)):
            stored = raw.view(-1, BLOCK + 2)
            codes[index, :, : len(raw)] = q8_0_codes(stored).reshape(len(raw), columns).T
            scales[index, :, : len(raw)] = stored[:, :2].view(torch.float16).view(len(raw), -1).T
        return cls(codes, scales, rows)

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.scales.nbytes

    def values(self, rows: slice | Tensor = slice(None)) -> Tensor:
        """All rows or some, float32: the bits that `dequantise` gives."""
        ids = torch.arange(self.rows)[rows]
        size = self.scales.shape[-1]
        group, place = ids // size, ids % size
        codes = self.codes[group, :, place].float().unflatten(-1, (-1, BLOCK))  # [n, blocks, 32]
        found: Tensor = codes.mul_(self.scales[group, :, place].float().unsqueeze(-1)).flatten(1)
        return found

    @property
    def tile(self) -> tuple[int, int]:
        """Columns and rows of what `product` makes dense at a time."""
        return self.codes.shape[1], self._at_once * self.scales.shape[-1]

    @property
    def _at_once(self) -> int:
        """Groups of about `TILE` elements."""
        return max(1, min(len(self.codes), TILE // (self.codes.shape[1] * self.scales.shape[-1])))

    def product(
        self, x: Tensor, out: Tensor, first: int, scratch: Callable[[tuple[int, int]], Tensor]
    ) -> None:
        """x [T, columns] times the matrix's transpose into columns `first` to `first + rows` of `out`: a sum of float32
        products of the exact values as any other, in an order of its own. `scratch` gives memory of a shape."""
        worth = x.shape[0] <= FEW and self.codes.numel() >= WORTH and refusal() is None
        if worth and self._by_kernel(x, out, first):
            return  # else a sum of codes may be too large where that of values is not
        size, step = self.scales.shape[-1], self._at_once
        dense, target = scratch(self.tile), out[:, first : first + self.rows]
        for group in range(0, len(self.codes), step):
            some = target[:, group * size : (group + step) * size]
            some.copy_((x @ self._dense(slice(group, group + step), dense))[:, : some.shape[1]])

    def _by_kernel(self, x: Tensor, out: Tensor, first: int) -> bool:
        """The same by the sum of each block's codes; whether all of it is finite."""
        by, found, (codes, scales) = x.detach().numpy(), out.numpy(), self._arrays
        some = runs(len(codes), WORTH // (codes.shape[1] * codes.shape[2]))
        finite = [False] * len(some)

        def multiply(number: int) -> None:
            start, stop = some[number].start, some[number].stop
            finite[number] = kernels(_KERNEL).products(
                codes, scales, start, stop, by, found, first, first + self.rows
            )

        on_threads(multiply, len(some))
        return all(finite)

    @cached_property
    def _arrays(self) -> tuple[NDArray[np.int8], NDArray[np.int16]]:
        """Codes, and the bits of scales."""
        return self.codes.numpy(), self.scales.view(torch.int16).numpy()

    def _dense(self, groups: slice, scratch: Tensor) -> Tensor:
        """[columns, rows] in `scratch`."""
        codes, scales = self.codes[groups], self.scales[groups].float()
        count, columns, size = codes.shape
        dense = scratch.flatten()[: codes.numel()].view(columns, count, size)
        dense.copy_(codes.transpose(0, 1))
        dense.view(-1, BLOCK, count, size).mul_(scales.transpose(0, 1).unsqueeze(1))
        return dense.flatten(1)


@cache
def refusal() -> str | None:
    """Why the kernel cannot be used; None where it has passed its test: the product of the values."""
    codes = torch.arange(-128, 128).repeat(3).view(3, 2 * BLOCK, 4).to(torch.int8)
    scales = torch.tensor([0.5, -2.0, 6e-8, 0.0, 65504.0, 1e-3]).repeat(4).view(3, 2, 4).half()
    tiles, x = Q8Tiles(codes, scales, 12), torch.arange(4.0 * BLOCK).view(2, -1) - 50
    found = torch.empty(2, 12)
    try:
        tiles._by_kernel(x, found, 0)
    except Exception as error:  # whatever importing or compiling throws
        return first_line("no products of Q8_0 blocks here", error)
    by, values = x.double(), tiles.values().double().T
    wrong = (found - by @ values).abs() > 1e-5 * (by.abs() @ values.abs())
    return "no products of Q8_0 blocks here: the kernel is wrong on this CPU" if wrong.any() else None
