"""The kernel of `q8_tiles`, which numba compiles; imported by it alone."""

# mypy: ignore-errors
import numpy as np
from numba import njit

from lockstep.engine.compiled import OPTIONS

BLOCK = 32
SIGN, MAGNITUDE, INFINITE = np.int32(-(1 << 31)), np.int32(0x7FFF), np.int32(0x7C00)
#: Between the biases of float32's and float16's exponents.
SCALE = np.float32(2.0**112)


@njit(**OPTIONS)
def number(bits):
    """The float32 of a float16's bits."""
    moved = (bits & SIGN) | ((bits & MAGNITUDE) << np.int32(13))
    if (bits & MAGNITUDE) >= INFINITE:
        moved |= np.int32(0x7F800000)
    return np.int32(moved).view(np.float32) * SCALE


@njit(**OPTIONS)
def products(codes, scales, start, stop, x, out, first, end):
    """Codes int8 [groups, columns, rows] and the bits of their scales [groups, blocks, rows], of groups `start` to
    `stop`, times x [T, columns], into columns `first` to `end` of `out`: of each block the sum of code * x, times its
    scale. Whether all of it is finite."""
    _, columns, rows = codes.shape
    tokens, finite = len(x), True
    factors, sums = np.empty(rows, np.float32), np.empty(rows, np.float32)
    totals = np.empty((tokens, rows), np.float32)
    for group in range(start, stop):
        totals[:] = 0
        for block in range(columns // BLOCK):
            for row in range(rows):
                factors[row] = number(np.int32(scales[group, block, row]))
            for token in range(tokens):
                sums[:] = 0
                # Four at a time, so that sums are read a fourth as often.
                for column in range(block * BLOCK, (block + 1) * BLOCK, 4):
                    a, b = codes[group, column], codes[group, column + 1]
                    c, d = codes[group, column + 2], codes[group, column + 3]
                    by_a, by_b = x[token, column], x[token, column + 1]
                    by_c, by_d = x[token, column + 2], x[token, column + 3]
                    for row in range(rows):
                        one = np.float32(a[row]) * by_a + np.float32(b[row]) * by_b
                        sums[row] += one + np.float32(c[row]) * by_c + np.float32(d[row]) * by_d
                for row in range(rows):
                    totals[token, row] += sums[row] * factors[row]
        to = first + group * rows
        for token in range(tokens):
            for row in range(min(rows, end - to)):
                out[token, to + row] = totals[token, row]
                finite &= np.isfinite(totals[token, row])
    return finite
