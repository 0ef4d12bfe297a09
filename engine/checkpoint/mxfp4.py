"""Experts in MXFP4 blocks, as gpt-oss's safetensors hold them. Imports numpy, and torch where a tensor is read.

A matrix [rows, columns] of each expert is two tensors: `NAME_blocks` [experts, rows, columns / 32, 16], two values a
byte, the first in the low four bits, and `NAME_scales` [experts, rows, columns / 32], an exponent of 2 each, plus 127
(OCP Microscaling Formats 1.0: E2M1 elements, E8M0 scales). Every value is exact in bfloat16.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from lockstep.engine.checkpoint.source import TensorInfo
from lockstep.engine.errors import CheckpointError
from lockstep.engine.parallel.shards import Span
from lockstep.engine.text import printable

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray

    #: Of every dimension of a tensor a span.
    ReadPart = Callable[[str, Sequence[Span]], torch.Tensor]

ENCODING = "MXFP4"
BLOCKS, SCALES = "_blocks", "_scales"
#: Values that share a scale, and bytes that hold them.
GROUP, GROUP_BYTES = 32, 16
#: Twice what the low three bits mean, so that every scale is finite; the fourth is the sign.
_DOUBLED = (0.0, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0)
_BIAS = 128


@dataclass(frozen=True, slots=True)
class PackedStack:
    """The two tensors of all experts' matrices, which have the same number of experts, rows and groups."""

    blocks: TensorInfo
    scales: TensorInfo

    @property
    def info(self) -> TensorInfo:
        """Of their values: [experts, rows, columns]."""
        experts, rows, groups = self.scales.shape
        size = self.blocks.nbytes + self.scales.nbytes
        return TensorInfo((experts, rows, groups * GROUP), "float32", self.blocks.file, ENCODING, size)


def packed_stacks(infos: Mapping[str, TensorInfo]) -> dict[str, PackedStack]:
    """Name of the blocks -> the stack, of all that the checkpoint has. CheckpointError where blocks and scales do not
    fit together."""
    found = {}
    for name, scales in infos.items():
        if not name.endswith(SCALES):
            continue
        named = name.removesuffix(SCALES) + BLOCKS
        if (blocks := infos.get(named)) is None:
            raise CheckpointError(
                f"{scales.file}: {printable(name)} are the scales of MXFP4 blocks, but there is no {printable(named)}"
            )
        fitting = len(scales.shape) == 3 and blocks.shape == (*scales.shape, GROUP_BYTES)
        if not fitting or {blocks.dtype, scales.dtype} != {"uint8"}:
            raise CheckpointError(
                f"{blocks.file}: {printable(named)} is {blocks.dtype} {list(blocks.shape)} and "
                f"{printable(name)} {scales.dtype} {list(scales.shape)}: expected uint8 [experts, rows, groups, "
                f"{GROUP_BYTES}] and uint8 [experts, rows, groups]"
            )
        found[named] = PackedStack(blocks, scales)
    return found


@dataclass(frozen=True, slots=True, eq=False)
class PackedRows:
    """Rows of one matrix as they are stored, [rows, groups, 16] and [rows, groups]; `columns` are the values that were
    asked for, counted from the first that is there."""

    blocks: torch.Tensor
    scales: torch.Tensor
    columns: Span

    @classmethod
    def read(cls, read_part: ReadPart, name: str, matrix: int, rows: Span, columns: Span) -> PackedRows:
        """Of the expert `matrix`; only the groups that hold the columns are read."""
        first, stop = columns.start // GROUP, -(-columns.stop // GROUP)
        taken = (Span(matrix, matrix + 1), rows, Span(first, stop))
        blocks = read_part(name, (*taken, Span(0, GROUP_BYTES)))
        scales = read_part(name.removesuffix(BLOCKS) + SCALES, taken)
        own = Span(columns.start - first * GROUP, columns.stop - first * GROUP)
        return cls(blocks[0], scales[0], own)

    def values(self, first: int = 0, step: int = 1) -> torch.Tensor:
        """Every `step`-th row from `first` on, float32 and contiguous."""
        import torch

        some = (part[first::step].numpy() for part in (self.blocks, self.scales))
        return torch.from_numpy(unpacked(*some)[:, self.columns.start : self.columns.stop]).contiguous()


def unpacked(blocks: NDArray[np.uint8], scales: NDArray[np.uint8]) -> NDArray[np.float32]:
    """[..., groups, 16] and [..., groups] -> the values [..., groups * 32], as transformers gives them."""
    import numpy as np

    pairs, powers = _tables()
    values = pairs.take(blocks).view(np.float32)  # both values of a byte at once
    with np.errstate(over="ignore"):  # the largest scale, which no real file has
        values *= powers.take(scales)[..., None]
    return values.reshape(*scales.shape[:-1], scales.shape[-1] * GROUP)


@cache
def _tables() -> tuple[NDArray[np.uint64], NDArray[np.float32]]:
    """Of each byte its two values (float32), doubled, seen as one number of eight bytes; of each scale half its power
    of 2."""
    import numpy as np

    values = np.array([*_DOUBLED, *(-value for value in _DOUBLED)], np.float32)
    codes = np.arange(256)
    pairs = np.stack((values[codes & 15], values[codes >> 4]), -1)
    return pairs.view(np.uint64)[:, 0], np.ldexp(np.float32(1.0), codes - _BIAS)
