"""The kernels of `vectors`, which numba compiles; imported by it alone. Tensors come by the address of their first
element."""

# mypy: ignore-errors
import math

import numpy as np
from numba import carray, njit

from lockstep.engine.compiled import OPTIONS
from lockstep.engine.taps.cpu_kernels import pointer


@njit(**OPTIONS)
def rms_norm(x, weight, out, rows, width, eps):
    """x [rows, width], weight [width] -> out [rows, width]."""
    weights = carray(pointer(np.float32, weight), width)
    every = carray(pointer(np.float32, x), (rows, width))
    results = carray(pointer(np.float32, out), (rows, width))
    for row in range(rows):
        values, result, total = every[row], results[row], np.float32(0.0)
        for column in range(width):
            total += values[column] * values[column]
        scale = np.float32(1.0 / math.sqrt(total / width + eps))
        for column in range(width):
            result[column] = values[column] * scale * weights[column]


@njit(**(OPTIONS | {"fastmath": False}))  # two products and a sum are never made one: that would move bits
def rotate(x, cos, sin, out, tokens, heads, width, per_token, per_head):
    """x [tokens, heads, width], those of a token and of a head so many elements apart, cosines and sines [tokens,
    width / 2] -> out [tokens, heads, width]."""
    half = width // 2
    results = carray(pointer(np.float32, out), (tokens, heads, width))
    for token in range(tokens):
        cosines = carray(pointer(np.float32, cos + 4 * token * half), half)
        sines = carray(pointer(np.float32, sin + 4 * token * half), half)
        for head in range(heads):
            values = carray(pointer(np.float32, x + 4 * (token * per_token + head * per_head)), width)
            result = results[token, head]
            for pair in range(half):
                first, second = values[pair], values[half + pair]
                result[pair] = first * cosines[pair] - second * sines[pair]
                result[half + pair] = second * cosines[pair] + first * sines[pair]
