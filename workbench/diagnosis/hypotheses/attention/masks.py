"""Which keys a query sees, by the positions of both: every form of mask as a function of a cell."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray

from lockstep.workbench.diagnosis.hypotheses.attention.tree import Change, Changes, Given
from lockstep.workbench.diagnosis.hypotheses.edits import Detail
from lockstep.workbench.diagnosis.operations.facts import rounded
from lockstep.workbench.diagnosis.recording import Array

Cells = NDArray[np.bool_]
#: Widths of windows, chunks and blocks beyond those of a short run.
_WIDTHS = (48, 63, 64, 65, 96, 127, 128, 129, 192, 255, 256, 257)
_BLOCKS = (2, 3, 4, 8, 16, 32, 64, 128)
#: Chunks in the distance at which tokens begin to be wrong; slots of a ring.
_CHUNKS_BETWEEN, _MOST_SLOTS = (1, 2, 3, 4), 256


def masks(
    keys: int, sizes: Sequence[int] = (), firsts: Sequence[int] = (1, 2, 4)
) -> Iterator[tuple[Detail, Change]]:
    """Every mask of a list: (detail, change). `keys`: how many there are at most; `sizes` are tried beside those of the
    list, `firsts` as the number of first keys that are seen beside a window."""
    for name, numbers, cells in _forms(keys, sizes, firsts):
        size = (float(numbers[0]) - 1,) if name == "without_key" else numbers
        yield (name, *size), _change(cells)


def _change(cells: Callable[[Cells, Given], Cells]) -> Change:
    def change(allowed: Array, given: Given) -> Array:
        right = allowed.astype(bool)
        return np.asarray(np.broadcast_to(cells(right, given), right.shape), dtype=np.float64)

    return change


def _forms(
    keys: int, sizes: Sequence[int], firsts: Sequence[int]
) -> Iterator[tuple[str, tuple[float | str, ...], Callable[[Cells, Given], Cells]]]:
    # Of two that see the same keys the first is named: in decode there is no later key that a lost window would hide.
    for name, cells in _PLAIN.items():
        yield name, (), cells
    for by in (1, 2, 3):
        yield "further", (by,), partial(_further, by)
        yield "less", (by,), partial(_less, by)
        yield "without_prompt_and", (by,), partial(_without_prompt_and, by)
    for size in sorted({*range(1, min(keys, 34) + 1), *(w for w in (*_WIDTHS, *sizes) if w <= keys)}):
        for name, of_size in _OF_SIZE.items():
            yield name, (size,), partial(of_size, size)
        for first in firsts:
            yield "window_and_first", (size, first), partial(_window_and_first, size, first)
    for size in sorted({size for size in (*_BLOCKS, *sizes) if 1 < size < 2 * keys}):
        for name, of_size in _OF_BLOCKS.items():
            yield name, (size,), partial(of_size, size)
    for size in (size for size in (1, *_BLOCKS) if 3 * size < keys):
        for kept in (0, 1):
            yield "every_other_block", (size, kept), partial(_every_other_block, size, kept)
        for count in (2, 3, 4) if size > 1 else ():
            yield "window_of_blocks", (size, count), partial(_window_of_blocks, size, count)
    for dtype in ("bfloat16", "float16"):
        yield "coarse", (dtype,), partial(_coarse, dtype)
    yield "itself_alone", (), lambda a, g: a & (g.far == 0)
    yield "anticausal", (), lambda a, g: g.far <= 0
    yield "inverted", (), lambda a, g: ~a


#: Masks without a number.
_PLAIN: Mapping[str, Callable[[Cells, Given], Cells]] = {
    "causal": lambda a, g: g.far >= 0,
    "all": lambda a, g: np.ones_like(a),
    "later_too": lambda a, g: a | (g.far < 0),
    "not_cached": lambda a, g: a & (np.arange(a.shape[2]) >= a.shape[2] - g.new),
    "cached_alone": lambda a, g: a & (np.arange(a.shape[2]) < a.shape[2] - g.new),
    "top_left": lambda a, g: g.rows[:, None] >= np.arange(a.shape[2])[None, :],
    "whole_pass": lambda a, g: a | (np.arange(a.shape[2]) >= a.shape[2] - g.new),
    "not_itself": lambda a, g: a & (g.far > 0),
    "without_prompt": lambda a, g: a & (g.key_at >= g.prompt),
}


def _without_prompt_and(more: int, a: Cells, g: Given) -> Cells:
    return np.asarray(a & (g.key_at >= g.prompt + more))


def _window_and_first(width: int, first: int, a: Cells, g: Given) -> Cells:
    return np.asarray((g.far >= 0) & ((g.far < width) | (g.key_at < first)))


def _every_other_block(size: int, kept: int, a: Cells, g: Given) -> Cells:
    return np.asarray(a & (g.key_at // size % 2 == kept))


def _window_of_blocks(size: int, count: int, a: Cells, g: Given) -> Cells:
    return np.asarray(a & (g.at[:, None] // size - g.key_at // size < count))


def _further(by: int, a: Cells, g: Given) -> Cells:
    return np.asarray(a | ((g.far < 0) & (g.far >= -by)))


def _coarse(dtype: str, a: Cells, g: Given) -> Cells:
    """Positions are compared in fewer bits."""
    at, key = (rounded(x.astype(np.float64), dtype) for x in (g.at, g.key_at))
    return np.asarray(np.where(g.far < 0, key[None, :] <= at[:, None], a))


def _less(by: int, a: Cells, g: Given) -> Cells:
    return np.asarray(a & (g.far >= by))


#: Masks of a size: of the size, the right mask, and what is given.
_OfSize = Mapping[str, Callable[[int, Cells, Given], Cells]]
_OF_SIZE: _OfSize = {
    "window": lambda w, a, g: (g.far >= 0) & (g.far < w),
    "without_first": lambda w, a, g: a & (g.key_at >= w),
    "first_alone": lambda w, a, g: a & (g.key_at < w),
    "without_key": lambda w, a, g: a & (g.key_at != w - 1),
    "prefix_seen": lambda w, a, g: a | (g.key_at < w),
    "prefix_kept": lambda w, a, g: a | ((g.key_at < w) & (g.far >= 0)),
    "without_newest": lambda w, a, g: a & (g.key_at <= g.key_at.max(initial=0) - w),
    "both_ways": lambda w, a, g: np.abs(g.far) < w,
    "window_ahead": lambda w, a, g: (g.far >= -1) & (g.far < w - 1),
    "chunk_without": lambda w, a, g: a & ((g.key_at >= w) | (g.at[:, None] < w)),
}
_OF_BLOCKS: _OfSize = {
    "chunks": lambda w, a, g: a & (g.at[:, None] // w == g.key_at // w),
    "whole_blocks": lambda w, a, g: a & (g.key_at < (g.at[:, None] + 1) // w * w),
    "own_block": lambda w, a, g: g.at[:, None] // w == g.key_at // w,
    "block_end": lambda w, a, g: g.key_at < (g.at[:, None] // w + 1) * w,
    "every_nth": lambda w, a, g: a & (g.far % w == 0),
}


def overwritten(given: Sequence[Given]) -> Iterator[tuple[Detail, Change]]:
    """Keys that a chunk of the prompt has overwritten in a ring of slots before its first tokens read them. Chunks
    begin where tokens begin to be wrong."""
    starts = [int(at) for one in given for at in _begins(one)]
    whole = math.gcd(*starts) if starts else 0
    keys = max((len(one.key_at) for one in given), default=0)
    for chunk in [whole // by for by in _CHUNKS_BETWEEN if whole and whole % by == 0 and whole // by > 1]:
        for slots in range(1, min(keys, _MOST_SLOTS) + 1):
            yield ("ring", float(chunk), float(slots)), _change(partial(_in_ring, chunk, slots))


def _begins(one: Given) -> NDArray[np.int64]:
    """The positions in a prompt at which wrong queries follow right ones."""
    axis = 1 if one.scope.ndim == 3 else 0
    wrong = one.scope.any(tuple(j for j in range(one.scope.ndim) if j != axis)) & (one.at < one.prompt)
    begins = wrong.copy()
    begins[1:] &= ~wrong[:-1]
    return np.asarray(one.at[begins & (one.at > 0)])


def _in_ring(chunk: int, slots: int, a: Cells, g: Given) -> Cells:
    written = np.minimum((g.at // chunk + 1) * chunk, g.prompt)[:, None]
    return np.asarray(a & ((g.key_at >= written - slots) | (g.at[:, None] >= g.prompt)))


def masks_as_numbers() -> Iterator[tuple[Detail, Changes]]:
    """Masks that are added to the scores, or multiplied with them, as the numbers that they are."""
    for name, change in _NUMBERS.items():
        yield (name,), {"allowed": lambda a, g: np.ones_like(a), "scores": change}
    for number in (-1.0, -2.0, -5.0, -10.0, -20.0, -50.0, -100.0, -1000.0):
        for how in ("added", "filled"):
            yield (how, number), hidden_by(how, number)


def hidden_by(how: str, number: float) -> Changes:
    """What hidden scores become of which a number takes the place, or to which it is added."""
    return {"hidden": partial(_added if how == "added" else _filled, number)}


def _added(number: float, x: Array, given: Given) -> Array:
    return x + number


def _filled(number: float, x: Array, given: Given) -> Array:
    return np.full_like(x, number)


#: Of all scores, none of them hidden.
_NUMBERS: dict[str, Change] = {
    "zero_times_inf": lambda s, g: np.where(g.allowed, np.nan, -np.inf),
    "inf_times_zero": lambda s, g: np.where(g.allowed, s, np.nan),
    "one_added": lambda s, g: np.where(g.allowed, s + 1.0, s),
    "hidden_one_added": lambda s, g: np.where(g.allowed, s, s + 1.0),
    "multiplied": lambda s, g: np.where(g.allowed, s, 0.0),
}
