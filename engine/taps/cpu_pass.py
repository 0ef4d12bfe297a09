"""Statistics and checksums on a CPU in one pass: what `measure` takes ten operators of torch for, numba compiles.

Importing numba and loading kernels takes half a second, so they are used from the first forward pass on that has
enough to measure (`use`). Where they cannot be had, `refusal` states why, and torch does it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lockstep.engine.compiled import kernels, on_threads, runs
from lockstep.engine.taps.measurands import FLAT, ROWS, Growing, Measurand, PerSequence, Piece, Runs, bits_of
from lockstep.engine.taps.parts import ODD, PARTS, checksums, merge_runs
from lockstep.engine.taps.parts import measured as of_host
from lockstep.engine.text import first_line

#: Elements of a forward pass that are worth loading the kernels: torch takes some 5 ns for each.
WORTH = 1 << 22
#: Elements of the pieces that a long tensor is cut into, and that a thread is worth.
PIECE = 1 << 16
_FIELDS = 6  # of a strip
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
    bits = bits_of(x.detach())
    count, length = bits.shape
    strips = np.empty((count, _FIELDS), np.int64)
    strips[:] = bits.data_ptr(), length, PIECE, PIECE, 0, PIECE
    strips[:, 0] += np.arange(count) * length * bits.itemsize
    _, parts, sums = _measured(strips, np.arange(count), x.dtype)
    return torch.from_numpy(parts), torch.from_numpy(sums)


def measured(pieces: Sequence[Piece | Tensor]) -> tuple[Tensor, Tensor]:
    """The same of each piece, wherever it lies, of each contiguous tensor, and of each sequence of what several have:
    [n, len(PARTS)] and [n]. None may be `Growing`, which only a step that a GPU replays needs."""
    kinds: defaultdict[torch.dtype, _Kind] = defaultdict(_Kind)
    number = 0
    for piece in pieces:
        if isinstance(piece, PerSequence):
            kinds[piece.x.dtype].each.setdefault(piece.runs, []).append((number, piece.x))
            number += piece.count
            continue
        if isinstance(piece, Measurand | Growing):
            kinds[piece.x.dtype].others.append((number, piece))
        else:
            kinds[piece.dtype].wholes.append((number, piece))
        number += 1
    found = [_measured(*kind.strips(), dtype) for dtype, kind in kinds.items()]
    of, parts, sums = (np.concatenate(columns) for columns in zip(*found, strict=True))
    order = np.argsort(of)
    return torch.from_numpy(parts[order]), torch.from_numpy(sums[order])


#: Strips (`cpu_kernels.measure`), and the number of what is measured that each is of.
_Strips = tuple[NDArray[np.int64], NDArray[np.int64]]


class _Kind:
    """What is to be measured of one dtype."""

    def __init__(self) -> None:
        self.each: dict[Runs, list[tuple[int, Tensor]]] = {}
        self.others: list[tuple[int, Measurand | Growing]] = []
        self.wholes: list[tuple[int, Tensor]] = []

    def strips(self) -> _Strips:
        """All strips, by the numbers."""
        tables = [_of_each(runs, some) for runs, some in self.each.items()]
        tables += [_of_others(self.others), _of_wholes(self.wholes)]
        strips, of = (np.concatenate(parts) for parts in zip(*tables, strict=True))
        order = np.argsort(of, kind="stable")
        return strips[order], of[order]


def _of_wholes(wholes: Sequence[tuple[int, Tensor]]) -> _Strips:
    """A strip each."""
    strips = np.full((len(wholes), _FIELDS), PIECE)
    strips[:, 0] = [x.data_ptr() for _, x in wholes]
    strips[:, 1], strips[:, 4] = [x.numel() for _, x in wholes], 0
    return strips, np.array([number for number, _ in wholes], np.int64)


def _of_each(runs: Runs, some: Sequence[tuple[int, Tensor]]) -> _Strips:
    """A strip a run of each tensor; the numbers are those of the first sequences."""
    sequences, first, elements, places = runs.table.T
    strips = np.full((len(some), len(first), _FIELDS), PIECE)
    strips[:, :, 0] = np.array([x.data_ptr() for _, x in some])[:, None] + first * some[0][1].itemsize
    strips[:, :, 1], strips[:, :, 4] = elements, places
    numbers = np.array([number for number, _ in some])[:, None] + sequences
    return strips.reshape(-1, _FIELDS), numbers.reshape(-1)


def _of_others(pieces: Sequence[tuple[int, Measurand | Growing]]) -> _Strips:
    """Of a tile a strip a head, of others one."""
    strips: list[tuple[int, ...]] = []
    of: list[int] = []
    for number, piece in pieces:
        if isinstance(piece, Growing):
            raise TypeError("a length that is on a GPU")
        mode, (address, base, height, length, stride, apart, elements) = piece.mode, piece.fields
        if mode == FLAT:
            strips.append((address, elements, PIECE, PIECE, base, PIECE))
        elif mode == ROWS:
            strips.append((address, elements, length, stride, 0, length))
        else:
            cells = height * length
            for head in range(max(1, elements // max(1, cells))):
                place = base + head * apart
                strips.append(
                    (address + head * cells * piece.x.itemsize, cells, length, length, place, stride)
                )
        of += [number] * (len(strips) - len(of))
    return np.array(strips, np.int64).reshape(-1, _FIELDS), np.array(of, np.int64)


def _measured(
    strips: NDArray[np.int64], of: NDArray[np.int64], dtype: torch.dtype
) -> tuple[NDArray[np.int64], NDArray[np.float64], NDArray[np.int64]]:
    """The numbers that strips are of, in ascending order, and of each parts [n, len(PARTS)] and sums [n]. Long strips
    are cut, and all are shared out over threads."""
    strips, of = _cut(strips, of, dtype.itemsize)
    parts, sums = np.empty((len(strips), len(PARTS))), np.empty(len(strips), np.int64)
    like, form = np.empty(0, np.int32 if dtype.itemsize == 4 else np.int16), _FORMATS[dtype]
    before = np.cumsum(strips[:, 1])
    ends = np.searchsorted(before, [some.stop for some in runs(int(before[-1]) if len(before) else 0, PIECE)])
    edges = np.unique(np.concatenate(([0], np.minimum(ends + 1, len(strips)), [len(strips)])))

    def measure(number: int) -> None:
        some = slice(edges[number], edges[number + 1])
        kernels(_KERNELS).measure(strips[some], like, *form, parts[some], sums[some])

    on_threads(measure, len(edges) - 1)
    first = np.flatnonzero(np.diff(of, prepend=-1))
    if len(first) == len(of):
        return of, parts, sums
    return of[first], merge_runs(parts, first), np.add.reduceat(sums, first)


def _cut(
    strips: NDArray[np.int64], of: NDArray[np.int64], size: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Strips of elements of `size` bytes, in parts of about a piece, each of whole rows."""
    rows = np.maximum(1, PIECE // np.maximum(1, strips[:, 2]))
    most = rows * strips[:, 2]
    counts = np.maximum(1, -(-strips[:, 1] // np.maximum(1, most)))
    if (counts == 1).all():
        return strips, of
    found = np.repeat(strips, counts, axis=0)
    rows, most = np.repeat(rows, counts), np.repeat(most, counts)
    number = np.arange(len(found)) - np.repeat(np.cumsum(counts) - counts, counts)
    found[:, 0] += number * rows * found[:, 3] * size
    found[:, 1] = np.minimum(most, found[:, 1] - number * most)
    found[:, 4] += number * rows * found[:, 5]
    return found, np.repeat(of, counts)


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
