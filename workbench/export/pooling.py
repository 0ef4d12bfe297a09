"""A matrix shrunk or grown to the pixels at hand, so that no outlier is lost.

Shrinking takes the element of largest magnitude of each bin, with its sign; NaN and Inf win over any number.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

#: What a pixel holds besides a number.
FINITE, INF, NAN, ABSENT = 0, 1, 2, 3
#: An element that is drawn larger than a pixel is at most so many times as long as it is wide, or as wide as long.
_STRETCH = 4.0
#: Pixels in a line of cells, one above the other.
_LINE = 2
#: Rows end where lines end, and columns are of one width, while that makes them no smaller than this share of what
#: they could be.
_EVEN = 0.85
#: Of so few rows, or columns, that holds whatever room it leaves.
_FEW = 4


@dataclass(frozen=True, slots=True)
class Pixels:
    """`values[h, w]` float32 (0 where not finite), `kind[h, w]` of FINITE, INF, NAN, ABSENT; the first row and
    column of the matrix in each pixel (`rows[h]`, `columns[w]`). Of several matrices both have an axis in front."""

    values: NDArray[np.float32]
    kind: NDArray[np.uint8]
    rows: NDArray[np.intp]
    columns: NDArray[np.intp]
    pooled: bool


def _edges(size: int, pixels: int) -> NDArray[np.intp]:
    """The first element of each of `pixels` bins over `size` elements; repeated when there are more bins."""
    return (np.arange(pixels) * size) // pixels


def pool(matrix: NDArray[np.float32], width: int, height: int, *, masked: bool = False) -> Pixels:
    """Shrink or grow `matrix[r, c]` to `width` × `height` pixels, as far as its elements are not stretched.
    Several of one shape, `matrix[n, r, c]`, are pooled at once, alike.

    `masked`: -inf means that there is nothing (a key that a mask hides); a pixel over nothing else is ABSENT.
    """
    hidden = np.isneginf(matrix) if masked else None
    if hidden is not None:
        matrix = np.where(hidden, np.float32(0), matrix)
    rows, columns = matrix.shape[-2:]
    tall, wide = _grown(rows, columns, width, height)
    row_edges, column_edges = _edges(rows, tall), _edges(columns, wide)
    if rows <= height and columns <= width:
        values = matrix[..., row_edges[:, None], column_edges]
        pooled = False
    else:
        values = _strongest(matrix, row_edges, column_edges)
        pooled = True
    nan, inf = np.isnan(values), np.isinf(values)
    kind = np.where(nan, NAN, np.where(inf, INF, FINITE)).astype(np.uint8)
    if hidden is not None:
        kind[_reduce(np.minimum, hidden, row_edges, column_edges)] = ABSENT
    return Pixels(
        np.where(kind == FINITE, values, 0).astype(np.float32), kind, row_edges, column_edges, pooled
    )


def _grown(rows: int, columns: int, width: int, height: int) -> tuple[int, int]:
    """The pixels down and across that a matrix takes. Rows are of one height, or some would seem to weigh more: what is
    left of the room stays empty. So are columns, which are narrow, where that costs little or they are few."""
    down, across = float(max(1, height // max(rows, 1))), max(1.0, width / max(columns, 1))
    across, down = min(across, _STRETCH * down), math.floor(min(down, _STRETCH * across))
    tall, wide = down // _LINE * _LINE, math.floor(across)
    if tall >= _EVEN * down or (rows <= _FEW and tall):
        down = tall
    if wide >= _EVEN * across or columns <= _FEW:
        across = wide
    return min(height, rows * down), min(width, round(columns * across))


def _strongest(
    matrix: NDArray[np.float32], row_edges: NDArray[np.intp], column_edges: NDArray[np.intp]
) -> NDArray[np.float32]:
    """The element of largest magnitude of each bin. NaN survives: maximum and minimum carry it along."""
    upper = _reduce(np.maximum, matrix, row_edges, column_edges)
    lower = _reduce(np.minimum, matrix, row_edges, column_edges)
    return np.where(np.abs(lower) > np.abs(upper), lower, upper)


def _reduce(
    ufunc: np.ufunc, matrix: NDArray[Any], row_edges: NDArray[np.intp], column_edges: NDArray[np.intp]
) -> NDArray[Any]:
    """`ufunc` over the bins of both axes; repeated edges (a side that grows) repeat their element."""
    ends = [*row_edges[1:], matrix.shape[-2]]
    along_rows = np.empty((*matrix.shape[:-2], len(row_edges), matrix.shape[-1]), matrix.dtype)
    with np.errstate(invalid="ignore"):
        # A bin of rows at a time, not `reduceat`: whole rows are reduced with the processor's vector instructions.
        for i, (first, end) in enumerate(zip(row_edges, ends, strict=True)):
            ufunc.reduce(matrix[..., first : max(end, first + 1), :], axis=-2, out=along_rows[..., i, :])
        reduced: NDArray[Any] = ufunc.reduceat(along_rows, column_edges, axis=-1)
    return reduced
