"""A cache that is read by other strides than it was written: elements of the right numbers, each at a wrong place.

What was written lies in memory in some order of its axes; what is read is an affine function of (row, head, channel)
in these addresses. Its strides are found by vote: neighbours that were seen are looked up by value among what was
written, and the distance that most pairs have is the stride. Equal numbers elsewhere only add votes for other ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import permutations

import numpy as np
from numpy.typing import NDArray

from lockstep.workbench.diagnosis.hypotheses.variant import Variant
from lockstep.workbench.diagnosis.operations.site import Site
from lockstep.workbench.diagnosis.recording import Array
from lockstep.workbench.diagnosis.variants.caches.caches import cache_variant, what

_Integers = NDArray[np.int64]

_AXES, _ONE = ("rows", "heads", "D"), ("row", "head", "channel")
#: Pairs of neighbours that vote for a stride, and places at most at which a number is taken to have been written.
_PAIRS, _PLACES = 64, 16
#: The share of elements that a map must give exactly to be tried at all, and that may lie beyond what was written.
_EXACT, _BEYOND = 0.9, 0.25


@dataclass(frozen=True, slots=True)
class _Map:
    """Element (row, head, channel) is read at `start + strides · (row, head, channel)` of what was written in `order`
    of its axes. `right` are the strides that it was written by."""

    order: tuple[int, ...]
    start: int
    strides: tuple[int, ...]
    right: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def read_as(self) -> tuple[int, ...] | None:
        """The order of axes, densely packed, that would be read by these strides; None where there is no such."""
        if self.start:
            return None
        return next((o for o in permutations(range(3)) if _dense(self.shape, o) == self.strides), None)

    @property
    def changes(self) -> int:
        """How many figures differ from the right ones: one where another order alone explains all strides."""
        if self.read_as is not None:
            return 1
        return sum(a != b for a, b in zip(self.strides, self.right, strict=True)) + (self.start != 0)

    def given(self, written: Array, seen: Array, scope: NDArray[np.bool_]) -> int:
        """How many elements it gives exactly."""
        return int((self.read(written, np.full_like(seen, np.nan)) == seen)[scope].sum())

    def read(self, written: Array, beyond: Array) -> Array:
        """What it gives of the written rows; beyond them of `beyond`, for there may be anything."""
        flat = np.transpose(written, self.order).ravel()
        rows, heads, channels = np.ogrid[tuple(slice(n) for n in self.shape)]
        at = self.start + rows * self.strides[0] + heads * self.strides[1] + channels * self.strides[2]
        inside = (at >= 0) & (at < flat.size)
        return np.where(inside, flat[np.where(inside, at, 0)], beyond)


def index_maps(site: Site) -> Iterator[Variant]:
    """The cache read by other strides, in each pass by those that its own length gives."""
    if site.deviation is None or not all(part.fits for part in site.parts):
        return
    maps: dict[int, _Map] = {}
    for i, (part, scope) in enumerate(zip(site.parts, site.deviation.scopes, strict=True)):
        if scope.any():
            found = _fitted(part.expected, part.seen, np.asarray(scope))
            if found is None:
                return
            maps[i] = found
    guesses: list[Array | None] = [
        maps[i].read(part.expected, part.seen) if i in maps else None for i, part in enumerate(site.parts)
    ]
    if not maps:
        return
    shown = maps[max(maps, key=lambda i: site.parts[i].expected.size)]
    name, text = _in_words(site, shown)
    yield cache_variant(site, name, text, guesses, _figures(shown), shown.changes)


def _dense(shape: tuple[int, ...], order: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of (row, head, channel) in elements where the axes lie in that order."""
    strides, step = [0, 0, 0], 1
    for axis in reversed(order):
        strides[axis] = step
        step *= shape[axis]
    return tuple(strides)


def _fitted(written: Array, seen: Array, scope: NDArray[np.bool_]) -> _Map | None:
    """The map that gives most of what was seen in `scope`, with the fewest changes."""
    axes = [np.flatnonzero(scope.any(tuple({0, 1, 2} - {axis}))) for axis in range(3)]
    if not np.isfinite(seen[scope]).all() or seen[scope].size < 16:
        return None
    found = [m for o in permutations(range(3)) if (m := _voted(written, seen, scope, axes, o)) is not None]
    return min(found, key=lambda one: (-one.given(written, seen, scope), one.changes), default=None)


