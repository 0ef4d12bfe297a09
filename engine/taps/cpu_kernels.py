"""The kernels of `cpu_pass`, which numba compiles; imported by it alone.

Numbers of 16 and 32 bits are read as the whole numbers that their bits are: `mask` has the bits of their magnitude, of
which `infinite` is that of an infinity; moved left by `shift` it is that of a float32, `scale` times too small.
"""

# mypy: ignore-errors
import math

import numpy as np
from numba import carray, njit, types
from numba.extending import intrinsic

from lockstep.engine.compiled import OPTIONS

#: Elements that are read twice, out of a processor's first cache.
PIECE = 2048
SIGN = np.int32(-(1 << 31))
NONE = np.int32((1 << 31) - 1)


@njit(**OPTIONS)
def value(bits, mask, shift, scale):
    """The number of those bits."""
    moved = (bits & SIGN) | ((bits & mask) << shift)
    return np.float64(np.int32(moved).view(np.float32) * scale)


@njit(**OPTIONS)
def ordered(bits, mask):
    """A whole number that is in the order of the number of those bits; of that, the bits again."""
    return np.int32(bits ^ ((bits >> np.int32(31)) & mask))


@njit(**OPTIONS)
def whole_numbers(x, mask):
    """Of bits [n]: the first and the last in the order of their numbers, the least magnitude, the sum, and the sum with
    each times its place."""
    low, high, least, total, weighted = NONE, SIGN, NONE, np.int64(0), np.int64(0)
    for place in range(len(x)):
        bits = np.int32(x[place])
        key = ordered(bits, mask)
        low, high, least = min(low, key), max(high, key), min(least, np.int32(bits & mask))
        total += np.int64(bits)
        weighted += np.int64(bits) * np.int64(place)
    return low, high, least, total, weighted


@njit(**OPTIONS)
def sums(x, mask, shift, scale):
    """Of bits [n] of finite numbers: the sum of these, and that of their squares."""
    total, squares = 0.0, 0.0
    for place in range(len(x)):
        number = value(np.int32(x[place]), mask, shift, scale)
        total += number
        squares += number * number
    return total, squares


@njit(**OPTIONS)
def add_each(x, mask, infinite, shift, scale, parts):
    """Add bits [n] of which some are of no finite number to all parts but the zeros."""
    for place in range(len(x)):
        bits = np.int32(x[place])
        magnitude = bits & mask
        if magnitude < infinite:
            number = value(bits, mask, shift, scale)
            parts[0], parts[1] = min(parts[0], number), max(parts[1], number)
            parts[2] += number
            parts[3] += number * number
            parts[7] += 1
        elif magnitude == infinite:
            parts[5] += 1
        else:
            parts[4] += 1


@njit(**OPTIONS)
def add(x, first, mask, infinite, shift, scale, parts):
    """Add bits [n], the first of which stands at place `first`, to the parts, of which the norm is still squared; what
    they add to the sum of (2 * place + 1) * bits."""
    check = np.int64(0)
    for start in range(0, len(x), PIECE):
        piece = x[start : start + PIECE]
        low, high, least, total, weighted = whole_numbers(piece, mask)
        check += 2 * weighted + (2 * (first + start) + 1) * total
        if least == 0:
            for place in range(len(piece)):
                parts[6] += (np.int32(piece[place]) & mask) == 0
        if max(ordered(high, mask) & mask, ordered(low, mask) & mask) >= infinite:
            add_each(piece, mask, infinite, shift, scale, parts)
            continue
        added, squares = sums(piece, mask, shift, scale)
        parts[0] = min(parts[0], value(ordered(low, mask), mask, shift, scale))
        parts[1] = max(parts[1], value(ordered(high, mask), mask, shift, scale))
        parts[2] += added
        parts[3] += squares
        parts[7] += len(piece)
    return check


@intrinsic
def pointer(typing, like, address):
    """A pointer to elements as those of the array `like`, or of that dtype."""

    def generate(context, builder, signature, arguments):
        return builder.inttoptr(arguments[1], context.get_value_type(signature.return_type))

    return types.CPointer(like.dtype)(like, types.int64), generate


@njit(**OPTIONS)
def measure(strips, like, mask, infinite, shift, scale, parts, checks):
    """Strips [n, 6] -> parts [n, 8] and sums of (2 * place + 1) * bits [n]. Of each: the address of its first element,
    bits as those of `like`; how many elements, in rows of how many, these how far from each other; the place of the
    first, and how far the places of rows are from each other."""
    parts[:, 0], parts[:, 1], parts[:, 2:], checks[:] = math.inf, -math.inf, 0.0, 0
    for strip in range(len(strips)):
        address, left, length, pitch, place, stride = strips[strip]
        while left > 0:
            x = carray(pointer(like, address), (min(left, length),))
            checks[strip] += add(x, place, mask, infinite, shift, scale, parts[strip])
            address, place, left = address + pitch * like.itemsize, place + stride, left - length
        parts[strip, 3] = math.sqrt(parts[strip, 3])
