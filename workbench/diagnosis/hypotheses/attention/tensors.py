"""Edits of any tensor with labelled axes: the same list at every point of the tree.

An edit is given by its point and by (what is done, the axis, numbers); what it does is a `Change`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial

import numpy as np
from numpy.typing import NDArray

from lockstep.workbench.diagnosis.hypotheses.attention.tree import AXES, Change, Given
from lockstep.workbench.diagnosis.hypotheses.edits import Detail
from lockstep.workbench.diagnosis.hypotheses.head_orders import interleaved
from lockstep.workbench.diagnosis.hypotheses.roundings import ROUNDINGS
from lockstep.workbench.diagnosis.operations.facts import UNIT
from lockstep.workbench.diagnosis.recording import Array

Indices = NDArray[np.intp]
#: Which rows of a cache an edit is made to.
ROWS = ("all", "earlier", "new", "newest", "decoded", "prompt")
#: Rows at most of which ranges are tried.
_RANGES = 32
#: Block sizes of caches, and sizes of rings.
_SIZES = (2, 3, 4, 5, 6, 8, 12, 16, 32, 64)


def tensor_edits(point: str, unit: float) -> Iterator[tuple[Detail, Change]]:
    """What may be done to the tensor at a point: (detail, change). `unit`: the engine's own rounding."""
    for by in (0.0, -1.0, 2.0, 0.5):
        yield ("scaled", by), _scaled(by)
    for i, axis in enumerate(AXES[point]):
        for name, numbers, index in index_maps():
            yield (name, axis, *numbers), _taken(index, i)
    yield from orders(point)
    for dtype in coarser(unit):
        yield ("rounded", dtype), rounding(dtype)


def head_maps(heads: int) -> Iterator[tuple[Detail, Change]]:
    """Heads of a cache in each other's place, each order once."""
    known, axis = {tuple(range(heads))}, "kv head"
    for name, numbers, index in index_maps():
        order = tuple(index(heads).tolist())
        if order not in known:
            known.add(order)
            yield (name, axis, *numbers), _taken(index, AXES["k"].index(axis))


def coarser(unit: float) -> list[str]:
    """What is coarser than the engine's dtype."""
    return [dtype for dtype in ROUNDINGS if UNIT.get(dtype, 1.0) > unit]


def index_maps() -> Iterator[tuple[str, tuple[float, ...], Callable[[int], Indices]]]:
    """Maps of a slice's number, whatever the slices are: (name, numbers, n -> index); -1: nothing is there."""
    for name, index in _MAPS.items():
        yield name, (), index
    for names, numbers in (
        (("shifted", "rolled"), (1, -1, 2, -2, 3, -3, 4, -4, 8, -8)),
        (("divided", "repeated_in_parts", "woven"), (2, 4, 8)),
        (("modulo", "clamped", "ring", "overwritten", "blocks_exchanged"), _SIZES),
        (("kept_up_to", "kept_from"), _SIZES),
        (("kept_blocks",), _SIZES),
        (("last_of_blocks_lost", "first_of_blocks_lost"), (*_SIZES, 128, 256)),
    ):
        for number in numbers:
            for name in names:
                yield name, (number,), partial(_OF_SIZE[name], number)