def _voted(
    written: Array, seen: Array, scope: NDArray[np.bool_], axes: list[_Integers], order: tuple[int, ...]
) -> _Map | None:
    flat = np.transpose(written, order).ravel()
    by_value = np.argsort(flat, kind="stable")
    values, right = flat[by_value], _dense(written.shape, order)
    strides = []
    for axis in range(3):
        stride = _stride(values, by_value, seen, axes, axis)
        strides.append(right[axis] if stride is None else stride)
    index = np.argwhere(scope)
    some = index[np.linspace(0, len(index) - 1, min(len(index), 4 * _PAIRS)).astype(int)]
    votes = [
        p - int(where @ np.array(strides))
        for where, places in _places(values, by_value, seen, some)
        for p in places
    ]
    start = _most(votes)
    if start is None:
        return None
    found = _Map(order, start, tuple(strides), right, written.shape)
    at = start + index @ np.array(strides)
    inside = (at >= 0) & (at < flat.size)
    exact = found.given(written, seen, scope) >= _EXACT * max(int(inside.sum()), 1)
    return found if exact and inside.mean() >= 1 - _BEYOND else None


def _stride(values: Array, by_value: _Integers, seen: Array, axes: list[_Integers], axis: int) -> int | None:
    """The distance in memory of neighbours along an axis; None where nothing shows it."""
    steps = np.flatnonzero(np.diff(axes[axis]) == 1)
    if not len(steps):
        return None
    grid = np.stack(
        np.meshgrid(*(a[steps] if i == axis else a for i, a in enumerate(axes)), indexing="ij"), -1
    )
    first = grid.reshape(-1, 3)
    first = first[np.random.default_rng(0).permutation(len(first))[: 4 * _PAIRS]]
    second = first + np.eye(3, dtype=np.int64)[axis]
    near = {tuple(where): places for where, places in _places(values, by_value, seen, first)}
    votes = []
    for where, places in _places(values, by_value, seen, second):
        before = near.get(tuple(where - np.eye(3, dtype=np.int64)[axis]))
        if before is not None:
            votes.append(np.unique(places[:, None] - before[None, :]))
    return _most(list(np.concatenate(votes))) if votes else None


def _places(
    values: Array, by_value: _Integers, seen: Array, index: _Integers
) -> Iterator[tuple[_Integers, _Integers]]:
    """Of each element where its number was written, if at not too many places."""
    wanted = seen[tuple(index.T)]
    low, high = np.searchsorted(values, wanted, "left"), np.searchsorted(values, wanted, "right")
    for where, a, b in zip(index, low, high, strict=True):
        if 0 < b - a <= _PLACES:
            yield where, by_value[a:b]


def _most(votes: list[int]) -> int | None:
    """The most frequent number."""
    if not votes:
        return None
    numbers, counts = np.unique(np.array(votes), return_counts=True)
    return int(numbers[counts.argmax()])


def _axes(order: tuple[int, ...]) -> str:
    return "[" + ", ".join(_AXES[axis] for axis in order) + "]"


def _in_words(site: Site, found: _Map) -> tuple[str, str]:
    """Name and sentence."""
    read, held = found.read_as, f"the cache of {what(site)}, {_axes(found.order)}, is"
    if read is not None:
        turned = "" if read[2] == found.order[2] else ": transposed"
        return "cache_layout", f"{held} read as {_axes(read)}{turned}"
    parts = [
        f"from a {name} to the next by {by} elements instead of {right}{_off(by - right, found)}"
        for name, by, right in zip(_ONE, found.strides, found.right, strict=True)
        if by != right
    ]
    if found.start:
        parts.append(f"from element {found.start} on{_off(found.start, found)}")
    return "cache_strides", f"{held} read at the wrong places: {', '.join(parts)}"


def _off(by: int, found: _Map) -> str:
    """A number of elements in rows, heads or channels."""
    for axis in sorted(range(3), key=lambda axis: -found.right[axis]):
        step = found.right[axis]
        if by % step == 0:
            count, unit = abs(by) // step, _ONE[axis]
            return f" ({count} {unit}{'s' * (count > 1)} {'less' if by < 0 else 'more'})"
    return ""


def _figures(found: _Map) -> Mapping[str, object]:
    read = found.read_as
    return {"written": _axes(found.order), "read": _axes(read) if read else "by strides"}
