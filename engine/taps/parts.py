"""What is kept of a tensor, in parts that can be merged, and what statistics they come to. Torch-free.

`measure` has the same of tensors on a device; here are the arrays of a host, which may be another engine's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

#: Columns of the parts: what can be merged over the pieces of one tap.
PARTS = ("min", "max", "sum", "norm", "nan", "inf", "zeros", "finite")
#: Weight of the first element in a checksum: 2**64 / golden ratio.
ODD = 0x9E3779B97F4A7C15

_SIGNED = {1: np.uint8, 2: np.int16, 4: np.int32, 8: np.int64}
_CHUNK = 1 << 20  # elements whose 64-bit products are alive at a time


def measured(values: NDArray[np.floating]) -> NDArray[np.float64]:
    """An array of any shape -> its parts [len(PARTS)]; minimum, maximum, sum and 2-norm are over the finite elements
    (inf, -inf, 0, 0 when there are none)."""
    finite = np.isfinite(values)
    kept = values[finite].astype(np.float64)
    if not kept.size:
        low, high = math.inf, -math.inf
    else:
        low, high = float(kept.min()), float(kept.max())
    nan = int(np.isnan(values).sum())
    return np.array(
        [
            low, high, kept.sum(), math.sqrt(float(np.dot(kept, kept))), nan, values.size - kept.size - nan,
            int((values == 0).sum()), kept.size,
        ]
    )  # fmt: skip


def checksum(bits: NDArray[np.generic]) -> int:
    """A sum over the exact bits of an array of numbers, weighted by position, modulo 2**64: that of
    `measure.tensor_checksum` on the same numbers."""
    words = np.ascontiguousarray(bits).reshape(-1).view(_SIGNED[bits.dtype.itemsize])
    total = 0
    for start in range(0, words.size, _CHUNK):
        part = words[start : start + _CHUNK].astype(np.int64).view(np.uint64)
        places = np.arange(start, start + part.size, dtype=np.uint64)
        total += int(np.sum(part * ((2 * places + 1) * np.uint64(ODD)), dtype=np.uint64))
    return total % (1 << 64)


def chained(sums: NDArray[np.uint64]) -> int:
    """Checksums of a tap's parts, in order -> one."""
    total = 0
    for part in sums.tolist():
        total = (total * 1_000_003 + part) % (1 << 64)
    return total


def unmask(parts: NDArray[np.float64], masked: Sequence[int]) -> NDArray[np.float64]:
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