_MAPS: Mapping[str, Callable[[int], Indices]] = {
    "reversed": lambda n: np.arange(n)[::-1],
    "all_first": lambda n: np.zeros(n, np.intp),
    "all_last": lambda n: np.full(n, n - 1),
    "exchanged_in_pairs": lambda n: np.minimum(np.arange(n) ^ 1, n - 1),
    "first_half": lambda n: np.where(np.arange(n) < n // 2, np.arange(n), -1),
    "second_half": lambda n: np.where(np.arange(n) >= n // 2, np.arange(n), -1),
}
#: Of a number, and of how many slices there are.
_OF_SIZE: Mapping[str, Callable[[int, int], Indices]] = {
    "shifted": lambda by, n: _inside(np.arange(n) + by, n),
    "rolled": lambda by, n: (np.arange(n) + by) % n,
    "divided": lambda g, n: np.arange(n) // g,
    "repeated_in_parts": lambda g, n: np.arange(n) % max(1, n // g),
    "woven": lambda g, n: interleaved(n, g) if n % g == 0 else np.arange(n),
    "modulo": lambda s, n: np.arange(n) % s,
    "clamped": lambda s, n: np.minimum(np.arange(n), s - 1),
    "ring": lambda s, n: _ring(n, s),
    "overwritten": lambda s, n: np.where(np.arange(n) + s < n, np.arange(n) + s, np.arange(n)),
    "kept_up_to": lambda s, n: np.where(np.arange(n) < s, np.arange(n), -1),
    "kept_from": lambda s, n: np.where(np.arange(n) >= s, np.arange(n), -1),
    "kept_blocks": lambda s, n: np.where(np.arange(n) < n // s * s, np.arange(n), -1),
    "last_of_blocks_lost": lambda s, n: np.where(np.arange(n) % s < s - 1, np.arange(n), -1),
    "first_of_blocks_lost": lambda s, n: np.where(np.arange(n) % s > 0, np.arange(n), -1),
    "blocks_exchanged": lambda s, n: _blocks_exchanged(n, s),
}


def _inside(index: Indices, n: int) -> Indices:
    return np.where((index >= 0) & (index < n), index, -1)


def _ring(n: int, size: int) -> Indices:
    """Slot i holds the last row that was written to it: i, i + size, …"""
    at = np.arange(n)
    slot = at % size
    return np.asarray(slot + (n - 1 - slot) // size * size)


def _blocks_exchanged(n: int, size: int) -> Indices:
    at = np.arange(n)
    return np.asarray(np.minimum(np.where(at // size % 2, at - size, at + size), n - 1))


def _scaled(by: float) -> Change:
    return lambda x, given: np.where(np.isfinite(x), x * by, x)


def _taken(index: Callable[[int], Indices], axis: int) -> Change:
    def change(x: Array, given: Given) -> Array:
        at = index(x.shape[axis])
        shape = [1, 1, 1]
        shape[axis] = -1
        return np.where((at >= 0).reshape(shape), np.take(x, np.maximum(at, 0), axis), 0.0)

    return change


def rounding(dtype: str) -> Change:
    """Rounded to a dtype, where it is finite."""

    def change(x: Array, given: Given) -> Array:
        found = ROUNDINGS[dtype](np.where(np.isfinite(x), x, 0.0).reshape(-1, x.shape[-1]))
        return (
            x
            if found is None
            else np.where(np.isfinite(x), np.asarray(found, np.float64).reshape(x.shape), x)
        )

    return change


def orders(point: str) -> Iterator[tuple[Detail, Change]]:
    """Axes exchanged in memory: written in one order and read in another."""
    first, second, third = AXES[point]
    if point in ("scores", "probs"):
        yield ("transposed",), lambda x, given: x.swapaxes(1, 2)
    yield ("reread", f"{second}, {first}"), lambda x, given: x.swapaxes(0, 1).reshape(x.shape)
    yield (
        ("reread", f"{first}, {second}"),
        lambda x, given: x.reshape(x.shape[1], x.shape[0], -1).swapaxes(0, 1),
    )
    yield ("reread", f"{third}, {second}"), lambda x, given: x.swapaxes(1, 2).reshape(x.shape)
    yield (
        ("reread", f"{second}, {third}"),
        lambda x, given: x.reshape(len(x), x.shape[2], x.shape[1]).swapaxes(1, 2),
    )
    yield (
        ("reread", f"{third}, {first}"),
        lambda x, given: x.transpose(1, 2, 0).reshape(_apart(x)).swapaxes(0, 1),
    )
    yield (
        ("reread", f"{first}, {third}"),
        lambda x, given: x.swapaxes(0, 1).reshape(x.shape[1], x.shape[2], len(x)).transpose(2, 0, 1),
    )


def _apart(x: Array) -> tuple[int, int, int]:
    """The shape with the second axis before the first: of a cache a matrix of rows for each head."""
    return x.shape[1], x.shape[0], x.shape[2]


def row_ranges(keys: int) -> Iterator[str]:
    """Single rows of a cache, and all from one on, or before one."""
    for row in range(min(keys, _RANGES)):
        yield f"row {row}"
        if 0 < row < keys - 1:
            yield f"from {row}"
            yield f"before {row}"


def spans(keys: int) -> Iterator[str]:
    """Rows from one to another."""
    for first in range(min(keys, _RANGES)):
        for last in range(first + 1, min(keys - 1, _RANGES)):
            yield f"rows {first}-{last}"


def of_rows(change: Change, which: str) -> Change:
    """The change made to some rows of a cache alone."""
    name, _, numbers = which.partition(" ")
    first, last = (int(number or 0) for number in numbers.partition("-")[::2])

    def some(x: Array, given: Given) -> Array:
        at = np.arange(len(x))
        match name:
            case "earlier":
                chosen = at < len(x) - given.new
            case "new":
                chosen = at >= len(x) - given.new
            case "newest":
                chosen = at == len(x) - 1
            case "decoded":
                chosen = at >= given.prompt
            case "prompt":
                chosen = at < given.prompt
            case "prompt_alone":
                return np.concatenate([change(x[: given.prompt], given), x[given.prompt :]])
            case "row":
                chosen = at == first
            case "rows":
                chosen = (at >= first) & (at <= last)
            case "from":
                chosen = at >= first
            case "before":
                chosen = at < first
            case _:
                raise ValueError(f"no rows are called {which!r}")
        return np.where(chosen[:, None, None], change(x, given), x)

    return change if which == "all" else some
