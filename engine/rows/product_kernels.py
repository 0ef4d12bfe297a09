"""The kernels of `products`, which numba compiles; imported by it alone.

A board of whole numbers stands between threads. `LEFT` chunks of a product are to be taken, each thread takes the next
by counting down, and counts it as `DONE`; where they lie stands from `PRODUCT` on, which is read after a chunk has been
taken: until that is done, nobody writes there. These stand apart, in lines of a cache of their own.
"""

# mypy: ignore-errors
import platform

import numpy as np
from llvmlite import ir
from numba import carray, njit, types
from numba.extending import intrinsic

from lockstep.engine.compiled import OPTIONS
from lockstep.engine.taps.cpu_kernels import pointer

LEFT, DONE, PRODUCT, SIZE = 0, 16, 32, 48
_PAUSE = "llvm.x86.sse2.pause" if platform.machine() in ("x86_64", "AMD64") else None


def _place(context, builder, signature, arguments):
    board = context.make_array(signature.args[0])(context, builder, arguments[0])
    return builder.gep(board.data, [arguments[1]])


@intrinsic
def load(typing, board, place):
    """board[place], and all that was written before it was."""

    def generate(context, builder, signature, arguments):
        return builder.load_atomic(_place(context, builder, signature, arguments), "acquire", 8)

    return types.int64(board, types.int64), generate


@intrinsic
def store(typing, board, place, number):
    """board[place] = number, after all that was written before."""

    def generate(context, builder, signature, arguments):
        builder.store_atomic(arguments[2], _place(context, builder, signature, arguments), "release", 8)
        return context.get_dummy_value()

    return types.void(board, types.int64, types.int64), generate


@intrinsic
def add(typing, board, place, number):
    """board[place] += number for all threads at once; what stood there."""

    def generate(context, builder, signature, arguments):
        place = _place(context, builder, signature, arguments)
        return builder.atomic_rmw("add", place, arguments[2], "seq_cst")

    return types.int64(board, types.int64, types.int64), generate


@intrinsic
def pause(typing):
    """Leave the core's units to others for a moment, where there is an instruction for that."""

    def generate(context, builder, signature, arguments):
        if _PAUSE is not None:
            module, plain = builder.module, ir.FunctionType(ir.VoidType(), [])
            builder.call(module.globals.get(_PAUSE) or ir.Function(module, plain, _PAUSE), [])
        return context.get_dummy_value()

    return types.void(), generate


@njit(**OPTIONS)
def dots(x, matrix, out, first, last):
    """x [T, columns], matrix [rows, columns] -> out [T, rows], of rows `first` to `last`.

    Four rows at a time, from the four quarters: a core reads several streams faster than one, as what it fetches ahead
    ends with each page of memory. The last row stands in for those that a quarter lacks.
    """
    tokens, columns = x.shape
    quarter = (last - first + 3) // 4
    for row in range(first, first + quarter):
        second, third = min(row + quarter, last - 1), min(row + 2 * quarter, last - 1)
        fourth = min(row + 3 * quarter, last - 1)
        a, b, c, d = matrix[row], matrix[second], matrix[third], matrix[fourth]
        for token in range(tokens):
            values = x[token]
            of_a = of_b = of_c = of_d = np.float32(0.0)
            for column in range(columns):
                value = values[column]
                of_a += a[column] * value
                of_b += b[column] * value
                of_c += c[column] * value
                of_d += d[column] * value
            out[token, row], out[token, second] = of_a, of_b
            out[token, third], out[token, fourth] = of_c, of_d


@njit(**OPTIONS)
def take_part(board):
    """Make chunks of the product on the board until none is left."""
    while load(board, LEFT) > 0:
        left = add(board, LEFT, -1)
        if left <= 0:
            break
        x, matrix, out, tokens, rows, columns, chunks = board[PRODUCT : PRODUCT + 7]
        number = chunks - left
        dots(
            carray(pointer(np.float32, x), (tokens, columns)),
            carray(pointer(np.float32, matrix), (rows, columns)),
            carray(pointer(np.float32, out), (tokens, rows)),
            number * rows // chunks,
            (number + 1) * rows // chunks,
        )
        add(board, DONE, 1)


@njit(**OPTIONS)
def multiply(board, x, matrix, out, tokens, rows, columns, chunks):
    """The product of the matrices at those addresses, with whoever takes part."""
    product = board[PRODUCT:]
    product[0], product[1], product[2] = x, matrix, out
    product[3], product[4], product[5], product[6] = tokens, rows, columns, chunks
    store(board, DONE, 0)
    store(board, LEFT, chunks)
    take_part(board)
    while load(board, DONE) < chunks:
        pause()


@njit(**OPTIONS)
def serve(board, patience):
    """Take part in one product after the other, until there was none for so many looks."""
    idle = 0
    while idle < patience:
        if load(board, LEFT) > 0:
            take_part(board)
            idle = 0
        else:
            pause()
            idle += 1
