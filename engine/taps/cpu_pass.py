"""Statistics and checksums on a CPU in one pass: what `measure` takes ten operators of torch for, numba compiles.

Importing numba and loading kernels takes half a second, so they are used from the first forward pass on that has
enough to measure (`use`). Where they cannot be had, `refusal` states why, and torch does it.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lockstep.engine.compiled import kernels, on_threads, runs
from lockstep.engine.taps.one_pass import bits_of
from lockstep.engine.taps.parts import ODD, PARTS, checksums, merge
from lockstep.engine.taps.parts import measured as of_host
from lockstep.engine.text import first_line

#: Elements of a forward pass that are worth loading the kernels: torch takes some 5 ns for each.
WORTH = 1 << 22
#: Elements of the pieces that a long tensor is cut into, and that a thread is worth.
PIECE = 1 << 16
_KERNELS = "lockstep.engine.taps.cpu_kernels"
_TRIED = [1.5, np.nan, -3.0, np.inf, 0.0, -0.0, 1e-7, -np.inf, 7.0]


def _format(exponent: int, fraction: int) -> tuple[np.int32, np.int32, np.int32, np.float32]:
    """How the kernels read numbers of so many bits (`cpu_kernels`): mask, infinite, shift and scale."""
    infinite, mask = ((1 << exponent) - 1) << fraction, (1 << (exponent + fraction)) - 1
    between_biases = 128 - (1 << (exponent - 1))
    return np.int32(mask), np.int32(infinite), np.int32(23 - fraction), np.float32(2.0**between_biases)


_FORMATS = {
    torch.float32: _format(8, 23),
    torch.bfloat16: _format(8, 7),
    torch.float16: _format(5, 10),
}
_use = False


def use(elements: int) -> None:
    """From now on measure tensors here, if a forward pass of so many elements is worth it."""
    global _use
    _use = _use or elements >= WORTH


def takes(x: Tensor) -> bool:
    """Whether x is measured here."""
    return _use and x.device.type == "cpu" and refusal(x.dtype) is None


def rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """[n, m] -> of each row the parts [n, len(PARTS)] and the sum of (2 * place + 1) * bits [n], modulo 2**64."""
    count, length = x.shape
    if count == 1 and length > 2 * PIECE:
        return _long(x[0])
    parts, checks = np.empty((count, len(PARTS))), np.empty(count, np.int64)
    some = runs(count, PIECE // max(1, length))
    _measure(x, np.zeros(count, np.int64), some, [(parts[one], checks[one]) for one in some])
    return torch.from_numpy(parts), torch.from_numpy(checks)


def together(x: Tensor, places: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
    """The same of rows [n, m] as one, [1, len(PARTS)] and [1]; the first element of each stands at its place."""
    some = runs(len(x), PIECE // max(1, x.shape[1]))
    parts, checks = np.empty((len(some), len(PARTS))), np.empty(len(some), np.int64)
    _measure(x, places, some, [(parts[i : i + 1], checks[i : i + 1]) for i in range(len(some))])
    return torch.from_numpy(merge(parts)[None]), torch.from_numpy(checks.sum(keepdims=True))


def _long(x: Tensor) -> tuple[Tensor, Tensor]:
    """The same of [m]."""
    even = len(x) // PIECE
    first, check = together(x[: even * PIECE].view(even, PIECE), PIECE * np.arange(even))
    if even * PIECE == len(x):
        return first, check
    rest, more = together(x[None, even * PIECE :], np.array([even * PIECE]))
    whole = merge(np.concatenate((first.numpy(), rest.numpy())))
    return torch.from_numpy(whole[None]), check + more


def _measure(
    x: Tensor,
    places: NDArray[np.int64],
    some: list[slice],
    out: list[tuple[NDArray[np.float64], NDArray[np.int64]]],
) -> None:
    """Runs of rows, each on a thread, into the arrays of each."""
    bits, form = bits_of(x.detach()).numpy(), _FORMATS[x.dtype]

    def measure(number: int) -> None:
        kernels(_KERNELS).measure(bits[some[number]], places[some[number]], *form, *out[number])

    on_threads(measure, len(some))


@cache
def refusal(dtype: torch.dtype) -> str | None:
    """Why the kernels cannot be used; None where they have passed their test: parts and checksum as numpy has them."""
    if dtype not in _FORMATS:
        return f"no statistics in one pass of {str(dtype).removeprefix('torch.')}"
    x = torch.tensor(_TRIED, dtype=torch.float64).repeat(3, 99).to(dtype)
    x[1] = x[1].nan_to_num(1.0, 2.0, 3.0)
    try:
        parts, checks = (found.numpy() for found in rows(x))
    except Exception as error:  # whatever importing or compiling throws
        return first_line("no statistics in one pass here", error)
    sums = checksums(bits_of(x).numpy())
    same = checks.view(np.uint64) * np.uint64(ODD) == sums
    if not same.all() or not np.allclose(parts, of_host(x.double().numpy()), rtol=1e-12):
        return "no statistics in one pass here: the kernel is wrong on this CPU"
    return None
