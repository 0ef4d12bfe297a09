"""What is kept of a tensor, in parts that can be merged, and what statistics they come to. Torch-free.

`measure` has the same of tensors on a device; here are the arrays of a host, which may be another engine's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

#: Checksums of a tap's parts are the digits of a number in this base.
_CHAIN = np.uint64(1_000_003)
#: Columns of the parts: what can be merged over the pieces of one tap.
PARTS = ("min", "max", "sum", "norm", "nan", "inf", "zeros", "finite")
#: Weight of the first element in a checksum: 2**64 / golden ratio.
ODD = 0x9E3779B97F4A7C15

_SIGNED = {1: np.uint8, 2: np.int16, 4: np.int32, 8: np.int64}
_CHUNK = 1 << 20  # elements whose 64-bit products are alive at a time


def measured(rows: NDArray[np.floating]) -> NDArray[np.float64]:
    """Arrays of equal size [n, m] -> the parts of each [n, len(PARTS)]; minimum, maximum, sum and 2-norm are over the
    finite elements (inf, -inf, 0, 0 when there are none)."""
    finite = np.isfinite(rows)
    kept = np.where(finite, rows, 0).astype(np.float64)
    counts, nan = finite.sum(axis=1), np.isnan(rows).sum(axis=1)
    return np.stack(
        [
            rows.min(axis=1, where=finite, initial=math.inf).astype(np.float64),
            rows.max(axis=1, where=finite, initial=-math.inf).astype(np.float64),
            kept.sum(axis=1),
            np.sqrt((kept * kept).sum(axis=1)),
            nan,
            rows.shape[1] - counts - nan,
            (rows == 0).sum(axis=1),
            counts,
        ],
        axis=1,
    )


def checksums(rows: NDArray[np.generic]) -> NDArray[np.uint64]:
    """A sum over the exact bits of each array of numbers, weighted by position, modulo 2**64: [n, m] -> [n]. That of
    `measure.checksum` on the same numbers."""
    words = np.ascontiguousarray(rows).view(_SIGNED[rows.dtype.itemsize])
    totals = np.zeros(len(words), np.uint64)
    for start in range(0, words.shape[1], _CHUNK):
        part = words[:, start : start + _CHUNK].astype(np.int64).view(np.uint64)
        places = np.arange(start, start + part.shape[1], dtype=np.uint64)
        totals += np.sum(part * ((2 * places + 1) * np.uint64(ODD)), axis=1, dtype=np.uint64)
    return totals


def chained(sums: NDArray[np.uint64]) -> int:
    """Checksums of a tap's parts, in order -> one."""
    total = 0
    for part in sums.tolist():
        total = (total * int(_CHAIN) + part) % (1 << 64)
    return total


def unmask(parts: NDArray[np.float64], masked: Sequence[int] | NDArray[np.float64]) -> NDArray[np.float64]:
    """Parts [n, len(PARTS)] without the infinities that a correct mask has put there, `masked` of each row.

    Fewer infinities than that (a mask that is missing, or NaN in its place) count as none.
    """
    kept = parts.copy()
    kept[:, 5] = np.maximum(parts[:, 5] - np.asarray(masked), 0)
    return kept


def merge(parts: NDArray[np.float64]) -> NDArray[np.float64]:
    """The parts of several pieces of one tensor [n, len(PARTS)] -> those of the whole."""
    whole: NDArray[np.float64] = parts.sum(axis=0)
    whole[0], whole[1] = parts[:, 0].min(), parts[:, 1].max()
    whole[3] = math.sqrt(float((parts[:, 3] ** 2).sum()))
    return whole


def merge_runs(parts: NDArray[np.float64], first: NDArray[np.int64]) -> NDArray[np.float64]:
    """The same of each run of pieces that stand together, from the number of its first."""
    low, high, norm = (np.ascontiguousarray(parts[:, column]) for column in (0, 1, 3))
    whole: NDArray[np.float64] = np.add.reduceat(parts, first)
    whole[:, 0] = np.minimum.reduceat(low, first)
    whole[:, 1] = np.maximum.reduceat(high, first)
    whole[:, 3] = np.sqrt(np.add.reduceat(norm**2, first))
    return whole


@dataclass(frozen=True, slots=True)
class Groups:
    """Pieces of several tensors: `numbers` of the groups, the `order` in which those of one stand together, the `first`
    of each group in it, and what a piece's checksum is multiplied by in that of its group."""

    numbers: NDArray[np.int64]
    order: NDArray[np.int64]
    first: NDArray[np.int64]
    weights: NDArray[np.uint64]

    @classmethod
    def of(cls, groups: NDArray[np.int64]) -> Self:
        """From the group's number of each piece [n]."""
        order = np.argsort(groups, kind="stable")
        numbers, first, counts = np.unique(groups[order], return_index=True, return_counts=True)
        behind = np.repeat(first + counts - 1, counts) - np.arange(len(groups))
        powers = np.full(int(counts.max(initial=1)), _CHAIN)
        powers[0] = 1
        return cls(numbers, order, first, np.cumprod(powers, dtype=np.uint64)[behind])  # modulo 2**64

    def merged(
        self, parts: NDArray[np.float64], sums: NDArray[np.uint64]
    ) -> tuple[NDArray[np.float64], NDArray[np.uint64]]:
        """`merge` and `chained` of all pieces [n, len(PARTS)] of each group."""
        pieces, sums = parts.take(self.order, 0), sums.take(self.order)
        if len(self.numbers) == len(pieces):
            return pieces, sums
        return merge_runs(pieces, self.first), np.add.reduceat(sums * self.weights, self.first)


def statistics(parts: NDArray[np.float64]) -> NDArray[np.float32]:
    """Parts [n, 8] -> statistics [n, 8] in the order of `names.STATISTICS`.

    Without any finite element minimum, maximum, mean, rms and absmax are NaN.
    """
    low, high, total, norm, nan, inf, zeros, count = parts.T
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        mean, rms = total / count, norm / np.sqrt(count)
        absmax = np.maximum(np.abs(low), np.abs(high))
        table = np.stack([low, high, mean, rms, absmax, nan, inf, zeros], axis=1)
        table[count == 0, :5] = np.nan
        return table.astype(np.float32)
