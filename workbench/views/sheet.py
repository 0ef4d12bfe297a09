"""A tensor as a sheet of rows and columns: how its axes lie, what each cell is, and what stands out on it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lockstep.workbench.views.axes import Axis, strides

#: Columns that a single row may be folded into: people count in these.
_FOLDS = (8, 10, 16, 20, 32, 40, 64, 80, 96, 100, 128, 160, 192, 200, 256)
_STRONGEST = 8

#: An element by the numbers of its axes: ("token", 22), ("head", 3), …
Coordinates = tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True)
class Arrangement:
    """How axes (by number) lie: those down the rows and those across, the last runs fastest; `sliced` one index at a
    time."""

    rows: tuple[int, ...]
    columns: tuple[int, ...]
    sliced: int | None = None

    def words(self, axes: Sequence[Axis]) -> str:
        """ "head × channel of one token"."""
        down, across = (
            "·".join(axes[i].name for i in side if len(axes[i]) > 1) for side in (self.rows, self.columns)
        )
        shown = " × ".join(side for side in (down, across) if side) or "one value"
        return shown if self.sliced is None else f"{shown} of one {axes[self.sliced].name}"


def arrangements(axes: Sequence[Axis], height: int = 0) -> tuple[Arrangement, ...]:
    """The ways to lay the axes out, the one to begin with first. `height`: the rows of pixels there are."""
    everything = tuple(range(len(axes)))
    long = [i for i in everything if len(axes[i]) > 1]
    if len(long) <= 1:
        return (Arrangement((), everything),)
    if len(long) == 2:
        first, second = long
        flat = Arrangement(everything[:second], everything[second:])
        return (flat, Arrangement((), everything[:first] + everything[first + 1 :], first))
    first, second, *_ = long
    others = (*everything[:first], *everything[first + 1 : second])
    one_of_first = Arrangement((*others, second), everything[second + 1 :], first)
    one_of_second = Arrangement(everything[:second], everything[second + 1 :], second)
    if axes[first].name in (
        "head",
        "kv head",
    ):  # maps of one head are what people know; together they lie in a column
        whole = Arrangement(everything[: second + 1], everything[second + 1 :])
        return (one_of_first, one_of_second, whole)
    # The heads of a few tokens under each other fill the room better than beside each other.
    short = len(axes[first]) * len(axes[second]) <= 1.25 * height
    down = second + 1 if short else second
    return (Arrangement(everything[:down], everything[down:]), one_of_first, one_of_second)


@dataclass(frozen=True, slots=True)
class Strong:
    """An element that is large, or no number."""

    row: int
    column: int
    value: float


@dataclass(frozen=True, slots=True, eq=False)
class Sheet:
    """`values[rows, columns]`, of which the first `count` are elements: the last row of a folded axis may be short, and
    is filled with -inf (or 0, where that is a value). `beside` is golden's value of each, where there is one."""

    values: NDArray[np.float32]
    beside: NDArray[np.float32] | None
    count: int
    axes: tuple[Axis, ...]
    arrangement: Arrangement
    index: int  # of the sliced axis
    masked: bool  # -inf is what a mask hides, and no value

    @property
    def folded(self) -> bool:
        """Whether the rows are parts of one long row."""
        return not self.arrangement.rows and len(self.values) > 1

    @property
    def elements(self) -> NDArray[np.float32]:
        """The values without what fills the last row, and without what a mask hides."""
        found = self.values.reshape(-1)[: self.count]
        return found[~np.isneginf(found)] if self.masked else found

    def coordinates(self, row: int, column: int) -> Coordinates:
        """What the cell is, in the order of the axes; nothing past the end."""
        place = row * self.values.shape[1] + column
        if place >= self.count:
            return ()
        found = dict(self.row(row) + (self.column(column) if not self.folded else self._across(place)))
        if self.arrangement.sliced is not None:
            axis = self.axes[self.arrangement.sliced]
            found[axis.name] = axis.numbers[self.index]
        return tuple((axis.name, found[axis.name]) for axis in self.axes)

    def row(self, row: int) -> Coordinates:
        """What all of a row has in common."""
        return () if self.folded else _unravel(self._under(self.arrangement.rows), row)

    def column(self, column: int) -> Coordinates:
        """What all of a column has in common; of a folded axis nothing."""
        return () if self.folded else self._across(column)

    def first_of(self, row: int) -> Coordinates:
        """What a folded row begins with."""
        return self._across(row * self.values.shape[1])

    def rank(self, row: int, column: int) -> int | None:
        """The rank that holds the cell; None where all do."""
        for axis in self.axes:
            if axis.ranks is not None:
                number = dict(self.coordinates(row, column)).get(axis.name)
                return None if number is None else axis.ranks[axis.numbers.index(number)]
        return None

    def strongest(self) -> tuple[Strong, ...]:
        """NaN and Inf first, then the largest magnitudes."""
        values = self.values.reshape(-1)[: self.count]
        size = np.abs(values)
        size[~np.isfinite(size)] = np.inf
        if self.masked:
            size[np.isneginf(values)] = -1.0
        many = min(_STRONGEST, int((size >= 0).sum()))
        found = np.argpartition(-size, many - 1)[:many] if many else np.empty(0, int)
        ordered = sorted(map(int, found), key=lambda i: (-size[i], i))
        across = self.values.shape[1]
        return tuple(Strong(i // across, i % across, float(values[i])) for i in ordered)

    def _under(self, side: tuple[int, ...]) -> list[Axis]:
        return [self.axes[i] for i in side]

    def _across(self, place: int) -> Coordinates:
        return _unravel(self._under(self.arrangement.columns), place)


def sheet(
    values: NDArray[np.float32],
    beside: NDArray[np.float32] | None,
    axes: Sequence[Axis],
    arrangement: Arrangement,
    index: int,
    room: tuple[int, int],
    masked: bool = False,
) -> Sheet:
    """Lay a tensor out, for a room of (columns, rows) of pixels: a single row is folded to fill it."""
    shape = tuple(len(axis) for axis in axes)
    sliced = arrangement.sliced
    index = 0 if sliced is None else index % shape[sliced]
    rows, columns = (strides([axes[i] for i in side]) for side in (arrangement.rows, arrangement.columns))
    count = rows * columns
    if not arrangement.rows:
        columns = fold(count, *room)
        rows = -(-count // columns)

    def laid(array: NDArray[np.float32]) -> NDArray[np.float32]:
        array = array.reshape(shape)
        array = array if sliced is None else array.take([index], axis=sliced)
        order = (*arrangement.rows, *([] if sliced is None else [sliced]), *arrangement.columns)
        flat = array.transpose(order).reshape(-1)
        if flat.size < rows * columns:
            nothing = -np.inf if not np.isneginf(flat).any() else 0.0
            flat = np.concatenate([flat, np.full(rows * columns - flat.size, nothing, flat.dtype)])
        return np.ascontiguousarray(flat.reshape(rows, columns))

    reported = None if beside is None else laid(beside)
    return Sheet(laid(values), reported, count, tuple(axes), arrangement, index, masked)


def fold(count: int, width: int, height: int) -> int:
    """How many columns make `count` elements fill `width` × `height` pixels best, with pixels that are about square."""
    if count <= 1 or width < 1 or height < 1:
        return max(1, min(count, 64))
    if count > width * height:  # pooled in any case: whole rows of a round number of elements
        return min(count, -(-count // height // 8) * 8 + 8)
    fitting = [n for n in (*_FOLDS, count, width) if n <= min(width, count) and -(-count // n) <= height]

    def filled(columns: int) -> float:
        rows = -(-count // columns)
        across, down = width // columns, height // rows
        even = min(across, down) / max(across, down)
        ragged = count / (rows * columns)
        return columns * across / width * rows * down / height * math.sqrt(even) * ragged

    return max(fitting or [width], key=filled)


def _unravel(axes: Sequence[Axis], place: int) -> Coordinates:
    found: list[tuple[str, int]] = []
    for axis in reversed(axes):
        place, at = divmod(place, len(axis))
        found.append((axis.name, axis.numbers[at]))
    return tuple(reversed(found))
