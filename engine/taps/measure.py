"""Statistics and checksums of tensors, many at a time and without leaving the device.

Rows of equal length are measured together, so a decode step of a 24-layer model costs a handful of
kernels and one copy to the host instead of some for each of 480 taps. Longer rows are measured in pieces that stay
in a processor's cache: what is read six times is fetched once, and nothing as large as a tensor is allocated. A GPU
takes larger ones: there a piece must be worth the launches of its kernels.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache, lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lockstep.engine.taps import cpu_pass
from lockstep.engine.taps.collected import Collected
from lockstep.engine.taps.measurands import SIGNED_ODD, Measurand, bits_of
from lockstep.engine.taps.parts import PARTS, merge

#: Elements of a piece: a MiB of float32, which stays in a processor's cache; of fewer the calls would take longer than
#: the work.
PIECE = 1 << 18
#: The same on a GPU: 32 MiB of float32.
GPU_PIECE = 1 << 23
_COLUMNS = 256  # of the blocks that a checksum is summed in
_SHORT = 2048  # elements of a row that is not worth it


def piece_of(x: Tensor) -> int:
    """Elements of a piece where x is."""
    return GPU_PIECE if x.is_cuda else PIECE


def measure(rows: Tensor) -> Tensor:
    """[n, m] of any float dtype -> [n, len(PARTS)] float64, on the same device (`parts.measured` on a host's arrays).

    Minimum, maximum, sum and 2-norm are over the finite elements (inf, -inf, 0, 0 when there are none).
    """
    return measured_rows(rows)[0]


def measured_rows(rows: Tensor) -> tuple[Tensor, Tensor]:
    """[n, m] -> the parts [n, len(PARTS)] and the checksum [n] of each row; every piece is read from memory once."""
    if cpu_pass.takes(rows):
        parts, sums = cpu_pass.rows(rows)
        return parts, sums * SIGNED_ODD
    (count, length), most = rows.shape, piece_of(rows)
    if rows.numel() <= most:
        return _measured(rows), _places_times(bits_of(rows), 0) * SIGNED_ODD
    if count > 1:
        some = [measured_rows(part) for part in rows.split(max(1, most // length))]
        return torch.cat([parts for parts, _ in some]), torch.cat([sums for _, sums in some])
    found, total = [], torch.zeros(1, dtype=torch.int64, device=rows.device)
    for start in range(0, length, most):
        piece = rows[:, start : start + most]
        found.append(_measured(piece))
        total += _places_times(bits_of(piece), start)
    return merged(torch.stack(found)), total * SIGNED_ODD


def merged(pieces: Tensor) -> Tensor:
    """Parts of pieces [pieces, n, len(PARTS)] -> of the whole [n, len(PARTS)]; `parts.merge` on a device."""
    whole = pieces.sum(0)
    whole[:, 0], whole[:, 1] = pieces[:, :, 0].amin(0), pieces[:, :, 1].amax(0)
    whole[:, 3] = torch.linalg.vector_norm(pieces[:, :, 3], dim=0)
    return whole


def _measured(rows: Tensor) -> Tensor:
    count, length = rows.shape
    if length == 0:  # the logits of a rank that owns none of a small vocabulary
        nothing = [math.inf, -math.inf, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]
        return torch.tensor([nothing] * count, dtype=torch.float64, device=rows.device)
    values = rows if rows.dtype in (torch.float32, torch.float64) else rows.float()
    parts = torch.zeros((len(PARTS), count), dtype=torch.float64, device=rows.device)
    low, high, total, norm, nan, inf, zeros, finite = parts
    wide = values.double()  # once: a sum or a norm that is asked for float64 makes this copy for itself
    torch.sum(wide, 1, out=total)
    # NaN and infinities show in the sum. Asking for it costs a synchronisation on a GPU, so only the CPU takes the
    # short way.
    if rows.device.type == "cpu" and math.isfinite(total.sum().item()):
        low.copy_(values.amin(1))
        high.copy_(values.amax(1))
        finite.fill_(length)
    else:
        low.copy_(values.nan_to_num(math.inf, math.inf, math.inf).amin(1))
        high.copy_(values.nan_to_num(-math.inf, -math.inf, -math.inf).amax(1))
        wide = wide.nan_to_num(0.0, 0.0, 0.0)
        torch.sum(wide, 1, out=total)
        nan.copy_(_counted(torch.ne, values, values))
        inf.copy_(_counted(torch.eq, values.abs(), math.inf))
        torch.sub(length - nan, inf, out=finite)
    torch.linalg.vector_norm(wide, dim=1, out=norm)
    zeros.copy_(_counted(torch.eq, values, 0.0))
    return parts.T


def _counted(compare: Callable[..., Tensor], values: Tensor, other: Tensor | float) -> Tensor:
    """How many elements of each row [n, m] compare so: [n]. Comparing into floats: to sum booleans takes five times as
    long. Rows of 2**24 elements, which float32 could not count, come in pieces."""
    return compare(values, other, out=torch.empty_like(values)).sum(1)


def checksum(rows: Tensor) -> Tensor:
    """[n, m] -> [n] int64: a sum over the exact bits, weighted by position, modulo 2**64.

    Equal bits in equal places give equal sums on any device and with any number of threads, because
    integer addition is exact; a permutation or one flipped bit gives another.
    """
    total = torch.zeros(rows.shape[0], dtype=torch.int64, device=rows.device)
    most = piece_of(rows)
    for start in range(0, rows.shape[1], most):
        total += _places_times(bits_of(rows[:, start : start + most]), start)
    return total * SIGNED_ODD


def _places_times(bits: Tensor, start: int) -> Tensor:
    """The sum of (2 * place + 1) * bits over rows [n, m], the first of which stands at place `start`: [n] int64.

    A 64-bit product of each element takes longer than all else. As place = row * 256 + column of a block, sums of its
    rows and of its columns are all that has to be weighted; short rows are multiplied in float64, which holds the sum
    exactly where no number has more than 32 bits."""
    count, length = bits.shape
    if length < _SHORT:
        if bits.element_size() > 4:
            return (bits * (_odd_numbers(length, 1, bits.device) + 2 * start)).sum(1)
        exact = bits.double()  # by a vector: a matrix of two columns takes six times as long
        weighted = exact.mv(_exact(bits.device)[:length]).to(torch.int64)
        return weighted + 2 * start * exact.sum(1).to(torch.int64) if start else weighted
    heights = length // _COLUMNS
    block = bits[:, : heights * _COLUMNS].to(torch.int64).view(count, heights, _COLUMNS)
    by_row = block.sum(2)
    total = (by_row * (_odd_numbers(heights, _COLUMNS, bits.device) + 2 * start)).sum(1)
    total += (block.sum(1) * (_odd_numbers(_COLUMNS, 1, bits.device) - 1)).sum(1)
    if rest := length - heights * _COLUMNS:
        total += _places_times(bits[:, -rest:], start + length - rest)
    return total


@lru_cache(1024)
def _odd_numbers(count: int, apart: int, device: torch.device) -> Tensor:
    """2 * place + 1 of so many places, `apart` from each other."""
    return 2 * apart * _numbers(count, device) + 1


@cache
def _exact(device: torch.device) -> Tensor:
    """2 * place + 1 of each place in a row of less than _SHORT."""
    return _odd_numbers(_SHORT, 1, device).double()


def _numbers(count: int, device: torch.device) -> Tensor:
    """0, 1, 2, … up to `count` - 1."""
    return _all_numbers(count.bit_length(), device)[:count]


@cache
def _all_numbers(bits: int, device: torch.device) -> Tensor:
    return torch.arange(1 << bits, dtype=torch.int64, device=device)


def measured_whole(x: Tensor) -> tuple[Tensor, Tensor]:
    """Parts [1, len(PARTS)] and checksum [1] of one tensor of any shape. One that is not contiguous is copied piece by
    piece, along its first dimension."""
    most = piece_of(x)
    if x.is_contiguous() or x.numel() <= most:
        return measured_rows(x.reshape(1, -1))
    found, total, start = [], torch.zeros(1, dtype=torch.int64, device=x.device), 0
    for part in x.split(max(1, most * len(x) // x.numel())):
        row = part.reshape(1, -1)
        found.append(measure(row))
        total += _places_times(bits_of(row), start)
        start += row.shape[1]
    return merged(torch.stack(found)), total * SIGNED_ODD


class TiledStatistics:
    """Statistics and checksum of a tensor [heads, T, K] that comes in tiles and is never held whole. Cells that come in
    no tile hold `outside`, 0 or -inf; those of `dtype`."""

    def __init__(
        self,
        shape: tuple[int, int, int],
        outside: float,
        dtype: torch.dtype,
        device: torch.device,
        waiting: Collected | None = None,
    ) -> None:
        """`waiting`: where the tiles are kept until they are measured together."""
        self.shape, self.outside = shape, outside
        self._waiting, self._numbers = waiting, list[int]()
        self._fill = int(bits_of(torch.full((1,), outside, dtype=dtype))[0])
        self._parts: list[Tensor] = []
        self._sum = torch.zeros((), dtype=torch.int64, device=device)
        self._cells, self._places = 0, 0  # of the tiles: how many, and the sum of 2 * place + 1

    def add(self, x: Tensor, head: int, row: int, key: int) -> None:
        """A tile [h, t, k], whose first element stands at those indices. Of a masked tensor the last t columns, where
        its infinities are, are measured apart: all else takes the short way, which a GPU has not."""
        _, rows, keys = x.shape
        if self._waiting is not None:
            self._add(x, head, row, key)
        elif self.outside and keys > 4 * rows > 4 and not x.is_cuda:
            self._cut(x[..., :-rows], head, row, key)
            self._cut(x[..., -rows:], head, row, key + keys - rows)
        else:
            self._cut(x, head, row, key)

    def _cut(self, x: Tensor, head: int, row: int, key: int) -> None:
        heads, rows, keys = x.shape
        if x.numel() <= piece_of(x):
            self._add(x, head, row, key)
            return
        most = max(1, piece_of(x) // keys)
        for at in range(heads):
            for first in range(0, rows, most):
                self._add(x[at : at + 1, first : first + most], head + at, row + first, key)

    def _add(self, block: Tensor, head: int, row: int, key: int) -> None:
        """Cells [h, t, k] that a processor's cache holds."""
        block = block.contiguous()
        heads, rows, keys = block.shape
        _, all_rows, stride = self.shape
        apart, base = (
            all_rows * stride,
            (head * all_rows + row) * stride + key,
        )  # places between heads, the first
        piece = Measurand(block, base, rows, keys, stride, apart)
        if self._waiting is not None:
            self._numbers.append(self._waiting.add(piece))
        elif cpu_pass.takes(block):
            parts, total = cpu_pass.measured([piece])
            self._parts.append(parts)
            self._sum += total[0]
        else:
            self._parts.append(_measured(block.reshape(1, -1)))
            bits = bits_of(block).to(torch.int64)
            firsts = 2 * stride * _numbers(rows, bits.device) + (2 * base + 1)
            by_head = firsts + 2 * apart * _numbers(heads, bits.device)[:, None]
            self._sum += (bits.sum(2) * by_head).sum() + 2 * (
                bits.sum((0, 1)) * _numbers(keys, bits.device)
            ).sum()
        self._cells += block.numel()
        first = heads * (2 * base + 1) + apart * heads * (heads - 1)  # over the heads, of their first cells
        self._places += keys * (rows * first + heads * stride * rows * (rows - 1)) + heads * rows * keys * (
            keys - 1
        )

    def close(self) -> tuple[Tensor, Tensor]:
        """Parts [1, len(PARTS)] and checksum [1] of the whole tensor."""
        left, total = self._left(), self._sum + _signed(self._places_left * self._fill)
        more = [torch.tensor([left], dtype=torch.float64, device=total.device)] if left else []
        return merged(torch.stack([*self._parts, *more])), (total * SIGNED_ODD).reshape(1)

    @property
    def waits(self) -> bool:
        """Whether tiles are measured with others, and put together by `put_together`."""
        return self._waiting is not None

    def put_together(
        self, parts: NDArray[np.float64], sums: NDArray[np.int64]
    ) -> tuple[NDArray[np.float64], int]:
        """Parts [len(PARTS)] and checksum, from those of all that waited."""
        own = parts[self._numbers]
        if left := self._left():
            own = np.vstack((own, left))
        total = sum(sums[self._numbers].tolist()) + self._places_left * self._fill * SIGNED_ODD
        return merge(own), _signed(total)

    @property
    def _places_left(self) -> int:
        """The sum of 2 * place + 1 of the cells in no tile: over all cells it is their number squared."""
        return math.prod(self.shape) ** 2 - self._places

    def _left(self) -> list[float]:
        """Parts of the cells in no tile, which hold `outside`; none if there are no such cells."""
        count = math.prod(self.shape) - self._cells
        if not count:
            return []
        if self.outside == 0:
            return [0.0, 0.0, 0.0, 0.0, 0.0, 0.0, float(count), float(count)]
        return [math.inf, -math.inf, 0.0, 0.0, 0.0, float(count), 0.0, 0.0]


def _signed(number: int) -> int:
    """Modulo 2**64, as a signed 64-bit number."""
    return (number + (1 << 63)) % (1 << 64) - (1 << 63)


def tensor_checksum(x: Tensor) -> int:
    """Checksum of one whole tensor as an unsigned 64-bit number."""
    return int(checksum(x.reshape(1, -1))[0]) % (1 << 64)
