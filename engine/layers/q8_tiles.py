"""A tensor of Q8_0 blocks as tiles of rows, in the order in which torch makes them float32 the fastest.

A Q8_0 block is a float16 scale and 32 int8 (ggml-common.h, `block_q8_0`). Here codes and scales lie apart, and the rows
of a tile lie next to each other, so that conversion and scaling run along them; not a bit is added, lost or rounded.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

import torch
from torch import Tensor

from lockstep.engine.checkpoint.dequantise.legacy import q8_0_codes
from lockstep.engine.checkpoint.gguf.source import Blocks

BLOCK = 32
#: Elements of a tile, about: made float32 it stays in the cache, and a call costs less than its work.
TILE = 1 << 20
#: Up to so many tokens a sum of a block is scaled when it is made, above it the tile is, before it is multiplied.
FEW = 4


@dataclass(frozen=True, slots=True)
class Q8Tiles:
    """[rows, columns]: `codes` int8 [tiles, blocks of a row, 32, rows of a tile], `scales` float16 without the 32. Rows
    that fill up the last tile are zero."""

    codes: Tensor
    scales: Tensor
    rows: int

    @classmethod
    def of(cls, blocks: Blocks) -> Q8Tiles:
        """Take over whole blocks."""
        rows, blocks_of_a_row = len(blocks.raw), blocks.columns.size // BLOCK
        size = ceil(rows / ceil(rows * blocks.columns.size / TILE))
        tiles = ceil(rows / size)
        codes = torch.zeros(tiles, blocks_of_a_row, BLOCK, size, dtype=torch.int8)
        scales = torch.zeros(tiles, blocks_of_a_row, size, dtype=torch.float16)
        for index, raw in enumerate(blocks.raw.split(size)):
            stored, shape = raw.view(-1, BLOCK + 2), (len(raw), blocks_of_a_row)
            codes[index, :, :, : len(raw)] = q8_0_codes(stored).view(*shape, BLOCK).permute(1, 2, 0)
            scales[index, :, : len(raw)] = stored[:, :2].view(torch.float16).view(shape).T
        return cls(codes, scales, rows)

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.scales.nbytes

    def values(self, rows: slice | Tensor = slice(None)) -> Tensor:
        """All rows or some, float32: the bits that `dequantise` gives."""
        ids = torch.arange(self.rows)[rows]
        size = self.codes.shape[-1]
        tile, place = ids // size, ids % size
        codes = self.codes[tile, :, :, place]  # [n, blocks, 32]
        return codes.float().mul_(self.scales[tile, :, place].float().unsqueeze(-1)).flatten(1)

    @property
    def tile(self) -> tuple[int, int]:
        """Columns and rows of a tile: what `product` makes dense at a time."""
        return self.codes.shape[1] * BLOCK, self.codes.shape[-1]

    def product(self, x: Tensor, out: Tensor, scratch: Tensor) -> None:
        """x [T, columns] times the matrix's transpose into `out` [T, rows]: a sum of float32 products of the exact
        values as any other, in an order of its own. `scratch` is of the shape of a tile."""
        tiles, blocks, _, size = self.codes.shape
        dense = scratch.view(blocks, BLOCK, size)
        by_block = x.view(-1, blocks, BLOCK).transpose(0, 1)  # [blocks, T, 32]
        for index, target in zip(range(tiles), out.split(size, -1), strict=True):
            dense.copy_(self.codes[index])
            scales = self.scales[index].float().unsqueeze(1)
            multiply = _few if len(x) <= FEW else _many
            target.copy_(multiply(by_block, dense, scales)[:, : target.shape[-1]])


def _few(x: Tensor, codes: Tensor, scales: Tensor) -> Tensor:
    """x [blocks, T, 32], codes [blocks, 32, rows], scales [blocks, 1, rows] -> [T, rows]."""
    return torch.bmm(x, codes).mul_(scales).sum(0)


def _many(x: Tensor, codes: Tensor, scales: Tensor) -> Tensor:
    return x.transpose(0, 1).flatten(1) @ codes.mul_(scales).flatten(0, 1)
