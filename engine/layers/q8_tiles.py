"""A tensor of Q8_0 blocks as groups of rows, in the order in which torch multiplies them the fastest.

A Q8_0 block is a float16 scale and 32 int8 (ggml-common.h, `block_q8_0`). Here codes and scales lie apart, and the rows
of a group lie next to each other, so that products run along them; not a bit is added, lost or rounded.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from math import ceil, isfinite
from typing import Any

import torch
from torch import Tensor

from lockstep.engine.checkpoint.dequantise.legacy import q8_0_codes
from lockstep.engine.checkpoint.gguf.source import Blocks

BLOCK = 32
#: Rows of a group at most: with what stands behind them 128 bytes of codes, two lines of a processor's cache.
GROUP = 120
#: Elements, about, that are made float32 at a time: they stay in the cache, and a call costs less than its work.
TILE = 1 << 20
#: Elements, about, whose codes are summed at a time: nothing of their size is made, and calls take time.
SUMMED = 1 << 23
#: Up to so many tokens codes are summed as they are; above it they are made float32 and scaled before the product.
FEW = 6
#: Codes are kept as unsigned bytes, this much above their values, as torch's sum of bytes reads them; behind each row
#: of bytes that has a factor and an offset, float32.
OFFSET = 128
_FACTOR_AND_OFFSET = 8
#: FBGEMM's kernel for bags of embeddings: of rows of bytes the sum, each times a float32 of its own.
_SUM: Any = getattr(torch.ops.quantized, "embedding_bag_byte_rowwise_offsets", None)
_HAS_FBGEMM = _SUM is not None and "fbgemm" in torch.backends.quantized.supported_engines


@dataclass(frozen=True, slots=True)
class Q8Tiles:
    """[rows, columns]: `codes` uint8 [groups, columns, rows of a group + 8], `scales` float16 [groups, blocks of a row,
    rows of a group]. Rows that fill up the last group are zero."""

    codes: Tensor
    scales: Tensor
    rows: int

    @classmethod
    def of(cls, blocks: Blocks) -> Q8Tiles:
        """Take over whole blocks."""
        rows, columns = len(blocks.raw), blocks.columns.size
        size = ceil(rows / ceil(rows / GROUP))
        groups = ceil(rows / size)
        codes = torch.full((groups, columns, size + _FACTOR_AND_OFFSET), OFFSET, dtype=torch.uint8)
        codes[..., size:] = torch.tensor([1.0, -OFFSET]).view(torch.uint8)
        scales = torch.zeros(groups, columns // BLOCK, size, dtype=torch.float16)
        for index, raw in enumerate(blocks.raw.split(size)):
            stored = raw.view(-1, BLOCK + 2)
            signed = q8_0_codes(stored).reshape(len(raw), columns).T
            codes[index, :, : len(raw)] = signed.view(torch.uint8) ^ OFFSET  # the bits of a code + 128
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
        codes = self.codes[group, :, place].float().sub_(OFFSET).unflatten(-1, (-1, BLOCK))  # [n, blocks, 32]
        found: Tensor = codes.mul_(self.scales[group, :, place].float().unsqueeze(-1)).flatten(1)
        return found

    @property
    def tile(self) -> tuple[int, int]:
        """Columns and rows of what `product` makes dense at a time."""
        return self.codes.shape[1], self._at_once(TILE) * self.scales.shape[-1]

    def _at_once(self, elements: int) -> int:
        """Groups of about so many elements."""
        return max(1, min(len(self.codes), elements // (self.codes.shape[1] * self.scales.shape[-1])))

    def product(self, x: Tensor, out: Tensor, scratch: Tensor) -> None:
        """x [T, columns] times the matrix's transpose into `out` [T, rows]: a sum of float32 products of the exact
        values as any other, in an order of its own. `scratch` is of the shape of a tile."""
        if len(x) <= FEW and _HAS_FBGEMM:
            self._fill(out, SUMMED, partial(self._summed, x))
            if isfinite(out.sum().item()):
                return  # else a sum of bytes may be too large where that of codes is not
        self._fill(out, TILE, lambda groups: x @ self._dense(groups, scratch))

    def _fill(self, out: Tensor, elements: int, product: Callable[[slice], Tensor]) -> None:
        """Put the product [T, rows] with some groups at a time into `out`."""
        size, step = self.scales.shape[-1], self._at_once(elements)
        for first in range(0, len(self.codes), step):
            target = out[:, first * size : (first + step) * size]
            target.copy_(product(slice(first, first + step))[:, : target.shape[1]])

    def _summed(self, x: Tensor, groups: slice) -> Tensor:
        """[T, rows] by the sum of each block's codes."""
        codes, scales = self.codes[groups], self.scales[groups].float().unsqueeze(1)
        rows, bags = _bags(len(codes), *x.shape)
        by = x.reshape(1, -1).expand(len(codes), -1).flatten()
        sums: Tensor = _SUM(codes.flatten(0, 1), rows, bags, False, 0, False, by, None, True)
        by_group = sums.view(len(codes), len(x), *scales.shape[2:]).mul_(scales).sum(2)
        return by_group.transpose(0, 1).flatten(1)

    def _dense(self, groups: slice, scratch: Tensor) -> Tensor:
        """[columns, rows] in `scratch`."""
        codes, scales = self.codes[groups, :, : self.scales.shape[-1]], self.scales[groups].float()
        count, columns, size = codes.shape
        dense = scratch.flatten()[: codes.numel()].view(columns, count, size)
        dense.copy_(codes.transpose(0, 1)).sub_(OFFSET)
        dense.view(-1, BLOCK, count, size).mul_(scales.transpose(0, 1).unsqueeze(1))
        return dense.flatten(1)


@lru_cache(256)
def _bags(groups: int, tokens: int, columns: int) -> tuple[Tensor, Tensor]:
    """The rows of the codes of some groups, those of each once a token, and where the blocks begin among them."""
    rows = torch.arange(groups * columns, dtype=torch.int32).view(groups, 1, columns)
    rows = rows.expand(groups, tokens, columns).flatten()
    return rows, torch.arange(0, len(rows) + 1, BLOCK, dtype=torch.int32)
